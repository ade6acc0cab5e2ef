"""Serves a model that generates text: its engine, its cache and the turns of all clients.

Besides the threads of every model process it has those of the disk tier, and one that requests
upkeep every minute. Only the main thread uses the engine and the cache.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty

from rekindle.chat.tools.registry import check_names
from rekindle.engine.registry import kind_of
from rekindle.errors import ServerError
from rekindle.protocol.admin import AdminReply, AdminRequest, AdminResult, IndexPrompt, Validate
from rekindle.protocol.events import Failed
from rekindle.protocol.frames import DeviceInfo, LogLine, Ready, TurnRequest
from rekindle.protocol.requests import Cancel, GenerateRequest, LoadModel, Stop
from rekindle.runtime.build import Runtime, build, formats
from rekindle.runtime.encode.input_processor import is_constrained
from rekindle.runtime.encode.request import EncodedPrompt, Stopwatch, check_kv_bits
from rekindle.runtime.encode.threads import Tokenisation
from rekindle.runtime.loading import load_model
from rekindle.runtime.model_process import Background, ModelProcess, Pieces
from rekindle.runtime.schedule.turn import Turn
from rekindle.runtime.storage.opening import capacities, choose_budgets, open_storage
from rekindle.runtime.storage.storage import StorageEvent


@dataclass(frozen=True, slots=True)
class _ReadyAdmin:
    """An admin request, with its encoded prompt if it has one."""

    request: AdminRequest
    prompt: EncodedPrompt | None = None


class _Tick:
    """Upkeep is due."""


_Message = Turn | _ReadyAdmin | Cancel | _Tick | StorageEvent


class RuntimeProcess(ModelProcess[_Message]):
    def __init__(self, load: LoadModel, sock: socket.socket) -> None:
        super().__init__(sock)
        self._background = Background()
        self._engine_name = kind_of(Path(load.path), load.settings.engine).name
        check_names(*formats(load.settings))  # fail before the slow part
        budgets = choose_budgets(load)
        engine = load_model(load, budgets.ram_bytes, self.link.send)
        check_kv_bits(engine.capabilities, load.settings.kv_bits)
        storage = open_storage(
            load,
            budgets,
            engine.capabilities,
            self._inbox.put,
            self.link.send,
            engine.sequences.allocate,
            on_remove=lambda entry: self._runtime.remove(entry),
            on_forget=lambda entry: self._runtime.kv.forget(entry),
        )
        self._runtime: Runtime = build(
            engine, storage, emit=self.emit, log=self.link.send, is_undisturbed=self._is_undisturbed
        )
        self.tokenisation = Tokenisation(
            engine.tokenizer,
            engine.capabilities.context_tokens,
            self._runtime.input_processor.encode_wrapped,
            self._runtime.input_processor.encode_conversation,
        )
        self.daemons = (self.tick, *self.daemons)

    def _await_folder(self) -> None:
        """Wait up to 5 s for the cache folder, so that the first request finds its state.

        A large folder is read to its end while turns run.
        """
        until_s = time.monotonic() + 5.0
        with contextlib.suppress(Empty):
            while not self._runtime.storage.is_settled:
                message = self._inbox.get(timeout=max(until_s - time.monotonic(), 0.0))
                assert not isinstance(message, Stop), "nothing is read from the front yet"
                self._handle(message)

    def ready(self) -> Ready:
        """Describe the model, and the part of the cache folder that has been read."""
        self._await_folder()
        engine, storage = self._runtime.engine, self._runtime.storage
        capabilities, tokenizer = engine.capabilities, engine.tokenizer
        return Ready(
            context_tokens=capabilities.context_tokens,
            pool_tokens=capabilities.pool_tokens,
            chat_template=engine.chat_template,
            vocabulary=tokenizer.size,
            bos=tokenizer.text(tokenizer.bos),
            eos=tokenizer.text(tokenizer.eos),
            end_tokens=tuple(sorted(tokenizer.end_tokens)),
            has_reasoning=self._runtime.input_processor.has_reasoning,
            engine=self._engine_name,
            architecture=capabilities.architecture,
            parameters=capabilities.parameters,
            quantization=capabilities.quantization,
            modalities=tuple(sorted(capabilities.modalities)),
            gpus=tuple(DeviceInfo(each.name, each.memory_bytes) for each in capabilities.gpus),
            layers=capabilities.layers,
            gpu_layers=capabilities.gpu_layers,
            capacities=capacities(engine, storage.store.tiers),
            exact_step_tokens=capabilities.step_tokens,
            has_state_files=engine.state_files is not None,
            on_disk=storage.is_on_disk,
            conversations=storage.conversations,
        )

    @property
    def disk_state(self) -> str:
        return self._runtime.storage.disk_state

    def _receive(self, message: TurnRequest | AdminRequest | Cancel, size_bytes: int) -> None:
        match message:
            case GenerateRequest():
                stopwatch, turns = Stopwatch(message.received_s), tuple(message.turns)
                encode = partial(self._runtime.pipeline.encode_choices, message, stopwatch)
                self._encode(
                    message,
                    size_bytes,
                    encode,
                    "encoding the prompt",
                    turns,
                    is_constrained=is_constrained(message),
                )
            case AdminRequest(op=Validate() | IndexPrompt()):
                prepare = partial(self._encode_admin, message)
                self._encode(message, size_bytes, prepare, "encoding the prompt")
            case AdminRequest():
                self._inbox.put(_ReadyAdmin(message))
            case Cancel():
                self._inbox.put(message)
            case _:
                raise AssertionError("this model makes no vectors")

    def _encode_admin(self, request: AdminRequest) -> Sequence[_ReadyAdmin]:
        assert isinstance(request.op, Validate | IndexPrompt)
        prompt = self._runtime.input_processor.encode_about(request.op, request.salt)
        return [_ReadyAdmin(request, prompt)]

    def _step(self) -> bool:
        has_more = self._background.run()
        busy = self._runtime.scheduler.step()
        self._runtime.storage.give_way(busy)
        return busy or has_more

    @property
    def _max_wait_s(self) -> float | None:
        """Wake up when the next turn stops waiting for a slow tier."""
        return self._runtime.scheduler.wait_s

    def _is_undisturbed(self) -> bool:
        return self._inbox.empty() and not self._background.has_work

    def _handle(self, message: _Message) -> None:
        match message:
            case Cancel(turn):
                self._runtime.scheduler.cancel(turn)
            case Turn():
                self._submit(message)
            case _ReadyAdmin(request, prompt):
                self._background.add(self._administer(request, prompt))
            case _Tick():
                self._background.add(self._runtime.upkeep())
            case _:
                if remaining := self._runtime.storage.on_event(message):
                    self._background.add(remaining)

    def _submit(self, turn: Turn) -> None:
        try:
            self._runtime.pipeline.find(turn)
        except ServerError as error:
            self.emit([Failed(turn.id, error.info)])
        else:
            self._runtime.scheduler.submit(turn)

    def _administer(self, request: AdminRequest, prompt: EncodedPrompt | None) -> Pieces[None]:
        """Answer an admin request. Its failure must not end the process and the running turns."""

        def reply(result: AdminResult) -> None:
            self.link.send(AdminReply(request.id, result))

        try:
            yield from self._runtime.admin.answer(request, prompt, reply)
        except ServerError as error:
            self.link.send(AdminReply(request.id, error=error.info))
        except Exception as error:
            line = f"an admin request failed: {error!r}"
            self.link.send(LogLine("error", line, request.request_id))
            failure = ServerError("the request failed; see the log").info
            self.link.send(AdminReply(request.id, error=failure))

    def tick(self) -> None:
        """Request upkeep every minute, on a thread of its own."""
        while True:
            time.sleep(60.0)
            self._inbox.put(_Tick())

    def close(self) -> None:
        self._runtime.close()
        self.link.close()
        self._runtime.engine.close()
