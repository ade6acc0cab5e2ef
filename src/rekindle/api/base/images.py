"""The pictures of a conversation: loaded, and where each of them stands in the messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from rekindle.api.base.messages import VIDEO, Message, rendered
from rekindle.api.base.turns import while_connected
from rekindle.errors import Unsupported
from rekindle.http.auth import caller_of
from rekindle.http.body import body_of
from rekindle.media.loader import Hold, LoadedImage, MediaLoader, MediaSource
from rekindle.protocol.media import IMAGE, TEXT, Picture
from rekindle.worker.client import RuntimeClient

MEDIA = "media"  # in the state of the application


@dataclass(frozen=True, slots=True)
class Illustrated:
    """A conversation as the runtime gets it: its n-th image part is the n-th picture."""

    messages: list[dict[str, Any]]
    pictures: list[Picture]


async def illustrate(
    request: Request, runtime: RuntimeClient, messages: Sequence[Message], resize: list[int] | None
) -> Illustrated | None:
    """None: there are no pictures in these messages."""
    if not has_media(messages):
        return None
    media: MediaLoader = getattr(request.state, MEDIA)
    hold, tenant = body_of(request).hold, caller_of(request).salt
    return await while_connected(
        request, load_pictures(media, runtime, messages, resize, tenant, hold)
    )


def has_media(messages: Sequence[Message]) -> bool:
    return any(message.media for message in messages)


async def load_pictures(
    media: MediaLoader,
    runtime: RuntimeClient,
    messages: Sequence[Message],
    resize: list[int] | None,
    tenant: bytes,
    hold: Hold = lambda _bytes: None,
) -> Illustrated:
    """Raises before anything is fetched where the model cannot see."""
    if IMAGE not in runtime.loaded.modalities:
        raise Unsupported(
            f"the model {runtime.name} reads text alone: leave pictures and videos out, or serve a "
            "model that has a projector (--vlm, --mmproj)",
            param="messages",
        )
    sources = list(_sources(messages, resize))
    return _expanded(rendered(list(messages)), await media.load(sources, tenant, hold))


def _sources(messages: Sequence[Message], resize: list[int] | None) -> Iterator[MediaSource]:
    for number, message in enumerate(messages):
        for place, part in message.media:
            yield part.source(f"messages.{number}.content.{place}", resize)


def _expanded(messages: list[dict[str, Any]], loaded: list[list[LoadedImage]]) -> Illustrated:
    """A video becomes its frames, each behind the time at which it is seen."""
    rest = iter(loaded)
    for message in messages:
        if isinstance(message.get("content"), list):
            parts = message["content"]
            message["content"] = [each for part in parts for each in _parts(part, rest)]
    return Illustrated(messages, [each.image for images in loaded for each in images])


def _parts(part: dict[str, Any], rest: Iterator[list[LoadedImage]]) -> Iterator[dict[str, Any]]:
    if part["type"] not in (IMAGE, VIDEO):
        yield part
        return
    for shot in next(rest):
        if shot.at_s is not None:
            yield {"type": TEXT, "text": f"<{shot.at_s:.1f} seconds>"}
        yield {"type": IMAGE}
