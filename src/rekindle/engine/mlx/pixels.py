"""Prepares pixels for a vision tower, with the parameters of the model's own preprocessor.

The parameters are those of transformers' image processors. Pillow and NumPy do the work, so neither
torch nor code of the model is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rekindle.engine.base import Matrix
from rekindle.errors import BadRequest, ProjectorError
from rekindle.models.folder import read_json
from rekindle.protocol.requests import Picture

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # newer folders have the parameters in here
MAX_SIDE = 4096  # of a resized picture
MAX_PIXELS = 1 << 24
MAX_RATIO = 200  # of the sides of a picture
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)

Size = tuple[int, int]  # width, height


def read_parameters(folder: Path) -> dict[str, Any]:
    """Return the parameters of the folder's image processor, or nothing."""
    old, new = (
        read_json(path) if (path := folder / name).is_file() else {}
        for name in (PREPROCESSOR, PROCESSOR)
    )
    found = old | _part(new, "image_processor")
    return {name: value for name, value in found.items() if value is not None}


def _part(about: dict[str, Any], name: str) -> dict[str, Any]:
    found = about.get(name)
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Normaliser:
    """How pixels become numbers, and how Pillow resizes."""

    mean: Seq[float]
    std: Seq[float]
    factor: float
    resample: Image.Resampling

    @classmethod
    def of(
        cls, about: dict[str, Any], mean: Seq[float], std: Seq[float], resample: int
    ) -> Normaliser:
        normalises = about.get("do_normalize", True)
        return cls(
            _three(about.get("image_mean", mean)) if normalises else (0.0,) * 3,
            _three(about.get("image_std", std)) if normalises else (1.0,) * 3,
            float(about.get("rescale_factor", 1 / 255)) if about.get("do_rescale", True) else 1.0,
            Image.Resampling(about.get("resample", resample)),
        )

    def resized(self, image: Image.Image, size: Size) -> Image.Image:
        return image if image.size == size else image.resize(size, self.resample)

    def numbers(self, image: Image.Image) -> Matrix:
        """Return (height, width, channels)."""
        mean, std = (np.array(each, np.float32) for each in (self.mean, self.std))
        scaled = np.asarray(image, np.float32) * np.float32(self.factor)
        found: Matrix = (scaled - mean) / std
        return found


def _three(values: Any) -> tuple[float, ...]:
    found = tuple(map(float, values))
    if len(found) != 3:
        raise ProjectorError(f"{PREPROCESSOR} must give a mean and a deviation for 3 channels")
    return found


def as_image(picture: Picture) -> Image.Image:
    return Image.frombytes("RGB", (picture.width, picture.height), picture.pixels)


def side_of(about: dict[str, Any], name: str, default: int) -> int:
    """Return the length of an edge: a number, or one of several spellings of a square."""
    given = about.get(name, default)
    if isinstance(given, dict):
        given = next((given[key] for key in ("longest_edge", "height") if given.get(key)), default)
    if type(given) is not int or not 0 < given <= MAX_SIDE:
        raise ProjectorError(f"`{name}` in {PREPROCESSOR} must be from 1 to {MAX_SIDE}")
    return given


def check_ratio(width: int, height: int) -> None:
    """Raise BadRequest for a picture that is too narrow."""
    if max(width, height) > MAX_RATIO * min(width, height):
        raise BadRequest(
            f"A picture of {width} x {height} pixels is too narrow for this model: one side may be "
            f"{MAX_RATIO} times as long as the other.",
            param="messages",
        )


