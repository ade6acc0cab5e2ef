"""Measures the console: what watching costs the server, and how long frames take while scrolling.

    python benchmarks/console.py

It needs Chromium, and downloads the model smollm2 if it is missing. Run nothing else at the same
time.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # the path of a script does not include the tests
from tests.api.live import live  # noqa: E402 - after the line above
from tests.api.scripted import Front, ScriptedRuntime  # noqa: E402
from tests.e2e.test_console import ARGUMENTS, CHROMIUM, Kept  # noqa: E402
from tests.support.server import running  # noqa: E402

WATCHERS, STREAMS, TOKENS, ROUNDS = 10, 8, 200, 5
ENTRIES, MESSAGES = 10_000, 2_000
SCROLLS = 60
#: Scrolls a box step by step, and returns the time between frames in milliseconds.
SCROLL = """
async ([selector, steps]) => {
  const box = document.querySelector(selector);
  const times = [];
  let last = await new Promise(requestAnimationFrame);
  for (let step = 1; step <= steps; step += 1) {
    const share = step % 2 ? step / steps : 1 - step / steps;
    box.scrollTop = (box.scrollHeight - box.clientHeight) * share;
    const now = await new Promise(requestAnimationFrame);
    times.push(now - last);
    last = now;
  }
  return times;
}
"""
#: Puts a conversation of so many messages into the browser's store.
STORE = """
async (count) => {
  const messages = {};
  let parent = null;
  for (let at = 0; at < count; at += 1) {
    const id = `m${at}`;
    const code = "\\n\\n~~~\\ncode " + at + "\\n~~~";
    const text = "Message " + at + " with **bold** words:\\n\\n- one\\n- two" + code;
    messages[id] = { id, parent, role: at % 2 ? "assistant" : "user", text };
    parent = id;
  }
  const opened = await new Promise((resolve) => {
    const opening = indexedDB.open("rekindle-console", 1);
    opening.onsuccess = () => resolve(opening.result);
  });
  const conversation = {
    id: "long", title: "A long conversation", model: "tiny", system: "", settings: {}, tools: "",
    messages, leaf: parent, usedAt: Date.now() + 1000,
  };
  await new Promise((resolve) => {
    const store = opened.transaction("conversations", "readwrite").objectStore("conversations");
    store.put(conversation).onsuccess = resolve;
  });
}
"""


def main() -> None:
    decoding = watching_cost()
    print(f"decoding with {WATCHERS} watchers, of the speed without: {decoding:.3f}")
    for name, value in page_times().items():
        print(f"{name}: {value}")


# -- the server ------------------------------------------------------------------------------------


def watching_cost() -> float:
    """Decode streams with and without watchers by turns. Returns the ratio of the medians."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(
            running("smollm2", folder, environment={"REKINDLE_THREADS": "2"})
        )
        speeds: dict[bool, list[float]] = {False: [], True: []}
        _decode(server.url)  # the first round is not counted
        for _ in range(ROUNDS):
            for is_watched in (False, True):
                with _watching(server.url, WATCHERS if is_watched else 0):
                    speeds[is_watched].append(_decode(server.url))
    return median(speeds[True]) / median(speeds[False])


def _decode(url: str) -> float:
    """Tokens per second of all streams together."""
    begun_s = time.monotonic()
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(_stream, [url] * STREAMS, range(STREAMS)))
    return STREAMS * TOKENS / (time.monotonic() - begun_s)


def _stream(url: str, number: int) -> None:
    body = {
        "messages": [{"role": "user", "content": f"Tell me story number {number}."}],
        "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "temperature": 0.7,
    }  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as answer:
        for _ in answer.iter_raw():
            pass


@contextmanager
def _watching(url: str, count: int) -> Iterator[None]:
    with ThreadPoolExecutor(max(count, 1)) as pool, httpx.Client(timeout=300) as client:
        answers = [client.stream("GET", f"{url}/v1/internal/live") for _ in range(count)]
        with ExitStack() as stack:
            opened = [stack.enter_context(answer) for answer in answers]
            readers = [pool.submit(_read, answer) for answer in opened]
            yield
            for answer in opened:
                answer.close()
        for reader in readers:
            reader.exception()  # they end when their answers are closed


def _read(answer: httpx.Response) -> None:
    for _ in answer.iter_raw():
        pass


# -- the page --------------------------------------------------------------------------------------


def page_times() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with live(Front(ScriptedRuntime(answers=Kept(ENTRIES)))) as server, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(server.url)
        page.wait_for_selector(".composer textarea")
        paints = page.evaluate("performance.getEntriesByType('paint').map(each => each.startTime)")
        found["first paint, ms"] = [round(each) for each in paints]
        page.goto(f"{server.url}/#cache")
        page.wait_for_selector(f"text={ENTRIES:,} entries")
        found[f"slowest frames over {ENTRIES} entries, ms"] = _frames(page, ".rows")
        page.evaluate(STORE, MESSAGES)
        page.goto(f"{server.url}/#chat")
        page.reload()
        page.wait_for_selector("text=Message 1999")
        found[f"slowest frames over {MESSAGES} messages, ms"] = _frames(page, ".messages")
        browser.close()
    return found


def _frames(page: Page, selector: str) -> list[int]:
    times = page.evaluate(SCROLL, [selector, SCROLLS])
    return sorted(map(round, times))[-3:]


if __name__ == "__main__":
    if not (CHROMIUM and shutil.which(CHROMIUM)):
        raise SystemExit("install Chromium first: apt install chromium")
    main()
