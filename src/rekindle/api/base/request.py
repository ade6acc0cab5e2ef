"""Builds the `GenerateRequest` of a turn, for every dialect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from msgspec import structs
from starlette.requests import Request

from rekindle.api.base.fields import MAX_ID_CHARACTERS
from rekindle.api.base.models import models_of
from rekindle.config import Config
from rekindle.http.auth import caller_of
from rekindle.protocol.requests import Choice, GenerateRequest, Names, SamplingParams
from rekindle.protocol.settings import Normalise as NormaliseSetting

AFFINITY_HEADER = "x-session-affinity"  # opencode sends its session in it
DAY_S = 86_400.0
#: Reasoning efforts that chat templates do not know, and the nearest one that they do.
EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}


def or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Adds what is the same for all dialects: tenant, session and the server's defaults."""

    config: Config
    salt: bytes  # of the tenant
    session: str | None = None  # from the affinity header

    @classmethod
    def of(cls, http: Request) -> RequestBuilder:
        session = http.headers.get(AFFINITY_HEADER)
        return cls(models_of(http).config, caller_of(http).salt, session)

    def build(
        self,
        *,
        max_tokens: int | None,
        sampling: SamplingParams | None = None,
        names: Names | None = None,
        more_choices: Sequence[Choice] = (),
        use_cache: bool | None = None,
        exact: bool | None = None,
        normalise: NormaliseSetting | None = None,
        kv_bits: int | None = None,
        kv_quantization_start: int | None = None,
        **fields: Any,
    ) -> GenerateRequest:
        """Build one turn, or one for each choice. None stands for the server's default.

        `fields` are further fields of `GenerateRequest`: the prompt, tools, stop strings and so on.
        """
        config = self.config
        reuse = config.context_cache and use_cache is not False
        return GenerateRequest(
            turn=0,
            sampling=sampling or SamplingParams(),
            max_tokens=max_tokens,
            reuse=reuse,
            names=self._names(names) if reuse else None,
            more_choices=[
                choice if reuse else structs.replace(choice, names=None) for choice in more_choices
            ],
            exact=or_default(exact, config.exact),
            normalise=or_default(normalise, config.normalise),
            kv_bits=or_default(kv_bits, config.kv_bits),
            kv_quantization_start=or_default(kv_quantization_start, config.kv_quantization_start),
            salt=self.salt,
            **fields,
        )

    def _names(self, names: Names | None) -> Names | None:
        """The request's own names win over the session of the header."""
        names = names or Names()
        if self.session and names.prompt_cache_key is None:
            names = structs.replace(names, prompt_cache_key=short_name(self.session))
        return None if names == Names() else names


def short_name(name: str) -> str:
    """Hash a name that is too long for an id. Some clients put a whole object into it."""
    if len(name) <= MAX_ID_CHARACTERS:
        return name
    return blake3(name.encode(errors="replace")).hexdigest()


def retention(prompt_cache_retention: str | None) -> dict[str, Any]:
    """The fields of `Names` that OpenAI's `prompt_cache_retention` sets."""
    return {
        "ttl_s": DAY_S if prompt_cache_retention == "24h" else None,
        "in_memory": prompt_cache_retention in ("in_memory", "in-memory"),
    }
