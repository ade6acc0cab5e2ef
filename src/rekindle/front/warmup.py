"""Presets computed at startup, so that their first user waits for the answer alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping

from rich.console import Console

from rekindle.api.base.models import described_tools
from rekindle.config import Preset
from rekindle.errors import ReportedError, ServerError, Unavailable
from rekindle.http.auth import OPEN_SALT
from rekindle.models.progress import OnProgress, progress_bar
from rekindle.protocol.admin import Flush
from rekindle.protocol.events import Event, Failed, Finished, Prefill
from rekindle.protocol.requests import GenerateRequest, Prepare, SamplingParams
from rekindle.worker.client import RuntimeClient

log = logging.getLogger("rekindle")


async def warm(
    presets: Mapping[str, Preset],
    runtime_of: Callable[[str], RuntimeClient],
    console: Console,
    *,
    exact: bool = False,
    normalise: bool = True,
) -> None:
    """Prepare those with `warm_on_startup` in turn; one that fails is logged and skipped."""
    for name, preset in presets.items():
        if not preset.cache.warm_on_startup:
            continue
        try:
            with progress_bar(f"warming {name}", console) as on_progress:
                request = _request(name, preset, exact=exact, normalise=normalise)
                tokens = await _prepare(request, runtime_of(name), on_progress)
        except ServerError as error:
            log.warning("project %s could not be prepared: %s", name, error)
        else:
            log.info("project %s is prepared: %d tokens", name, tokens)


async def _prepare(
    request: GenerateRequest, runtime: RuntimeClient, on_progress: OnProgress
) -> int:
    """Compute and keep it; returns its tokens, or raises a ServerError."""
    async with contextlib.aclosing(runtime.stream(request)) as events:
        async for event in events:
            if isinstance(event, Prefill):
                on_progress(event.done_tokens, event.prompt_tokens)
    finished = _finished(event)
    if (key := finished.cache.new_cache_key) is not None:
        await runtime.admin(Flush(key), salt=OPEN_SALT, admin=True)  # shared entries have no owner
    return finished.prompt_tokens


def _finished(event: Event) -> Finished:
    """The turn's terminal event; raises unless it finished."""
    if isinstance(event, Failed):
        raise ReportedError(event.error)
    if not isinstance(event, Finished):
        raise Unavailable("its turn was cancelled")
    return event


def _request(name: str, preset: Preset, *, exact: bool, normalise: bool) -> GenerateRequest:
    return GenerateRequest(
        turn=0,
        messages=[{"role": "system", "content": preset.system_prompt}],
        tools=described_tools(name, preset),
        prepare=Prepare(pinned=preset.cache.pinned, ttl_s=preset.cache.ttl, shared=preset.shared),
        sampling=SamplingParams(),
        max_tokens=1,
        exact=exact,
        normalise=normalise,
        salt=OPEN_SALT,
        progress=True,
    )
