"""Renders the messages of a chat for the runtime and loads their images and videos."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from rekindle.api.base.messages import VIDEO, Message, rendered
from rekindle.api.base.turns import while_connected
from rekindle.errors import Unsupported
from rekindle.http.auth import caller_of
from rekindle.http.body import body_of, run_off_loop_if_large
from rekindle.media.loader import Hold, LoadedImage, MediaLoader, MediaSource
from rekindle.protocol.requests import IMAGE, TEXT, Picture
from rekindle.worker.client import RuntimeClient

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


async def load_media(
    media: MediaLoader,
    runtime: RuntimeClient,
    messages: Sequence[Message],
    resize: list[int] | None,
    tenant: bytes,
    hold: Hold = lambda _bytes: None,
) -> RenderedChat:
    """Raises Unsupported, before fetching anything, if the model cannot see."""
    sources = list(_sources(messages, resize))
    if sources and IMAGE not in runtime.loaded.modalities:
        raise Unsupported(
            f"the model {runtime.name} reads text alone: leave images and videos out, or serve a "
            "model that has a projector (--vlm, --mmproj)",
            param="messages",
        )
    loaded = await media.load(sources, tenant, hold) if sources else []
    return _expanded(rendered(messages), loaded)


def _sources(messages: Sequence[Message], resize: list[int] | None) -> Iterator[MediaSource]:
    for number, message in enumerate(messages):
        for place, part in message.media:
            yield part.source(f"messages.{number}.content.{place}", resize)


def _expanded(messages: list[dict[str, Any]], loaded: list[list[LoadedImage]]) -> RenderedChat:
    """Replace each video by its frames, each after the time at which it is seen."""
    rest = iter(loaded)
    for message in messages:
        if isinstance(message.get("content"), list):
            parts = message["content"]
            message["content"] = [each for part in parts for each in _parts(part, rest)]
    return RenderedChat(messages, [each.image for images in loaded for each in images])


def _parts(part: dict[str, Any], rest: Iterator[list[LoadedImage]]) -> Iterator[dict[str, Any]]:
    if part["type"] not in (IMAGE, VIDEO):
        yield part
        return
    for image in next(rest):
        if image.at_s is not None:
            yield {"type": TEXT, "text": f"<{image.at_s:.1f} seconds>"}
        yield {"type": IMAGE}
