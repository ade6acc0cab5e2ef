"""The console in a real browser: over scripted models, and over a real server.

A browser is needed: Debian's `chromium`, or any Chromium or Chrome on the path.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from rekindle.errors import BadRequest
from rekindle.protocol.admin import (
    AdminOp,
    AdminResult,
    Branch,
    BranchText,
    PrefixTree,
    ShowBranch,
    ShowTree,
)
from rekindle.protocol.events import (
    CacheReport,
    Divergence,
    Prefill,
    Reason,
    Started,
)
from tests.api.cache.entries import entry, holding
from tests.api.live import Live, live, soon
from tests.api.scripted import (
    Front,
    Pause,
    ScriptedRuntime,
    calling,
    delta,
    finished,
    hit,
    reasoning,
    reply,
)
from tests.support.rounds import rounds
from tests.support.server import Server, free_port, running
from tests.support.tiny import write_llama

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
AXE = Path(__file__).parents[2] / "console/node_modules/axe-core/axe.min.js"
COUNT = rounds(2500, long=10_000)  # entries
VIEWS = ("chat", "cache", "live", "models", "connect")
#: The browser asks nobody but the tested server.
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
HOSTILE = """
<script>window.harmed = 1</script><img src=x onerror="window.harmed = 2">
<iframe src="/docs"></iframe><svg onload="window.harmed = 3"></svg>
<style>body { display: none }</style><form action="/v1/cache/gc"></form>

