"""Provides pictures of coloured shapes, and the answers of `smollm2-shapes` about them.

`tools/projector/make_samples.py` drew them. The margin of a question says how sure the model is.
Every build gives the same answer if the margin is at least 3.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SURE = 3.0


@dataclass(frozen=True)
class Question:
    file: str
    ask: str
    expect: str
    margin: float


def _read() -> Any:
    return json.loads((FOLDER / "samples.json").read_text(encoding="utf-8"))


def questions(margin: float = SURE) -> list[Question]:
    """Questions about one picture each."""
    every = [
        Question(each["file"], **item) for each in _read()["pictures"] for item in each["questions"]
    ]
    return [question for question in every if question.margin >= margin]


def conversations() -> list[list[dict[str, Any]]]:
    """Turns with their `images`, the question to `ask` and the answer to `expect`."""
    return [each["turns"] for each in _read()["conversations"]]


def data_url(file: str) -> str:
    kind = "png" if file.endswith(".png") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode((FOLDER / file).read_bytes()).decode()}"


def asking(ask: str, *files: str) -> dict[str, Any]:
    """A user message with the pictures and the question."""
    images = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
    return {"role": "user", "content": [*images, {"type": "text", "text": ask}]}
