"""What the routes work with: the configuration and the running models."""

from __future__ import annotations

import time
from typing import Any

from rekindle.config import Config
from rekindle.errors import ModelNotFound
from rekindle.runtime.process import Runtime

DEFAULT = "default"


class Service:
    """The first runtime is the startup model, which answers when a request names none."""

    def __init__(self, config: Config, runtimes: list[Runtime]) -> None:
        self.config = config
        self._runtimes = {runtime.name: runtime for runtime in runtimes}
        self._startup = runtimes[0]
        self._created = int(time.time())

    def runtime(self, model: str | None) -> Runtime:
        if model in (None, "", DEFAULT):
            return self._startup
        found = self._runtimes.get(model)
        if found is None:
            served = ", ".join(self._runtimes)
            raise ModelNotFound(
                f"The model {model[:128]!r} is not served here. Served: {served}. "
                "Leave `model` out for the first of them.",
                param="model",
            )
        return found

    def is_ready(self) -> bool:
        return self._startup.ready is not None

    def models(self) -> list[dict[str, Any]]:
        return [
            {
                "id": runtime.name,
                "object": "model",
                "created": self._created,
                "owned_by": "rekindle",
                "max_model_len": runtime.ready.context_tokens if runtime.ready else None,
            }
            for runtime in self._runtimes.values()
        ]
