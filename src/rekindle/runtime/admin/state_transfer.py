"""Exports the state of a conversation to a file that other programs read, and imports such files.

The work is done in pieces between two engine steps. Only the file itself is read or written whole.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rekindle.engine.base import Engine, ReadState, StateFiles
from rekindle.errors import BadRequest, CorruptBlock, ServerError, StateNotPortable, Unsupported
from rekindle.kvcache.block import Block, PrefixHandle, WriteBack, chain, chain_key
from rekindle.kvcache.entries.entry import Draft, Entry, Name
from rekindle.kvcache.tiers.base import Fetch
from rekindle.memory import Buffer
from rekindle.protocol.admin import StateFile
from rekindle.runtime.encode.threads import check_token_ids
from rekindle.runtime.model_process import Pieces
from rekindle.runtime.reuse.restorer import FETCH_TIMEOUT_S
from rekindle.runtime.storage.storage import Storage
from rekindle.tokens import Tokens

#: Copies state that exists only in the engine to the store, then calls back.
Offload = Callable[[PrefixHandle, Callable[[], None]], None]


class NoState(ServerError):
    status, kind, code = 409, "invalid_request_error", "no_state"

    def __init__(self) -> None:
        super().__init__(
            "This entry has no state to export: it was evicted, or it cannot be read. Send the "
            "conversation again, then export it."
        )


class NoRoom(ServerError):
    status, kind, code = 507, "insufficient_storage_error", "no_room"


class StateTransfer:
    """Called by the engine's thread."""

    def __init__(self, engine: Engine, storage: Storage, offload: Offload) -> None:
        self._engine = engine
        self._capabilities = engine.capabilities
        self._store = storage.store
        self._entries = storage.entries
        self._now_s = storage.clock.steady_s
        self._ttl_s = storage.settings.key_ttl
        self._offload = offload

    def _files(self) -> StateFiles:
        if self._engine.state_files is None:
            raise StateNotPortable
        return self._engine.state_files

    def save(self, entry: Entry, folder: Path) -> Pieces[StateFile]:
        """Write the state of an entry to a file in the folder; raises a ServerError."""
        files = self._files()
        if entry.namespace != entry.tenant:
            raise Unsupported(
                "Only state of the default precision can be exported, and this conversation has "
                "other `kv_bits`."
            )
        if entry.tokens.media:
            raise Unsupported("A conversation with images cannot be exported.")
        exported: list[bool] = []
        self._offload(entry, lambda: exported.append(True))
        while not exported:
            yield
        blocks = self._blocks(entry)
        writer = files.writer()
        windows: list[Fetch] = []
        try:
            for number, block in enumerate(blocks):
                blob = yield from self._blob(blocks[number:], windows)
                resumable = number == len(blocks) - 1 and not self._capabilities.can_truncate
                size_bytes = self._capabilities.kv_layout.cells_bytes(len(block.tokens))
                cells = blob if resumable else memoryview(blob)[:size_bytes]
                writer.append(cells, len(block.tokens), resumable=resumable)
        except CorruptBlock:
            self._store.drop(block)
            raise NoState from None
        finally:
            for window in windows:
                self._store.fetches.release(window)
        tokens = entry.first(min(blocks[-1].stop, len(entry.tokens)))
        path = folder / f"state{files.suffix}"
        writer.save(path, tokens)
        return StateFile(path.name, len(tokens), path.stat().st_size)

    def _blocks(self, entry: Entry) -> list[Block]:
        """The blocks of the entry, in order, up to the last position where a turn can resume."""
        held = list(chain(entry.block))
        if not self._capabilities.can_truncate:
            usable = (n for n, block in enumerate(held) if block.resumable)
            held = held[next(usable, len(held)) :]
        if not held:
            raise NoState
        return held[::-1]

    def _blob(self, rest: list[Block], windows: list[Fetch]) -> Pieces[Buffer]:
        """Return the state of the first block. Reading it also reads the blocks after it."""
        block, until_s = rest[0], self._now_s() + FETCH_TIMEOUT_S
        while (blob := self._at_hand(block, windows)) is None:
            coming = any(block.key in each.blocks and not each.is_done for each in windows)
            if not coming:
                while windows:  # they hold earlier blocks
                    self._store.fetches.release(windows.pop())
                if not self._store.is_readable(block):
                    raise NoState
                if window := self._store.fetches.start(rest):
                    windows.append(window)
            if self._now_s() > until_s:
                raise NoState
            yield
        yield
        return blob

    def _at_hand(self, block: Block, windows: list[Fetch]) -> Buffer | None:
        found = (each.blob(block) for each in windows if each.is_done and block.key in each.blocks)
        return self._store.get(block) or next(found, None)

    def load(self, path: Path, namespace: bytes, names: tuple[Name, ...]) -> Pieces[Entry]:
        """Store the state in a file as an entry of the tenant; raises a ServerError."""
        state = self._files().read(path)
        tokens = self._checked(state.tokens)
        owner = PrefixHandle(namespace, tokens)  # owns the imported blocks until they have an entry
        self._store.conversations.attach(owner)
        try:
            yield from self._put(state, tokens, namespace)
            return self._remember(tokens, namespace, names)
        finally:
            self._store.conversations.release(owner)

    def _put(self, state: ReadState, tokens: Tokens, namespace: bytes) -> Pieces[None]:
        step, parent = self._capabilities.block_tokens, namespace
        for start in range(0, len(tokens), step):
            yield
            stop = min(start + step, len(tokens))
            piece = tokens[start:stop]
            resumable = stop == len(tokens) and not self._capabilities.can_truncate
            if self._store.wants(parent, piece, exact=False, resumable=resumable):
                blob = state.export(start, stop, resumable=resumable)
                if not self._store.put(
                    namespace, parent, piece, blob, exact=False, resumable=resumable
                ):
                    raise NoRoom(
                        f"The cache has room for the first {start} of {len(tokens)} tokens."
                    )
            parent = chain_key(parent, piece)
            self._store.set_write_back(parent, WriteBack.SOON)

    def _remember(self, tokens: Tokens, namespace: bytes, names: tuple[Name, ...]) -> Entry:
        draft = Draft(
            namespace=namespace,
            tokens=tokens,
            text=b"",
            names=names,
            ttl_s=None if names else self._ttl_s,
            keyed=True,
        )
        entry = self._entries.remember(draft)
        if entry is None:
            raise BadRequest("The conversation has too many tokens to be stored.", param="file")
        return entry

    def _checked(self, ids: list[int]) -> Tokens:
        check_token_ids(ids, self._engine.tokenizer, "file")
        if len(ids) > self._capabilities.context_tokens:
            raise BadRequest(
                f"The file holds {len(ids)} tokens, but the context of this model has "
                f"{self._capabilities.context_tokens}.",
                param="file",
            )
        return Tokens.of(ids)
