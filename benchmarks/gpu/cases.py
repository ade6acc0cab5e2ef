"""Defines the measurements.

A case asks one fresh server, alone on the machine, and yields figures.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any

from sides import Needs, Rekindle, Side
from sse_client import Answer, Rate, ask, ask_many, token_ms

WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "with", "not", "at")
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 0, "min_p": 0}
WARM_UP_TOKENS = 3000
PAUSE_S = 0.5  # pause between turns; work after a turn must not count for the next one
ASK_TIMEOUT_S = 180.0
#: Rekindle ends a stream with a report on reuse and on the stages until the first token.
REPORT: dict[str, Any] = {"use_kv_cache": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths in tokens. Each word of a prompt is one token."""

    long: int = 32_768
    middle: int = 16_384
    short: int = 4096
    document: int = 8192
    idle: int = 200_000
    stream_tokens: int = 256
    streams: tuple[int, ...] = (1, 8, 32, 64)
    one_conversation: float = (
        0.06  # share of free memory that holds one long conversation but not two
    )
    churn_s: float = 60.0

    @property
    def long_context(self) -> int:
        return self.long * 5 // 4


SMALL = Sizes(
    long=1024, middle=512, short=256, document=256, idle=4096, stream_tokens=48,
    streams=(1, 8, 16), one_conversation=5e-5, churn_s=5.0,
)  # fmt: skip

Figures = dict[str, float]


@dataclass(slots=True)
class Run:
    """One case on one side. `note` adds an explanation of a figure."""

    side: Side
    sizes: Sizes
    case: str
    rounds: int
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def running(self, needs: Needs) -> Iterator[int]:
        """The port of a server that has already computed something."""
        with self.side.running(needs, self.case) as port:
            warm_up(port, needs)
            yield port

    @property
    def is_ours(self) -> bool:
        return isinstance(self.side, Rekindle)


class Conversation:
    """A text of this many tokens, and short turns about it."""

    def __init__(self, port: int, tokens: int, seed: int) -> None:
        self._port = port
        text = words(tokens, seed)
        self._messages = [{"role": "system", "content": text}, {"role": "user", "content": "So?"}]

    def at(self, port: int) -> Conversation:
        """The same on a restarted server."""
        self._port = port
        return self

    def turn(self, max_tokens: int = 8, added: int = 4) -> Answer:
        body = {"messages": self._messages, "max_tokens": max_tokens, "keep_text": True}
        answer = ask(self._port, body | GREEDY | REPORT, ASK_TIMEOUT_S)
        self._messages = [
            *self._messages,
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": f"And then? {words(added, len(self._messages))}"},
        ]
        return answer


def words(count: int, seed: int) -> str:
    return " ".join(Random(seed).choices(WORDS, k=count))


def stream_bodies(count: int, tokens: int, seed: int, way: dict[str, Any]) -> list[dict[str, Any]]:
    """Prompts of about a hundred tokens without a common prefix."""
    return [
        {
            "messages": [{"role": "user", "content": f"{seed * 1000 + at} {words(70, at)}"}],
            "max_tokens": tokens,
            "seed": at,
            **way,
        }
        for at in range(count)
    ]


def decode(port: int, streams: int, tokens: int, seed: int, way: dict[str, Any] = GREEDY) -> Rate:
    bodies = stream_bodies(streams, tokens, seed, way)
    return Rate.of(ask_many(port, bodies, ASK_TIMEOUT_S), tokens)


def decode_median(port: int, streams: int, tokens: int, seed: int, rounds: int) -> float:
    return median(decode(port, streams, tokens, seed + at).steady for at in range(rounds))