[click me](javascript:window.harmed=4) [data](data:text/html,<script>1</script>)
[fine](https://example.org/)
![picture](http://192.0.2.1/pixel.png?secret) \u202egnp.exe \x1b[31mred\x1b[0m
```html
<b onclick="window.harmed = 5">code</b>
```
"""

pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="no Chromium is installed; `apt-get install chromium` runs these tests"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        expect.set_options(timeout=30_000)
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


class Visitor:
    """Somebody with a page. Errors of the page and requests to other servers fail the test."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.url = url
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.trouble: list[str] = []
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("console", self._record)
        self.page.on("request", self._check)
        self.page.on("dialog", lambda dialog: self.trouble.append(dialog.message))
        self.page.goto(url)

    def _record(self, message: ConsoleMessage) -> None:
        if "Content Security Policy" in message.text:
            self.trouble.append(message.text)

    def _check(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.trouble.append(f"a request to {request.url}")

    def go(self, view: str) -> Page:
        self.page.goto(f"{self.url}/#{view}")
        expect(self.page.locator("nav a[aria-current]")).to_have_attribute("href", f"#{view}")
        return self.page

    def ask(self, text: str) -> None:
        self.page.get_by_role("textbox", name="Message").fill(text)
        self.page.keyboard.press("Enter")

    def leave(self) -> None:
        self.context.close()
        assert self.trouble == []


Visit = Callable[..., Visitor]


@pytest.fixture
def serve() -> Iterator[Callable[..., Live]]:
    """Starts servers over scripted models. They stop after the visitors have left."""
    with contextlib.ExitStack() as servers:
        yield lambda *runtimes, **settings: servers.enter_context(
            live(Front(*runtimes, **settings))
        )


@pytest.fixture
def visit(serve: Any, browser: Browser) -> Iterator[Visit]:
    visitors: list[Visitor] = []

    def come(url: str, **context: Any) -> Visitor:
        visitors.append(Visitor(browser, url, **context))
        return visitors[-1]

    yield come
    for visitor in visitors:
        visitor.leave()


@pytest.fixture
def chat(visit: Visit, serve: Any) -> Callable[..., tuple[Visitor, ScriptedRuntime]]:
    """Opens the chat of a server whose model plays these scripts."""

    def opened(*scripts: Any, **options: Any) -> tuple[Visitor, ScriptedRuntime]:
        runtime = ScriptedRuntime(*scripts, **options)
        return visit(serve(runtime).url), runtime

    return opened


def messages(visitor: Visitor, role: str = "assistant") -> Any:
    return visitor.page.locator(f".message.{role}")


# -- chat ------------------------------------------------------------------------------------------


def test_a_turn_shows_what_was_reused(chat: Any) -> None:
    end = finished(prompt_tokens=100, completion_tokens=2, cache=hit(80, "disk"))
    visitor, runtime = chat(reply("Hel", "lo", end=end))
    visitor.ask("Hi there")
    expect(messages(visitor)).to_contain_text("Hello")
    turn = visitor.page.locator(".turn")
    expect(turn).to_contain_text("80 reused from disk")
    expect(turn).to_contain_text("20 computed")
    expect(turn.get_by_role("img")).to_have_attribute("aria-label", re.compile("80 tokens reused"))
    assert runtime.requested.messages == [{"role": "user", "content": "Hi there"}]


def test_a_partial_hit_says_why_and_marks_where_the_prompt_differs(chat: Any) -> None:
    where = Divergence(1, "user", "the red ship", "the blue ship")
    cache = CacheReport("partial_hit", Reason.TURN_CHANGED, 5, 12, "ram", diverged_at=where)
    visitor, _ = chat(reply("One"), reply("Two", end=finished(cache=cache)))
    visitor.ask("first")
    expect(messages(visitor)).to_have_count(1)
    visitor.ask("second")
    visitor.page.get_by_text("Why not more?").last.click()
    why = visitor.page.locator(".why").last
    expect(why).to_contain_text("A message differs from the stored conversation.")
    assert why.locator("mark").all_text_contents() == ["red ship", "blue ship"]
    expect(visitor.page.locator(".diverged")).to_be_visible()


def test_a_long_prompt_shows_how_far_it_is_read_and_can_be_stopped(chat: Any) -> None:
    visitor, runtime = chat([Started(0, 8000, 0), Prefill(0, 2000, 8000), Pause()])
    visitor.ask("a long text")
    expect(visitor.page.locator(".reading")).to_contain_text("2,000 of 8,000 tokens")
    visitor.page.get_by_role("button", name="Stop").click()
    expect(messages(visitor)).to_contain_text("Stopped.")
    expect(visitor.page.get_by_role("button", name="Send")).to_be_visible()
    soon(lambda: runtime.cancelled_turns == 1)


def test_an_edited_message_is_a_version_next_to_the_first(chat: Any) -> None:
    visitor, runtime = chat(reply("One"), reply("Two"), reply("Three"))
    page = visitor.page
    visitor.ask("first")
    expect(messages(visitor)).to_contain_text("One")
    page.get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Edit").fill("changed")
    page.get_by_role("button", name="Send the changed message").click()
    expect(messages(visitor)).to_contain_text("Two")
    assert runtime.requests[1].messages == [{"role": "user", "content": "changed"}]
    page.get_by_role("button", name="Show the previous version").click()
    expect(messages(visitor)).to_contain_text("One")
    page.get_by_role("button", name="Try again").click()
    expect(messages(visitor)).to_contain_text("Three")
    assert runtime.requests[2].messages == [{"role": "user", "content": "first"}]
    expect(messages(visitor).locator(".versions")).to_contain_text("2/2")


def test_conversations_are_kept_in_the_browser(chat: Any) -> None:
    visitor, _ = chat(reply("One"))
    page = visitor.page
    visitor.ask("remember me")
    expect(page.locator(".turn")).to_have_count(1)
    page.get_by_role("button", name="New chat").first.click()
    expect(messages(visitor)).to_have_count(0)
    page.wait_for_timeout(600)  # conversations are written after a short rest
    page.reload()
    page.get_by_role("button", name="remember me", exact=True).click()
    expect(messages(visitor)).to_contain_text("One")
    page.get_by_role("button", name="Delete this conversation: remember me").click()
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_role("button", name="remember me", exact=True)).to_be_visible()


def test_reasoning_and_calls_are_folded_and_a_result_can_be_given(chat: Any) -> None:
    asked = calling(("weather", '{"city": "Oslo"}'), before=[reasoning("Let me look.")])
    visitor, runtime = chat(asked, reply("Rain."))
    page = visitor.page
    page.get_by_text("Settings").click()
    tools = (
        '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
    )
    page.get_by_label("Tools").fill(tools)
    visitor.ask("How is it?")
    page.get_by_text("Calls weather").click()
    expect(page.locator(".call pre")).to_have_text('{"city": "Oslo"}')
    page.get_by_label("Result of weather").fill("raining")
    page.get_by_role("button", name="Send the result").click()
    expect(messages(visitor).last).to_contain_text("Rain.")
    sent = runtime.requests[1].messages or []
    assert sent[-1]["role"] == "tool"
    assert sent[-1]["content"] == "raining"


def test_hostile_text_of_a_model_changes_nothing(chat: Any) -> None:
    visitor, _ = chat([Started(0, 10, 0), delta(HOSTILE), reasoning(HOSTILE), finished()])
    page = visitor.page
    visitor.ask("be evil")
    expect(page.locator(".turn")).to_have_count(1)
    page.wait_for_timeout(300)
    assert page.evaluate("window.harmed") is None
    shown = page.locator(".message.assistant")
    for tag in ("script", "img", "iframe", "style", "form", "svg", "b"):
        assert shown.locator(f".markdown {tag}").count() == 0
    links = shown.locator(".markdown a").evaluate_all("each => each.map(a => [a.href, a.rel])")
    assert {href for href, _ in links if href} == {"https://example.org/"}
    assert all("noopener" in rel for _, rel in links)
    text = shown.inner_text()
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert "window.harmed = 5" in text  # code is shown as it is


def test_an_error_of_the_server_is_shown_in_its_words(chat: Any) -> None:
    visitor, _ = chat([BadRequest("`temperature` is too hot.")])
    visitor.ask("hello")
    expect(messages(visitor).get_by_role("alert")).to_have_text("`temperature` is too hot.")


def test_an_image_is_sent_with_the_message(chat: Any, tmp_path: Path) -> None:
    path = tmp_path / "red.png"
    Image.new("RGB", (8, 8), "red").save(path)
    visitor, runtime = chat(reply("Red."), sees=True)
    page = visitor.page
    expect(page.get_by_role("button", name="Attach an image")).to_be_enabled()
    page.locator("input[type=file]").set_input_files(path)
    expect(page.locator(".attached img")).to_be_visible()
    visitor.ask("What is it?")
    expect(messages(visitor)).to_contain_text("Red.")
    assert len(runtime.requested.pictures) == 1


# -- access ----------------------------------------------------------------------------------------


def test_a_server_with_keys_asks_for_one(visit: Visit, serve: Any) -> None:
    visitor = visit(serve(api_key=("secret",)).url)
    page = visitor.page
    key = page.get_by_label("API key", exact=True)
    key.fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_have_text("The server does not know this key.")
    key.fill("secret")
    page.get_by_role("button", name="Sign in").click()
    visitor.ask("hello")
    expect(messages(visitor)).to_contain_text("Hello")
    page.reload()  # the key was not to be kept
    expect(key).to_be_visible()


# -- cache -----------------------------------------------------------------------------------------


class Kept:
    """A model with this many entries."""

    def __init__(self, count: int) -> None:
        names = ("whale", "harbour", "lighthouse")
        self.removed: list[str] = []
        self._listed = holding(
            *(
                entry(
                    f"key-{number}",
                    preview=f"{names[number % 3]} {number}",
                    last_used=1000.0 + number,
                    lru_position=number + 1,
                    token_count=number,
                    names=[],
                )
                for number in range(count)
            )
        )

    def __call__(self, op: AdminOp) -> AdminResult:
        match op:
            case ShowTree():
                shared = Branch("aa" * 32, None, 0, 100, 1000, "ram", 2)
                ends = [Branch(f"{n:02x}" * 32, 0, 100, 40, 400, "disk", 1) for n in (1, 2)]
                return PrefixTree([shared, *ends], is_complete=True)
            case ShowBranch(key):
                return BranchText(f"You are a captain. {key[:2]}")
        return self._listed(op)


def entry_rows(page: Page) -> Any:
    return page.locator(".rows tbody tr:not([aria-hidden])")


@pytest.fixture
def kept(visit: Visit, serve: Any) -> Visitor:
    server = serve(ScriptedRuntime(answers=Kept(COUNT)))
    return visit(server.url)


def test_thousands_of_entries_can_be_searched_sorted_and_scrolled(kept: Visitor) -> None:
    page = kept.go("cache")
    count = f"{COUNT:,}"
    expect(page.get_by_text(f"{count} entries")).to_be_visible()
    assert entry_rows(page).count() < 50  # only those in view are drawn
    page.get_by_label("Search").fill("lighthouse 77")
    expect(entry_rows(page).first).to_contain_text("lighthouse 77")
    page.get_by_label("Search").fill("")
    page.get_by_role("button", name=re.compile("^Tokens")).click()
    page.get_by_role("button", name=re.compile("^Tokens")).click()
    expect(entry_rows(page).first).to_contain_text("whale 0")
    page.locator(".rows").evaluate("box => box.scrollTop = box.scrollHeight")
    expect(entry_rows(page).last).to_contain_text(str(COUNT - 1))


def test_a_deleted_entry_can_be_kept_after_all(kept: Visitor) -> None:
    page = kept.go("cache")
    first = entry_rows(page).first
    first.get_by_role("button", name="Delete").click()
    expect(first).to_contain_text("Deleted in 5 seconds.")
    first.get_by_role("button", name="Undo").click()
    expect(first.get_by_role("button", name="Delete")).to_be_visible()
    first.get_by_role("button", name="Details").click()
    expect(page.get_by_role("dialog")).to_contain_text("cache_key")
    page.get_by_role("button", name="Close").click()


def test_the_tree_shows_the_text_of_a_part_and_follows_the_keyboard(kept: Visitor) -> None:
    page = kept.go("cache")
    parts = page.locator(".tree rect")
    expect(parts).to_have_count(3)
    tall, short = (parts.nth(place).get_attribute("height") or "0" for place in (0, 1))
    assert float(tall) == 2 * float(short)
    parts.first.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".tree pre")).to_contain_text("You are a captain. aa")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator(".tree pre")).to_contain_text("You are a captain. 02")


