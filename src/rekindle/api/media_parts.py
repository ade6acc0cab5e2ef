"""Pictures and videos as parts of a message's content, in OpenAI's form and in a plain one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rekindle.api.fields import WHOLE, takes
from rekindle.media.jobs import Sizing
from rekindle.media.loader import MOST_PICTURES, Sampling, Source
from rekindle.protocol.media import IMAGE

MOST_SIDE = 2048  # of a picture as the model gets it, in pixels
LOW_SIDE = 512  # with `detail: low`
FRAME_SIDE = 768  # of a frame of a video
MOST_FPS = 30.0
FPS = 1.0
FRAMES = 16
VIDEO = "video"  # in messages, until its frames are known
MEDIA_PARTS = '`"type": "image_url"` or `"type": "video_url"`'

Detail = Literal["auto", "low", "high"]
Side = Annotated[int, Field(ge=1, le=MOST_SIDE), WHOLE]
Resize = Annotated[
    list[Side],
    Field(min_length=1, max_length=2),
    takes(f"one side or [width, height] in pixels, each from 1 to {MOST_SIDE}"),
]


class ImageUrl(BaseModel):
    model_config = ConfigDict(strict=True)

    url: str
    detail: Detail | None = None


class ImagePart(BaseModel):
    """`image_url` is an http(s) or `data:` URL."""

    model_config = ConfigDict(strict=True)

    type: Literal["image", "image_url"]
    image_url: Annotated[
        str | ImageUrl, takes("a URL, or an object with a `url` and a `detail`: auto, low or high")
    ]
    detail: Detail | None = None

    def rendered(self) -> dict[str, Any]:
        return {"type": IMAGE}

    def source(self, where: str, resize: list[int] | None) -> Source:
        given = ImageUrl(url=self.image_url) if isinstance(self.image_url, str) else self.image_url
        low = (given.detail or self.detail) == "low"
        return Source(
            url=given.url, sizing=_sizing(resize, LOW_SIDE if low else MOST_SIDE), where=where
        )


class VideoUrl(BaseModel):
    model_config = ConfigDict(strict=True)

    url: str


class VideoPart(BaseModel):
    """Frames at equal distances: `fps` for each second, but not more than `max_frames`."""

    model_config = ConfigDict(strict=True)

    type: Literal["video", "video_url"]
    video_url: Annotated[str | VideoUrl, takes("a URL, or an object with a `url`")]
    fps: float | None = Field(None, gt=0, le=MOST_FPS)
    max_frames: Annotated[int, Field(ge=1, le=MOST_PICTURES), WHOLE] | None = None

    def rendered(self) -> dict[str, Any]:
        return {"type": VIDEO}

    def source(self, where: str, resize: list[int] | None) -> Source:
        url = self.video_url if isinstance(self.video_url, str) else self.video_url.url
        sampling = Sampling(fps=self.fps or FPS, max_frames=self.max_frames or FRAMES)
        return Source(url=url, sizing=_sizing(resize, FRAME_SIDE), sampling=sampling, where=where)


def _sizing(resize: list[int] | None, longest: int) -> Sizing:
    """One number is both sides; `resize` wins over `detail`."""
    return Sizing(longest, (resize[0], resize[-1]) if resize else None)
