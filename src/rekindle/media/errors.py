"""Defines the errors of images and videos in a request. All of them are the client's to fix."""

from __future__ import annotations

from rekindle.errors import BadRequest


class BadMedia(BadRequest):
    """An image or video cannot be fetched or decoded, or is too large."""

    code = "invalid_media"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="messages")


class MediaRefused(BadMedia):
    """The server must not fetch from this address."""

    code = "media_refused"
