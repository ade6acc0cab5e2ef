"""Writes to a cache folder in a process until it is killed.

Run as a module, it reads one order per line and forks for each. This avoids starting an interpreter
for every round.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rekindle.errors import NoRoomForPins
from rekindle.kvcache.disk.files import SYSTEM, Calls
from rekindle.protocol.admin import (
    DeleteEntry,
    DocumentStored,
    EntryInfo,
    PinEntry,
    Removed,
    StoreDocument,
)
from rekindle.protocol.requests import Names
from tests.stress.diary import SALTS, Diary, WitnessedHarness, document_of, items_of
from tests.support.fake import FakeEngine

ROOT = Path(__file__).parents[2]
PREFIXES = 6
MOST_TOKENS = 200
DOCUMENT_KINDS = ("resp_", "conv_")
POLL_S = 0.05
LEAST_STEPS = 3  # limit of a round on a slow machine


@dataclass(frozen=True, kw_only=True)
class Order:
    """One round: what to write, where, and how it ends."""

    folder: str
    diary: str
    seed: int
    disk_bytes: int
    kill_after_s: float
    kill_with: str = ""  # wait until this file exists
    exit_at_call: int = 0  # 0: never; otherwise end before this system call


class Load:
    """Conversations that share prefixes. Some are named, pinned or deleted."""

    def __init__(self, harness: WitnessedHarness, chance: random.Random) -> None:
        self._harness = harness
        self._chance = chance
        self._talks: list[tuple[bytes, list[int]]] = []
        salts = {harness.namespace(salt): salt for salt in SALTS}
        self._keys = [(salts[each.namespace], each.key) for each in harness.entries.of(None)]

    def step(self) -> None:
        self._turn()
        what = self._chance.random()
        if what < 0.35:
            self._harness.acknowledge()
        elif what < 0.55 and self._keys:
            self._change(*self._chance.choice(self._keys))
        elif what < 0.60:
            self._harness.store.write_back.write_everything()
        elif what < 0.63:
            assert self._harness.disk is not None
            self._harness.disk.back_up({})
        elif what < 0.85:
            self._store_document()

    def _turn(self) -> None:
        salt, tokens = self._pick()
        naming = Names(
            session_id=f"session {self._chance.randrange(10)}",
            return_cache_key=self._chance.random() < 0.3,
        )
        exact = self._chance.random() < 0.3
        reply = self._harness.ask(tokens, salt=salt, names=naming, exact=exact)
        if key := reply.finished.cache.new_cache_key:
            self._keys.append((salt, key))
        longer = [*tokens, *reply.tokens, self._chance.randrange(10, 900)]
        if len(longer) < MOST_TOKENS:
            self._talks.append((salt, longer))

    def _pick(self) -> tuple[bytes, list[int]]:
        if self._talks and self._chance.random() < 0.6:
            return self._chance.choice(self._talks[-8:])
        first = self._chance.randrange(PREFIXES)
        prefix = [100 * first + n for n in range(8 * (1 + first % 3))]
        return self._chance.choice(SALTS), [*prefix, *self._some_tokens()]

    def _some_tokens(self) -> list[int]:
        count = self._chance.randrange(1, 30)
        return [self._chance.randrange(10, 900) for _ in range(count)]

    def _change(self, salt: bytes, key: str) -> None:
        entry = self._harness.entries.by_key(self._harness.namespace(salt), key)
        if entry is None:
            return
        if self._chance.random() < 0.3:
            self._ask("delete", DeleteEntry(key), salt)
        else:
            what = "unpin" if entry.pinned else "pin"
            self._harness.diary.write(**{f"{what}ning": key})
            self._ask(what, PinEntry(key, pinned=not entry.pinned), salt)

    def _store_document(self) -> None:
        """Store a response, begin a conversation, or add items to either."""
        documents = [(salt, key) for salt, key in self._keys if key.startswith(DOCUMENT_KINDS)]
        if documents and self._chance.random() < 0.6:
            salt, key = self._chance.choice(documents)
        else:
            salt = self._chance.choice(SALTS)
            # No two rounds use the same key, even if they have the same seed.
            key = f"{self._chance.choice(DOCUMENT_KINDS)}{secrets.token_hex(8)}"
            if key.startswith("resp_"):
                self._harness.ask(self._some_tokens(), salt=salt, names=Names(entry_key=key))
            self._keys.append((salt, key))
        entry = self._harness.entries.by_key(self._harness.namespace(salt), key)
        if entry is None and (salt, key) in documents:
            return  # it was deleted
        before = items_of(entry.document) if entry else 0
        items = before + self._chance.randrange(1, 6)
        self._harness.diary.write(storing=key, items=items)
        op = StoreDocument(key=key, content=document_of(key, items))
        answer = self._harness.administer(op, salt=salt)
        assert isinstance(answer, DocumentStored)
        assert answer.kept
        assert answer.durable
        self._harness.diary.write(document=key, items=items)

    def _ask(self, what: str, op: DeleteEntry | PinEntry, salt: bytes) -> None:
        """Ask for a change, and record that it was answered."""
        with contextlib.suppress(NoRoomForPins):
            answer = self._harness.administer(op, salt=salt)
            assert isinstance(answer, EntryInfo | Removed)
            assert answer.durable
            self._harness.diary.write(done=what, key=op.cache_key)


def ending_calls(count: int) -> Calls:
    """System calls that end the process instead of making the nth call."""
    left = [count]

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return wrapped

    return Calls(**{each.name: wrap(getattr(SYSTEM, each.name)) for each in fields(Calls)})


def work(order: Order, ready: int) -> None:
    """In the child: write until the process is killed."""
    diary = Diary(Path(order.diary))
    try:
        harness = WitnessedHarness(
            FakeEngine(),
            diary=diary,
            calls=ending_calls(order.exit_at_call) if order.exit_at_call else None,
            folder=Path(order.folder),
            disk_bytes=order.disk_bytes,
            idle_tokens=0,
        )
        load = Load(harness, random.Random(order.seed))
        for _ in range(LEAST_STEPS):
            load.step()
        os.write(ready, b"!")
        while True:
            load.step()
    except BaseException:
        diary.write(error=traceback.format_exc())
        os._exit(1)


def carry_out(order: Order) -> None:
    """Fork, let the child work, kill it and wait for it."""
    ready, child_ready = os.pipe()
    pid = os.fork()
    if not pid:
        work(order, child_ready)
    os.close(child_ready)
    os.read(ready, 1)  # or the end of the pipe, if the child has already ended
    os.close(ready)
    time.sleep(order.kill_after_s)
    while order.kill_with and not Path(order.kill_with).exists():
        time.sleep(POLL_S)
    os.kill(pid, signal.SIGKILL)  # nobody has waited for the child, so the pid is still valid
    os.waitpid(pid, 0)


@contextlib.contextmanager
def writing() -> Iterator[Callable[[Order], None]]:
    """Runs orders one after the other in grandchildren."""
    command = [sys.executable, "-m", "tests.stress.writer"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        orders, done = process.stdin, process.stdout
        assert orders is not None
        assert done is not None

        def give(order: Order) -> None:
            orders.write(json.dumps(asdict(order)) + "\n")
            orders.flush()
            assert done.readline() == "done\n"

        yield give
        orders.close()


def main() -> None:
    for line in sys.stdin:
        carry_out(Order(**json.loads(line)))
        print("done", flush=True)


if __name__ == "__main__":
    main()