@dataclass(frozen=True, slots=True)
class SquareCrop:
    """Makes one square: distorted, or its centre after the shorter side was resized."""

    side: int
    shortest_edge: int | None  # None: distort

    @classmethod
    def of(cls, about: dict[str, Any], side: int) -> SquareCrop:
        """`side` is what the vision tower takes. Raises ProjectorError for another one."""
        size = about.get("size", side)
        shortest = size.get("shortest_edge") if isinstance(size, dict) else None
        crops = bool(about.get("do_center_crop", shortest is not None))
        if crops and isinstance(size, int):
            shortest = size
        given = side_of(about, "crop_size" if crops else "size", side)
        if given != side or (shortest and shortest < side) or (shortest and not crops):
            raise ProjectorError(
                f"{PREPROCESSOR} makes pictures of another size than the {side} x {side} pixels of "
                "the vision tower"
            )
        return cls(side, min(int(shortest), MAX_SIDE) if shortest else None)

    def check(self, width: int, height: int) -> None:
        """Raise BadRequest for a strip that would take much memory while it is resized."""
        if self.shortest_edge is not None:
            check_ratio(width, height)

    def apply(self, image: Image.Image, how: Normaliser) -> Image.Image:
        if self.shortest_edge is None:
            return how.resized(image, (self.side, self.side))
        width, height = image.size
        longer = int(self.shortest_edge * max(image.size) / min(image.size))
        size = (self.shortest_edge, longer) if width <= height else (longer, self.shortest_edge)
        left, top = ((length - self.side) // 2 for length in size)
        box = (left, top, left + self.side, top + self.side)
        return how.resized(image, size).crop(box)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Cuts a picture into square tiles, followed by the whole picture as one more (Idefics3)."""

    side: int
    longest_edge: int
    splits: bool

    @classmethod
    def of(cls, about: dict[str, Any], side: int) -> Tiles:
        if (given := side_of(about, "max_image_size", side)) != side:
            raise ProjectorError(
                f"{PREPROCESSOR} makes tiles of {given} pixels for a vision tower of {side}"
            )
        longest = side_of(about, "size", 4 * side)
        return cls(side, longest, bool(about.get("do_image_splitting", True)))

    @property
    def most(self) -> int:
        """The largest number of columns or rows."""
        return math.ceil(self.longest_edge / self.side) if self.splits else 0

    def grid(self, width: int, height: int) -> Size:
        """Return the number of columns and rows, (0, 0) if the picture is a single tile."""
        if not self.splits:
            return 0, 0
        width, height = self._multiple(*self._longest(width, height))
        columns, rows = width // self.side, height // self.side
        return (columns, rows) if columns > 1 or rows > 1 else (0, 0)

    def cut(self, image: Image.Image, how: Normaliser) -> list[Image.Image]:
        columns, rows = self.grid(*image.size)
        longest = self._longest(*image.size)
        image = how.resized(image, longest)
        if self.splits:
            image = how.resized(image, self._multiple(*longest))
        corners = [
            (column * self.side, row * self.side)
            for row in range(rows)
            for column in range(columns)
        ]
        tiles = [image.crop((x, y, x + self.side, y + self.side)) for x, y in corners]
        return [*tiles, how.resized(image, (self.side, self.side))]

    def _longest(self, width: int, height: int) -> Size:
        """Resize the longer side, and make the other one even."""
        longest = self.longest_edge
        if width >= height:
            other = int(longest / (width / height))
            return longest, max(other + other % 2, 1)
        other = int(longest * (width / height))
        return max(other + other % 2, 1), longest

    def _multiple(self, width: int, height: int) -> Size:
        ratio, side = width / height, self.side
        if width >= height:
            width = math.ceil(width / side) * side
            return width, math.ceil(int(width / ratio) / side) * side
        height = math.ceil(height / side) * side
        return math.ceil(int(height * ratio) / side) * side, height


@dataclass(frozen=True, slots=True)
class Patches:
    """Resizes a picture to whole patches within a range of pixels (Qwen-VL)."""

    patch: int
    merge: int  # patches of a side that share a vector
    frames: int  # copies in time that share a patch
    least: int  # pixels
    most: int

    @classmethod
    def of(cls, about: dict[str, Any], patch: int, merge: int, frames: int) -> Patches:
        """`patch`, `merge` and `frames` are those of the vision tower."""
        named = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": frames}
        if any(about.get(name, value) != value for name, value in named.items()):
            raise ProjectorError(f"{PREPROCESSOR} makes other patches than the vision tower takes")
        size = _part(about, "size")
        least = about.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        most = about.get("max_pixels") or size.get("longest_edge") or 14 * 14 * 4 * 1280
        return cls(patch, merge, frames, min(least, MAX_PIXELS), min(most, MAX_PIXELS))

    def grid(self, width: int, height: int) -> Size:
        """Return the columns and rows of patches. Raises BadRequest."""
        check_ratio(width, height)
        unit = self.patch * self.merge
        wide, high = (round(side / unit) * unit for side in (width, height))
        if wide * high > self.most:
            scale = math.sqrt(width * height / self.most)
            wide, high = (
                max(unit, math.floor(side / scale / unit) * unit) for side in (width, height)
            )
        elif wide * high < self.least:
            scale = math.sqrt(self.least / (width * height))
            wide, high = (math.ceil(side * scale / unit) * unit for side in (width, height))
        return wide // self.patch, high // self.patch

    def cut(self, image: Image.Image, how: Normaliser) -> tuple[Matrix, Size]:
        """Return a row of numbers for each patch, those that share a vector together."""
        columns, rows = self.grid(*image.size)
        size = (columns * self.patch, rows * self.patch)
        numbers = how.numbers(how.resized(image, size)).transpose(2, 0, 1)
        merge, patch = self.merge, self.patch
        cells = numbers.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        ordered = cells.transpose(1, 4, 2, 5, 0, 3, 6)
        repeated = np.repeat(ordered[:, :, :, :, :, None], self.frames, axis=5)
        return repeated.reshape(rows * columns, -1), (columns, rows)
