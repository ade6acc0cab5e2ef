"""Builds a runtime from a loaded engine and its settings, part by part (composition root)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rekindle.chat.describe import Preview
from rekindle.chat.encode import Encoder
from rekindle.chat.template import ChatTemplate
from rekindle.chat.tools.registry import DEFAULT_TOOL_FORMAT
from rekindle.engine.base import Engine
from rekindle.errors import TemplateFailed
from rekindle.kvcache.entries.entries import Entry
from rekindle.protocol.events import Event
from rekindle.protocol.frames import LogLine
from rekindle.protocol.settings import AUTO, RuntimeSettings
from rekindle.runtime.admin.admin import Admin
from rekindle.runtime.admin.cache_info import CacheInfo
from rekindle.runtime.admin.state_transfer import StateTransfer
from rekindle.runtime.device.images import PictureEncoder
from rekindle.runtime.device.kv_manager import KvManager
from rekindle.runtime.encode.input_processor import InputProcessor, OutputFormat
from rekindle.runtime.model_process import Pieces
from rekindle.runtime.reuse.admission import Admission, Planner
from rekindle.runtime.reuse.sessions import Pins, Sessions
from rekindle.runtime.schedule.pipeline import Pipeline
from rekindle.runtime.schedule.scheduler import Scheduler
from rekindle.runtime.storage.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """One loaded model with its cache. A process serves it. Tests drive it step by step."""

    engine: Engine
    storage: Storage
    input_processor: InputProcessor
    sessions: Sessions
    admission: Admission
    kv: KvManager
    pipeline: Pipeline
    scheduler: Scheduler
    cache_info: CacheInfo
    admin: Admin

    def remove(self, entry: Entry) -> None:
        """Free what a deleted conversation has outside the store."""
        self.kv.remove(entry)
        self.input_processor.recent_chats.forget(entry.tenant)

    def upkeep(self) -> Pieces[None]:
        """Collect expired entries and free unused memory. Runs once a minute."""
        yield from self.storage.upkeep()
        self.kv.release_idle()

    def close(self) -> None:
        """End every turn and keep its state. The caller closes the engine."""
        self.scheduler.stop()
        self.kv.offload_all()
        self.storage.close()
        self.input_processor.close()


def build(
    engine: Engine,
    storage: Storage,
    *,
    emit: Callable[[list[Event]], None],
    log: Callable[[LogLine], None],
    idle_tokens: int | None = None,
    is_undisturbed: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> Runtime:
    """`emit` receives the events of turns, and `log` lines for the server's log. `idle_tokens`
    limits how much of the engine's pool finished sequences may hold. `is_undisturbed` tells whether
    nothing but running turns wants the engine's thread. `clock` measures the engine's steps."""
    template = _template(engine, storage.settings, log)
    encoder = Encoder(engine.tokenizer, template)
    output_format = _output_format(engine, storage.settings, template)
    input_processor = InputProcessor(engine, storage, encoder, output_format)
    pins, shared = Pins(storage.entries, storage.store), input_processor.shared_namespace
    sessions = Sessions(storage, shared, pins, encoder, log)
    planner = Planner(engine.capabilities, storage.store, shared)
    kv = KvManager(engine, storage, idle_tokens)
    admission = Admission(engine, storage.store, planner, kv)
    pipeline = Pipeline(engine, input_processor, sessions, admission, kv)
    pictures, parallel = PictureEncoder(engine, storage.pictures), storage.settings.parallel
    scheduler = Scheduler(
        engine, kv, pictures, pipeline, emit, is_undisturbed, parallel=parallel, clock=clock
    )
    preview = Preview(template, engine.tokenizer.control_texts)
    statuses, turns = pipeline.statuses, lambda: scheduler.turns
    cache_info = CacheInfo(storage, planner, preview, kv.counts, statuses, turns)
    transfer = StateTransfer(engine, storage, kv.export)
    return Runtime(
        engine=engine,
        storage=storage,
        input_processor=input_processor,
        sessions=sessions,
        admission=admission,
        kv=kv,
        pipeline=pipeline,
        scheduler=scheduler,
        cache_info=cache_info,
        admin=Admin(storage, input_processor, sessions, kv.export, planner, cache_info, transfer),
    )


def _output_format(
    engine: Engine, settings: RuntimeSettings, template: ChatTemplate | None
) -> OutputFormat:
    tool_format, reasoning_format = formats(settings)
    if tool_format is None and template is not None and not template.shows_tools:
        tool_format = DEFAULT_TOOL_FORMAT  # in which we ask for calls where the template does not
    return OutputFormat(engine, tool_format, reasoning_format)


def formats(settings: RuntimeSettings) -> tuple[str | None, str | None]:
    """Return the configured tool and reasoning formats. None means: detect it in the template."""
    named = (settings.tool_format, settings.reasoning_format)
    tool_format, reasoning_format = (None if name == AUTO else name for name in named)
    return tool_format, reasoning_format


def _template(
    engine: Engine, settings: RuntimeSettings, log: Callable[[LogLine], None]
) -> ChatTemplate | None:
    """Compile the model's chat template. If that fails, the model serves completions only."""
    tokenizer = engine.tokenizer
    if engine.chat_template is None:
        return None
    try:
        template = ChatTemplate(
            engine.chat_template,
            bos_token=tokenizer.text(tokenizer.bos),
            eos_token=tokenizer.text(tokenizer.eos),
            defaults=settings.chat_template_kwargs,
        )
    except TemplateFailed as error:
        log(LogLine("warning", f"chat is not served: {error}"))
        return None
    for name in template.unread_defaults:
        log(LogLine("warning", f"`chat_template_kwargs`: this model's template reads no {name!r}"))
    return template