def warm_up(port: int, needs: Needs) -> None:
    """Exclude first-time work of the device from all figures."""
    Conversation(port, min(WARM_UP_TOKENS, needs.context // 2), seed=999).turn()
    decode(port, 2, 8, seed=998)


def idle(run: Run) -> Iterator[Figures]:
    """One stream, a cold prompt and second turns, before and after many idle conversations."""
    sizes = run.sizes
    needs = Needs(slots=32, peer_slots=8, context=sizes.long_context)
    with run.running(needs) as port:
        tokens = sizes.stream_tokens
        yield {"decode-1.empty tokens/s": decode_median(port, 1, tokens, 1, run.rounds)}
        talks = [
            Conversation(port, sizes.long, seed) for seed in range(sizes.idle // sizes.long + 2)
        ]
        cold = []
        for talk in talks:
            cold.append(talk.turn())
            time.sleep(PAUSE_S)
            if len(cold) == 1:
                yield {"cold-32k.empty ms": cold[0].first_ms}
        run.notes.append("cold, ms: " + ", ".join(f"{each.first_ms:.0f}" for each in cold))
        yield {"cold-32k.kept ms": median(each.first_ms for each in cold[-2:])}
        yield {"decode-1.kept tokens/s": decode_median(port, 1, tokens, 20, run.rounds)}
        yield {"decode-8.kept tokens/s": decode_median(port, 8, tokens, 40, 1)}
        yield {"turn2-32k.kept ms": _warm_ms(run, talks[-3:], run.rounds)}


def turns(run: Run) -> Iterator[Figures]:
    """Cold and second turns at several lengths, one conversation at a time."""
    sizes = run.sizes
    lengths = {"4k": sizes.short, "16k": sizes.middle, "32k": sizes.long}
    with run.running(Needs(slots=8, context=sizes.long_context)) as port:
        for seed, (label, tokens) in enumerate(lengths.items()):
            talk = Conversation(port, tokens, seed)
            cold = talk.turn()
            time.sleep(PAUSE_S)
            yield {f"cold-{label}.alone ms": cold.first_ms}
            yield {f"turn2-{label}.device ms": _warm_ms(run, [talk], 2 * run.rounds)}


def _warm_ms(run: Run, talks: Sequence[Conversation], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        for talk in talks:
            taken.append(talk.turn())
            time.sleep(PAUSE_S)
    run.notes.append("warm: " + "; ".join(f"{a.first_ms:.0f} ms {a.tier}".strip() for a in taken))
    return median(answer.first_ms for answer in taken)


def streams(run: Run) -> Iterator[Figures]:
    yield from _streams(run, "greedy", GREEDY, run.sizes.stream_tokens, run.rounds)


def sampled(run: Run) -> Iterator[Figures]:
    """Uses fewer tokens, because the peer takes a quarter of a second per step for a flat
    distribution."""
    rounds = run.rounds if run.is_ours else 1
    tokens = run.sizes.stream_tokens // (1 if run.is_ours else 4)
    yield from _streams(run, "sampled", SAMPLED, tokens, rounds)


def _streams(
    run: Run, label: str, way: dict[str, Any], tokens: int, rounds: int
) -> Iterator[Figures]:
    most = max(run.sizes.streams)
    with run.running(Needs(slots=most, context=2048)) as port:
        for count in run.sizes.streams:
            rates = [decode(port, count, tokens, at, way) for at in range(rounds)]
            whole = median(rate.whole for rate in rates)
            run.notes.append(f"{count} streams with their prompts: {whole:.0f} tokens/s")
            yield {f"streams-{count}.{label} tokens/s": median(rate.steady for rate in rates)}


def by_turns(run: Run) -> Iterator[Figures]:
    """Two conversations take turns, and only one fits into the pool."""
    yield {"a-b-a.parked ms": _by_turns(run, None)}


def by_turns_ram(run: Run) -> Iterator[Figures]:
    """The same without idle state on the device, so that it comes back from RAM."""
    yield {"a-b-a.ram ms": _by_turns(run, 0.0)}


def _by_turns(run: Run, park_fraction: float | None) -> float:
    sizes = run.sizes
    needs = Needs(
        slots=4, peer_slots=1, context=sizes.long_context,
        kv_fraction=sizes.one_conversation, park_fraction=park_fraction,
    )  # fmt: skip
    with run.running(needs) as port:
        talks = [Conversation(port, sizes.long, seed) for seed in (1, 2)]
        cold = []
        for talk in talks:
            cold.append(talk.turn().first_ms)
            time.sleep(PAUSE_S)
        run.notes.append(f"cold: {cold[0]:.0f}, {cold[1]:.0f} ms")
        return _warm_ms(run, talks, run.rounds)


def disk(run: Run) -> Iterator[Figures]:
    """Second turns after a restart, from files in the page cache."""
    if not run.is_ours:
        return
    needs = Needs(slots=4, context=run.sizes.long_context, on_disk=True)
    with run.running(needs) as port:
        talks = [Conversation(port, run.sizes.long, seed) for seed in range(min(run.rounds, 2))]
        for talk in talks:
            talk.turn()
    with run.running(needs) as port:
        yield {"turn2-32k.disk ms": _warm_ms(run, [talk.at(port) for talk in talks], 1)}


def document(run: Run) -> Iterator[Figures]:
    """Sixteen concurrent questions about one new document."""
    taken_s = []
    needs = Needs(slots=16, peer_slots=8, context=run.sizes.document * 3 // 2)
    with run.running(needs) as port:
        for seed in range(2):
            text = words(run.sizes.document, seed)
            bodies = [
                {
                    "messages": [
                        {"role": "system", "content": text},
                        {"role": "user", "content": f"Question {at}?"},
                    ],
                    "max_tokens": 64,
                    **GREEDY,
                }
                for at in range(16)
            ]
            answers = ask_many(port, bodies, ASK_TIMEOUT_S)
            taken_s.append(max(a.end_s for a in answers) - min(a.sent_s for a in answers))
            time.sleep(PAUSE_S)
    run.notes.append("walls: " + ", ".join(f"{each:.2f} s" for each in taken_s))
    yield {"document.wall s": median(taken_s)}


def agents(run: Run) -> Iterator[Figures]:
    """Six agents take turns in four slots. Each turn adds a few hundred tokens of results."""
    sizes = run.sizes
    with run.running(Needs(slots=4, context=sizes.middle + 4096)) as port:
        talks = [Conversation(port, sizes.middle, seed) for seed in range(6)]
        for talk in talks:
            talk.turn(16, added=200)
        taken = []
        for _ in range(run.rounds):
            for talk in talks:
                taken.append(talk.turn(16, added=200))
    run.notes.append("; ".join(f"{a.first_ms:.0f} ms {a.tier}".strip() for a in taken))
    yield {"agents.warm ms": median(answer.first_ms for answer in taken)}


def mixed(run: Run) -> Iterator[Figures]:
    """A long cold prompt while eight streams run."""
    sizes = run.sizes
    lead_s = 1.0
    with run.running(Needs(slots=16, peer_slots=9, context=sizes.long_context)) as port:
        bodies = stream_bodies(8, 8 * sizes.stream_tokens, 1, GREEDY)
        cold = [{"role": "user", "content": words(sizes.long, 77)}]
        bodies.append({"messages": cold, "max_tokens": 4, "delay_s": lead_s, **GREEDY})
        answers = ask_many(port, bodies, ASK_TIMEOUT_S)
    *talking, late = answers
    started_s = max(answer.first_s for answer in talking)
    last_s = min(answer.end_s for answer in talking)
    if late.first_s > last_s:
        run.notes.append("the streams ended before the prompt was read")
    alone = token_ms(talking, started_s, late.sent_s)
    beside = token_ms(talking, late.sent_s, min(late.first_s, last_s))
    yield {"mixed.alone ms/token": alone, "mixed.beside ms/token": beside}
    yield {"mixed.slowdown": beside / alone, "mixed.cold ms": late.first_ms}


def churn(run: Run) -> Iterator[Figures]:
    """One stream before and after a period of turns of all lengths."""
    sizes, chance = run.sizes, Random(5)
    with run.running(Needs(slots=16, peer_slots=8, context=sizes.long_context)) as port:
        before = decode_median(port, 1, sizes.stream_tokens, 1, run.rounds)
        until_s, turn = time.monotonic() + sizes.churn_s, 0
        while time.monotonic() < until_s:
            bodies = []
            for _ in range(6):
                turn += 1
                text = words(chance.randrange(64, sizes.document), chance.randrange(20))
                asked = [{"role": "user", "content": f"{text} {chance.randrange(3)}"}]
                tokens = chance.randrange(4, sizes.stream_tokens // 2)
                bodies.append({"messages": asked, "max_tokens": tokens, **GREEDY})
            ask_many(port, bodies, ASK_TIMEOUT_S)
        after = decode_median(port, 1, sizes.stream_tokens, 9, run.rounds)
    run.notes.append(f"{turn} turns")
    yield {"churn.before tokens/s": before, "churn.after tokens/s": after}
    yield {"churn.kept share": after / before}


def exact(run: Run) -> Iterator[Figures]:
    """Answers with log probabilities must be equal for every location of the state."""
    if not run.is_ours:
        return
    needs = Needs(slots=2, context=run.sizes.short * 2, on_disk=True, flags=("--exact",))
    first = [
        {"role": "system", "content": words(run.sizes.short, 5)},
        {"role": "user", "content": "So?"},
    ]
    with run.running(needs) as port:
        reply = _whole(port, first)["message"]["content"]
        second = [*first, {"role": "assistant", "content": reply}, {"role": "user", "content": "?"}]
        cold = _whole(port, second, use_kv_cache=False)
        answers = {"kept": _whole(port, second), "kept again": _whole(port, second)}
    with run.running(needs) as port:
        answers["after a restart"] = _whole(port, second)
        answers["after a restart, again"] = _whole(port, second)
    equal = 0
    for label, answer in answers.items():
        same = all(answer[part] == cold[part] for part in ("message", "logprobs"))
        run.notes.append(f"{label}: {'equal' if same else 'DIFFERENT'} ({answer['tier']})")
        equal += same
    yield {"exact.equal share": equal / len(answers)}


def _whole(port: int, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 24, "logprobs": True, "top_logprobs": 5}
    sent = json.dumps(body | {"ignore_eos": True} | GREEDY | more).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        sent,
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as answer:
        whole = json.load(answer)
    report = whole["x_cache"]
    return {**whole["choices"][0], "tier": f"{report['tier']}, {report['reused_tokens']} tokens"}


@dataclass(frozen=True, slots=True)
class Case:
    measure: Callable[[Run], Iterator[Figures]]
    timeout_s: int


CASES: dict[str, Case] = {
    "idle": Case(idle, 240),
    "streams": Case(streams, 150),
    "sampled": Case(sampled, 180),
    "turns": Case(turns, 120),
    "aba": Case(by_turns, 120),
    "aba-ram": Case(by_turns_ram, 120),
    "disk": Case(disk, 200),
    "document": Case(document, 120),
    "agents": Case(agents, 150),
    "mixed": Case(mixed, 120),
    "churn": Case(churn, 200),
    "exact": Case(exact, 150),
}
