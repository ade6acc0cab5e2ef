"""What is wrong with a picture or a video of a request. All of it is the client's to mend."""

from __future__ import annotations

from rekindle.errors import BadRequest


class BadMedia(BadRequest):
    """It cannot be fetched, is not what it should be, or is too large."""

    code = "invalid_media"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="messages")


class MediaRefused(BadMedia):
    """It must not be fetched from there."""

    code = "media_refused"