# -- every view ------------------------------------------------------------------------------------


@pytest.fixture
def busy(serve: Any) -> Any:
    return serve(ScriptedRuntime(answers=Kept(50)))


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_fits_a_phone(visit: Visit, busy: Live, view: str) -> None:
    visitor = visit(busy.url, viewport={"width": 360, "height": 740})
    page = visitor.go(view)
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.skipif(not AXE.exists(), reason="`make console-test` installs axe-core")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_no_serious_problem_of_accessibility(
    visit: Visit, busy: Live, view: str, scheme: str
) -> None:
    visitor = visit(busy.url, color_scheme=scheme, bypass_csp=True)
    if view == "chat":
        visitor.ask("hello")
        expect(visitor.page.locator(".turn")).to_have_count(1)
    page = visitor.go(view)
    page.wait_for_timeout(500)
    page.add_script_tag(path=AXE)
    found = page.evaluate("axe.run()")
    serious = [each for each in found["violations"] if each["impact"] in ("serious", "critical")]
    assert [(each["id"], each["nodes"][0]["html"]) for each in serious] == []


def test_everything_can_be_reached_with_the_keyboard(visit: Visit, busy: Live) -> None:
    page = visit(busy.url).go("connect")
    reached = set()
    page.locator("body").press("Tab")
    for _ in range(40):
        reached.add(page.evaluate("document.activeElement.textContent.trim()"))
        page.keyboard.press("Tab")
    assert {"Skip to the content", "Chat", "Cache", "Live", "Models", "Copy"} <= reached


