"""What a model's file, or its folder of files, tells from outside."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelFile:
    format: str  # its suffix; of a folder, that of its weights
    size_bytes: int
    modified_s: float

    @classmethod
    def at(cls, path: Path) -> ModelFile:
        """Zeros for what is gone: the model was loaded, and goes on."""
        files = [each for each in path.iterdir() if each.is_file()] if path.is_dir() else [path]
        try:
            found = [(each.stat(), each.suffix) for each in files]
        except OSError:
            found = []
        largest = max(found, key=lambda each: each[0].st_size, default=None)
        return cls(
            format=(largest[1] if largest else path.suffix).lstrip("."),
            size_bytes=sum(each.st_size for each, _ in found),
            modified_s=max((each.st_mtime for each, _ in found), default=0.0),
        )
