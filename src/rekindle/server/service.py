"""What the routes work with: the settings and the served models."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import Header

from rekindle.config import Config
from rekindle.errors import BadRequest, ModelNotFound
from rekindle.server.runtime_client import RuntimeClient

DEFAULT = "default"
ModelNumber = Annotated[
    str | None,
    Header(alias="X-Model-Id", description="The number of a loaded model, counted from 0."),
]


class Service:
    """The first runtime is the default model: it answers when a request names none."""

    def __init__(self, config: Config, runtimes: list[RuntimeClient]) -> None:
        self.config = config
        self._runtimes = {runtime.name: runtime for runtime in runtimes}
        self._default = runtimes[0]
        self.started_at = int(time.time())

    @property
    def runtimes(self) -> list[RuntimeClient]:
        """In the order of `--model`, which is how they are numbered."""
        return list(self._runtimes.values())

    def runtime(self, model: str | None, number: str | None = None) -> RuntimeClient:
        """The model of this name; without one, the model of this number."""
        numbered = self._default if number is None else self._numbered(number)
        if model in (None, "", DEFAULT):
            return numbered
        found = self._runtimes.get(model)
        if found is None:
            served = ", ".join(self._runtimes)
            raise ModelNotFound(
                f"The model {model[:128]!r} is not served here. Served: {served}. "
                "Leave `model` out for the first of them.",
                param="model",
            )
        return found

    def _numbered(self, number: str) -> RuntimeClient:
        loaded = {str(place): runtime for place, runtime in enumerate(self.runtimes)}
        if number not in loaded:
            names = ", ".join(f"{place} ({runtime.name})" for place, runtime in loaded.items())
            raise BadRequest(
                f"`X-Model-Id` takes the number of a loaded model: {names}.", param="X-Model-Id"
            )
        return loaded[number]

    def chosen(self, number: str | None) -> list[RuntimeClient]:
        """The model of this number alone; without one, all of them."""
        return self.runtimes if number is None else [self._numbered(number)]

    def others(self, runtime: RuntimeClient) -> list[RuntimeClient]:
        return [other for other in self.runtimes if other is not runtime]

    def is_ready(self) -> bool:
        return self._default.ready is not None
