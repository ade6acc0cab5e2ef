"""Computes presets at startup, so that their first user does not wait for the prefill."""

from __future__ import annotations

import contextlib
import logging

from rich.console import Console

from rekindle.api.base.models import ServedModels, described_tools, preset_models
from rekindle.api.base.request import RequestBuilder
from rekindle.config import Config
from rekindle.errors import ReportedError, ServerError, Unavailable
from rekindle.http.auth import OPEN_SALT, Caller
from rekindle.models.progress import OnProgress, progress_bar
from rekindle.protocol.admin import Flush
from rekindle.protocol.events import Failed, Finished, Prefill
from rekindle.protocol.requests import GenerateRequest, Prepare
from rekindle.worker.client import RuntimeClient

log = logging.getLogger("rekindle")


async def warm(config: Config, models: ServedModels, console: Console) -> None:
    """Prepare the presets with `warm_on_startup`. Failures are logged and skipped."""
    model_names = preset_models(config)
    for name, preset in config.projects.items():
        cache = preset.cache
        if not cache.warm_on_startup:
            continue
        request = RequestBuilder(config, Caller(OPEN_SALT, admin=True)).build(
            messages=[{"role": "system", "content": preset.system_prompt}],
            tools=described_tools(name, preset),
            prepare=Prepare(
                pinned=cache.pinned, ttl_s=cache.ttl, shared=preset.shared, project=name
            ),
            max_tokens=1,
            progress=True,
        )
        try:
            with progress_bar(f"warming {name}", console) as on_progress:
                runtime = models.runtime(model_names[name])
                async with models.pool.use(runtime):
                    tokens, key = await _prepare(request, runtime, on_progress)
        except ServerError as error:
            log.warning("project %s could not be prepared: %s", name, error)
        else:
            log.info("project %s is prepared: %d tokens, cache key %s", name, tokens, key)


async def _prepare(
    request: GenerateRequest, runtime: RuntimeClient, on_progress: OnProgress
) -> tuple[int, str]:
    """Compute and store a preset. Returns its number of tokens and its cache key, or raises a
    ServerError."""
    async with contextlib.aclosing(runtime.stream(request)) as events:
        async for event in events:
            if isinstance(event, Prefill):
                on_progress(event.done_tokens, event.prompt_tokens)
    if isinstance(event, Failed):
        raise ReportedError(event.error)
    if not isinstance(event, Finished):
        raise Unavailable("its turn was cancelled")
    key = event.cache.new_cache_key
    if key is None:
        raise Unavailable("its state was not kept; enable the cache or raise --ram-cache")
    await runtime.admin(Flush(key), salt=OPEN_SALT, admin=True)  # shared entries have no owner
    return event.prompt_tokens, key
