"""Too many clients and clients that hang up cause no leaks and no growth."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.stress.test_soak import size_of
from tests.support.rounds import rounds
from tests.support.server import Server, running
from tests.support.tiny import write_llama

PARALLEL, QUEUE, MORE = 4, 4, 20
CANCELS = rounds(80, 600)
ROUNDS = rounds(2, 20)
LARGE_ROUNDS = rounds(2, 8)
LARGE_VISITS = rounds(39, 60)
LARGE_TOKENS = 400
PATIENCE_S = 60.0
GROWN_BYTES = 64 << 20
PEAK_BYTES = 256 << 20  # that a round may take for a while
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    model = write_llama(folder / "tiny.gguf", context=2048)
    flags = ("--threads", "1", "--parallel", str(PARALLEL), "--queue", str(QUEUE),
             "--ram-cache", "8MB", "--disk-cache", "0")  # fmt: skip
    with running(model, folder, *flags) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    """A client with one connection per thread that uses it."""
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, limits=limits) as opened:
        yield opened


def body(text: str = "hello", **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def gauge(client: httpx.Client, name: str) -> int:
    lines = client.get("/metrics").text.splitlines()
    [value] = [line.split()[-1] for line in lines if line.startswith(f"rekindle_{name}{{")]
    return int(float(value))


def soon(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def is_at_rest(client: httpx.Client) -> bool:
    return gauge(client, "open_turns") == gauge(client, "active_turns") == 0


@contextlib.contextmanager
def paused(server: Server) -> Iterator[None]:
    """Stop all turns, while the front still answers."""
    [worker] = server.worker_pids()
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def ask(client: httpx.Client, number: int) -> httpx.Response:
    asked = body(f"question {number}", max_tokens=16, ignore_eos=True)
    return client.post(CHAT, json=asked)


def test_excess_requests_are_refused_immediately_and_admitted_ones_finish(
    server: Server, client: httpx.Client
) -> None:
    """Requests are refused while no turn makes progress, so a refusal does not wait for a turn."""
    with ThreadPoolExecutor(PARALLEL + QUEUE + MORE) as clients:
        with paused(server):
            asked = [
                clients.submit(ask, client, number) for number in range(PARALLEL + QUEUE + MORE)
            ]
            soon(lambda: sum(each.done() for each in asked) == MORE)
            refused = [each.result() for each in asked if each.done()]
        for answer in refused:
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            assert answer.headers["retry-after"]
        statuses = Counter(each.result(PATIENCE_S).status_code for each in asked)
    assert statuses == {429: MORE, 200: PARALLEL + QUEUE}
    soon(lambda: is_at_rest(client))


@pytest.mark.long
def test_repeated_overload_uses_no_more_memory(server: Server, client: httpx.Client) -> None:
    sizes = []
    for _ in range(ROUNDS):
        with ThreadPoolExecutor(PARALLEL + QUEUE + MORE) as clients:
            asked = clients.map(ask, [client] * 60, range(60))
            assert {answer.status_code for answer in asked} <= {200, 429}
        soon(lambda: is_at_rest(client))
        sizes.append(size_of(server).memory_bytes)
    print(f"memory after each round: {[size >> 20 for size in sizes]} MiB")
    assert sizes[-1] <= sizes[0] + GROWN_BYTES


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that stores responses, with budgets that a round fills."""
    folder = tmp_path_factory.mktemp("storing")
    model = write_llama(folder / "tiny.gguf", context=2048)
    flags = ("--threads", "1", "--parallel", str(PARALLEL), "--queue", str(QUEUE),
             "--ram-cache", "8MB", "--disk-cache", "256MB", "--disk-floor", "0")  # fmt: skip
    with running(model, folder, *flags) as started:
        yield started


def continue_history(client: httpx.Client, history: str, number: int) -> httpx.Response:
    """Add a question to a stored response. Its document has the whole history again."""
    asked = {"input": f"question {number}", "previous_response_id": history,
             "truncation": "auto", "max_output_tokens": 16}  # fmt: skip
    return client.post("/v1/responses", json=asked)