# -- a real server ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("console")
    model = write_llama(folder / "tiny.gguf", context=2048)
    with running(model, folder, "--threads", "1") as started:
        yield started


def test_a_real_second_turn_is_reused_and_shown_live(visit: Visit, server: Server) -> None:
    visitor = visit(server.url)
    page = visitor.page
    page.get_by_text("Settings").click()
    page.get_by_label("Maximum output tokens").fill("8")
    for number in (1, 2):
        visitor.ask(f"Question number {number} about ships in the harbour of a town")
        expect(page.locator(".turn")).to_have_count(number)
    expect(page.locator(".turn").last).to_contain_text(re.compile(r"[1-9]\d* reused from"))
    visitor.go("live")
    expect(page.locator(".log p")).to_have_count(2)
    expect(page.get_by_text("All models answer.")).to_be_visible()
    visitor.go("cache")
    expect(page.locator(".rows")).to_contain_text("Question number 2")


@pytest.mark.long
def test_two_tenants_see_their_own_turns_and_the_admin_sees_both(
    visit: Visit, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "tiny.gguf", context=2048)
    keys = ("--api-key", "anna", "--api-key", "bert", "--admin-key", "root")
    with running(model, tmp_path, "--threads", "1", *keys) as keyed:
        shown = {}
        for key in ("anna", "bert", "root"):
            visitor = visit(keyed.url)
            visitor.page.get_by_label("API key", exact=True).fill(key)
            visitor.page.get_by_role("button", name="Sign in").click()
            if key != "root":
                visitor.page.get_by_text("Settings").click()
                visitor.page.get_by_label("Maximum output tokens").fill("4")
                visitor.ask(f"This is {key}'s own question about a ship")
                expect(visitor.page.locator(".turn")).to_have_count(1)
            shown[key] = visitor
        for key, count in (("anna", 1), ("bert", 1), ("root", 2)):
            page = shown[key].page
            page.get_by_role("link", name="Live").click()
            expect(page.locator(".log p")).to_have_count(count)
            page.get_by_role("link", name="Cache").click()
            expect(page.get_by_text(f"{count} entr", exact=False)).to_be_visible()
        expect(shown["root"].page.get_by_text("own question")).to_have_count(0)
        for visitor in shown.values():
            visitor.context.close()


def test_an_open_page_survives_the_death_of_the_model(visit: Visit, server: Server) -> None:
    page = visit(server.url).go("live")
    expect(page.get_by_text("All models answer.")).to_be_visible()
    [pid] = server.worker_pids()
    os.kill(pid, signal.SIGKILL)
    restarts = page.locator(".figure", has_text="Restarts").locator("p")
    expect(restarts).to_have_text("1", timeout=60_000)
    expect(page.get_by_text("All models answer.")).to_be_visible()


@pytest.mark.long
def test_an_open_page_survives_a_restart_of_the_server(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr("tests.support.server.free_port", lambda: port)
    model = write_llama(tmp_path / "tiny.gguf", context=2048)
    with running(model, tmp_path, "--threads", "1") as first:
        page = visit(first.url).go("live")
        expect(page.get_by_text("All models answer.")).to_be_visible()
    expect(page.get_by_text("The server does not answer.")).to_be_visible()
    with running(model, tmp_path, "--threads", "1"):
        expect(page.get_by_text("The server does not answer.")).to_be_hidden()
        expect(page.get_by_text("All models answer.")).to_be_visible()
        page.context.close()
