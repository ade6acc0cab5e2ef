"""A scenario of pictures: questions about one that the server has never seen."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

from rekindle.bench.client import Message
from rekindle.bench.rig import Conversation, Rig, Turn

SIDE_PIXELS = 512
COLOURS = ("red", "blue", "green", "yellow", "purple", "orange")
FIRST = "What do you see?"
SECOND = "What color is the background?"
OTHER = "How many shapes are there?"


@dataclass(frozen=True, slots=True)
class Pictures:
    """The first question about a picture, a second one in the same conversation, and one of
    another conversation that begins with the same picture."""

    first: Turn
    second: Turn
    other: Turn

    def figures(self) -> dict[str, float]:
        return {
            "pictures_first_s": self.first.ttft_s,
            "pictures_second_s": self.second.ttft_s,
            "pictures_other_s": self.other.ttft_s,
            "pictures_second_over_first": self.second.ttft_s / self.first.ttft_s,
        }


async def measure_pictures(rig: Rig) -> Pictures:
    """Time to first token of three questions about a picture that was drawn for this round."""
    picture = _picture_part(rig.chance)
    talk = Conversation(rig)
    first = await talk.ask([picture, {"type": "text", "text": FIRST}])
    second = await talk.ask(SECOND)
    other = await Conversation(rig).ask([picture, {"type": "text", "text": OTHER}])
    return Pictures(first, second, other)


def _picture_part(chance: Random) -> Message:
    """Shapes on white, nowhere the same twice, as a `data:` URL."""
    picture = Image.new("RGB", (SIDE_PIXELS, SIDE_PIXELS), "white")
    draw = ImageDraw.Draw(picture)
    for colour in chance.sample(COLOURS, 2):
        left, top = (chance.randrange(SIDE_PIXELS * 2 // 3) for _ in range(2))
        size = chance.randrange(SIDE_PIXELS // 6, SIDE_PIXELS // 3)
        shape = chance.choice((draw.rectangle, draw.ellipse))
        shape((left, top, left + size, top + size), fill=colour)
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
