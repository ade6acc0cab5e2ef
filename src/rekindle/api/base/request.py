"""Builds the `GenerateRequest` of a turn, with its images loaded, for every dialect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from msgspec import structs
from starlette.requests import Request

from rekindle.api.base.fields import MAX_ID_CHARACTERS
from rekindle.api.base.messages import DOCUMENT, VIDEO, Message, plain_message, rendered
from rekindle.api.base.models import models_of
from rekindle.config import Config
from rekindle.errors import Unsupported
from rekindle.http.auth import Caller, caller_of
from rekindle.http.body import body_of, run_off_loop_if_large
from rekindle.http.responses import while_connected
from rekindle.media.loader import Hold, Loaded, LoadedText, MediaLoader
from rekindle.protocol.requests import (
    IMAGE,
    TEXT,
    Choice,
    GenerateRequest,
    Names,
    Picture,
    SamplingParams,
)
from rekindle.protocol.settings import Normalise as NormaliseSetting
from rekindle.worker.client import RuntimeClient

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
    caller: Caller
    session: str | None = None  # from the affinity header

    @classmethod
    def of(cls, http: Request, runtime: RuntimeClient) -> RequestBuilder:
        session = http.headers.get(AFFINITY_HEADER)
        return cls(models_of(http).config_of(runtime), caller_of(http), session)

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
            salt=self.caller.salt,
            groups=list(self.caller.groups),
            cache_bytes=self.caller.limits.cache_bytes,
            outranks=self.caller.admin and fields.get("priority", 0) > 0,
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


MEDIA = "media"  # key of the MediaLoader in the application's state


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Messages as the runtime takes them. The n-th image part stands for the n-th picture."""

    messages: list[dict[str, Any]]
    pictures: list[Picture]

    @property
    def fields(self) -> dict[str, Any]:
        return {"messages": self.messages, "pictures": self.pictures}


async def render_chat(
    request: Request,
    runtime: RuntimeClient,
    messages: Sequence[Message],
    resize: list[int] | None = None,
    *,
    stored_bytes: int = 0,
) -> RenderedChat:
    """Render the messages and load their media, unless the client disconnects first.

    `stored_bytes` is the size of messages that are not in the request's body.
    """
    messages = with_system(messages, models_of(request).system_of(runtime))
    if not any(message.media for message in messages):
        size_bytes = len(await request.body()) + stored_bytes
        return RenderedChat(
            await run_off_loop_if_large(request, size_bytes, rendered, messages), []
        )
    media: MediaLoader = getattr(request.state, MEDIA)
    hold, tenant = body_of(request).hold, caller_of(request).salt
    return await while_connected(
        request, load_media(media, runtime, messages, resize, tenant, hold)
    )


def with_system(messages: Sequence[Message], system: str | None) -> Sequence[Message]:
    """Begin a conversation that has no system prompt with the one of the model."""
    if system is None or not messages or messages[0].role in ("system", "developer"):
        return messages
    return [plain_message("system", content=system), *messages]


async def load_media(
    media: MediaLoader,
    runtime: RuntimeClient,
    messages: Sequence[Message],
    resize: list[int] | None,
    tenant: bytes,
    hold: Hold = lambda _bytes: None,
) -> RenderedChat:
    """Raises Unsupported, before fetching anything, if the model cannot see."""
    sources = [
        part.source(f"messages.{number}.content.{place}", resize)
        for number, message in enumerate(messages)
        for place, part in message.media
    ]
    sees = IMAGE in runtime.loaded.modalities
    if not sees and not all(source.is_document for source in sources):
        raise Unsupported(
            f"the model {runtime.name} reads only text: leave images and videos out, or serve a "
            "model that has a projector (--vlm, --mmproj)",
            param="messages",
        )
    loaded = await media.load(sources, tenant, hold) if sources else []
    return _expanded(rendered(messages), loaded)


def _expanded(messages: list[dict[str, Any]], loaded: list[Loaded]) -> RenderedChat:
    """Replace each video by its frames, each after the time at which it is seen, and each file by
    its name and its text."""
    rest = iter(loaded)
    for message in messages:
        if isinstance(message.get("content"), list):
            parts = message["content"]
            message["content"] = [each for part in parts for each in _parts(part, rest)]
    seen = [image for each in loaded if isinstance(each, list) for image in each]
    return RenderedChat(messages, [each.image for each in seen])


def _parts(part: dict[str, Any], rest: Iterator[Loaded]) -> Iterator[dict[str, Any]]:
    if part["type"] not in (IMAGE, VIDEO, DOCUMENT):
        yield part
        return
    loaded = next(rest)
    if isinstance(loaded, LoadedText):
        name = f"{part['name']}\n\n" if part["name"] else ""
        yield {"type": TEXT, "text": name + loaded.text}
        return
    for image in loaded:
        if image.at_s is not None:
            yield {"type": TEXT, "text": f"<{image.at_s:.1f} seconds>"}
        yield {"type": IMAGE}