def ask_at_length(client: httpx.Client, _history: str, number: int) -> httpx.Response:
    """A reply of a few megabytes: log probabilities of many tokens."""
    asked = body(f"question {number}", max_tokens=LARGE_TOKENS, ignore_eos=True)
    return client.post(CHAT, json={**asked, "logprobs": True, "top_logprobs": 20})


def read_history(client: httpx.Client, history: str, _number: int) -> httpx.Response:
    return client.get(f"/v1/responses/{history}/input_items", params={"limit": 100})


@pytest.mark.long
def test_overload_with_stored_history_and_large_answers_uses_no_more_memory(
    storing: Server,
) -> None:
    messages = [{"role": "user", "content": f"{number} " * 100} for number in range(2000)]
    first = {"input": messages, "truncation": "auto", "max_output_tokens": 16}
    ways = (continue_history, ask_at_length, read_history)
    limits = httpx.Limits(max_connections=None)
    seen: Counter[tuple[str, int]] = Counter()
    sizes: list[int] = []
    with httpx.Client(base_url=storing.url, timeout=PATIENCE_S, limits=limits) as client:
        stored = client.post("/v1/responses", json=first)
        assert stored.status_code == httpx.codes.OK, stored.text
        history = stored.json()["id"]
        assert client.post(f"/v1/cache/{history}/pin").json()["pinned"]

        def visit(number: int) -> None:
            way = ways[number % len(ways)]
            answer = way(client, history, number)
            seen[way.__name__, answer.status_code] += 1
            assert answer.status_code in (200, 429), answer.text[:300]

        for _ in range(LARGE_ROUNDS):
            with ThreadPoolExecutor(PARALLEL + QUEUE + MORE) as clients:
                list(clients.map(visit, range(LARGE_VISITS)))
            soon(lambda: is_at_rest(client))
            assert client.get(f"/v1/responses/{history}").status_code == httpx.codes.OK
            sizes.append(size_of(storing).memory_bytes)
    peak = peak_bytes(storing)
    print(f"{dict(seen)}, {[size >> 20 for size in sizes]} MiB after each round, {peak >> 20} peak")
    assert all(seen[way.__name__, 200] for way in ways)
    assert seen["continue_history", 429] + seen["ask_at_length", 429]
    assert sizes[-1] <= sizes[LARGE_ROUNDS // 3] + GROWN_BYTES
    assert peak <= sizes[0] + PEAK_BYTES


def peak_bytes(server: Server) -> int:
    pids = (server.process.pid, *server.worker_pids())
    texts = [Path("/proc", str(pid), "status").read_text() for pid in pids]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("VmHWM")]
    return sum(int(line.split()[1]) << 10 for line in lines)


@pytest.mark.long
def test_clients_that_hang_up_at_any_moment_leave_no_turn_behind(
    server: Server, client: httpx.Client
) -> None:
    """Clients hang up in the queue, during prefill, during the reply and after it.

    Some prompts are too long and refused.
    """
    chance = Random(11)
    moments = [(chance.random() * 0.1, chance.random() < 0.5) for _ in range(CANCELS)]

    def hang_up(number: int) -> None:
        after_s, stream = moments[number]
        words = "word " * (50 * (number % 6) if number % 7 else 5000)
        asked = body(f"{number} {words}", stream=stream, max_tokens=200, ignore_eos=True)
        with contextlib.suppress(httpx.ReadTimeout):  # the connection is then closed
            client.post(CHAT, json=asked, timeout=httpx.Timeout(PATIENCE_S, read=after_s))

    with ThreadPoolExecutor(PARALLEL + QUEUE) as clients:
        list(clients.map(hang_up, range(CANCELS)))
    soon(lambda: is_at_rest(client))
    assert ask(client, 0).status_code == 200
    assert "Traceback" not in server.log.read_text()
