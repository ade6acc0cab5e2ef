"""A tier in memory that is as slow and unreliable as a store on another machine.

Nothing happens before `advance`, which performs and reports all requests in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from rekindle.errors import CorruptBlock
from rekindle.kvcache.block import Block, BlockKind, chain_key
from rekindle.kvcache.codec import HEADER_BYTES, MAC_BYTES, Record, parse_header, seal, verify
from rekindle.kvcache.tiers.base import (
    Fetch,
    Fetched,
    Flushed,
    OnEvent,
    StoredBlock,
    TierState,
    Write,
    WriteFailed,
    Written,
)
from rekindle.kvcache.tiers.disk import WriteBehindTier
from rekindle.memory import Buffer
from rekindle.tokens import Tokens

OVERHEAD_BYTES = 200
SECRET = b"m" * 32


class MemoryTier(WriteBehindTier):
    """`shelf` survives a restart. It holds sealed blocks by key, in the order of arrival."""

    def __init__(
        self,
        limit_bytes: int,
        on_event: OnEvent,
        *,
        shelf: dict[bytes, bytes] | None = None,
        queue_bytes: int = 1 << 20,
    ) -> None:
        super().__init__("memory", limit_bytes, queue_bytes)
        self.shelf = {} if shelf is None else shelf
        self.failure: TierState = "ok"  # result of the next writes
        self.hangs = False  # requests are neither performed nor refused
        self._on_event = on_event
        self._orders: deque[Callable[[], None]] = deque()

    def advance(self) -> None:
        """Perform and report all requests."""
        while self._orders and not self.hangs:
            self._orders.popleft()()

    def cost(self, tokens: Tokens, state_bytes: int) -> int:
        return len(tokens.packed) + state_bytes + OVERHEAD_BYTES

    def put(self, block: Block, blob: Buffer) -> None:
        assert block.parent is not None
        assert block.parent.is_root or self.holds(block.parent), "parents are put first"
        super().put(block, blob)

    def _write(self, write: Write) -> None:
        self._orders.append(lambda: self._keep(write))

    def _keep(self, write: Write) -> None:
        if self.failure != "ok":
            self._on_event(WriteFailed(self.name, (write,), self.failure, "a test wants it"))
            return
        self.shelf[write.key] = b"".join(seal(write.record, SECRET))
        self._on_event(Written(self.name, (write,)))

    def _delete(self, key: bytes, *, quarantine: bool) -> None:
        self._orders.append(lambda: self._drop(key))

    def _drop(self, key: bytes) -> None:
        self.shelf.pop(key, None)

    def flush(self, then: Callable[[bool], None]) -> None:
        self._orders.append(lambda: self._on_event(Flushed(then)))

    def read(self, blocks: Sequence[Block], fetch: Fetch) -> None:
        keys = [block.key for block in blocks]
        self._orders.append(lambda: self._read(keys, fetch))

    def _read(self, keys: list[bytes], fetch: Fetch) -> None:
        for key in keys if not fetch.is_released else ():
            try:
                fetch.records[key] = self._open(key)
            except CorruptBlock as error:
                fetch.bad[key] = str(error)
        self._on_event(Fetched(fetch))

    def _open(self, key: bytes) -> Record:
        raw = self.shelf.get(key, b"")
        header = parse_header(raw)
        split = HEADER_BYTES + header.packed_bytes
        parts = raw[:HEADER_BYTES], raw[HEADER_BYTES:split], raw[split:-MAC_BYTES]
        record = verify(*parts, raw[-MAC_BYTES:], SECRET)
        if chain_key(record.parent, record.tokens) != key:
            raise CorruptBlock("it is another block than its key says")
        return record

    def stored(self) -> Iterator[StoredBlock]:
        for key, raw in list(self.shelf.items()):
            header = parse_header(raw)
            packed = raw[HEADER_BYTES : HEADER_BYTES + header.packed_bytes]
            kind = BlockKind(header.blob_bytes, header.exact, header.resumable)
            yield StoredBlock(key, header.parent, header.namespace, Tokens(packed), kind)

    def close(self) -> None:
        self.advance()
