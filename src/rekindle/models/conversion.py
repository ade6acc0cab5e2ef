"""Converts a model folder of safetensors to one GGUF file, which is found again.

All is checked before a byte is written: configuration, tokenizer, names and shapes of all tensors,
free space. The file becomes visible when it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from rekindle.errors import ModelError
from rekindle.models.architectures import TEXT_ONLY, ConvertibleModel, read_model
from rekindle.models.folder import weight_files
from rekindle.models.gguf import check_gguf
from rekindle.models.gguf_writer import Field, GgufTensor, file_bytes, write_gguf
from rekindle.models.local import CONVERTED
from rekindle.models.progress import Progress, task
from rekindle.models.vocabulary import vocabulary_fields
from rekindle.models.weights import (
    F32,
    StoredTensor,
    common_type,
    converted,
    kind_of_matrix,
    listed,
    read_weights,
)
from rekindle.models.workspace import publish, require_room, workspace

VERSION = 1  # of this converter: a higher one converts again
HASH_LETTERS = 12  # of each of two hashes in the name of a file
FILE_TYPES: dict[str, int] = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}  # llama.cpp's
#: Where the language model is, by who has written the folder.
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
LEFT_OUT = re.compile(
    r".*\.rotary_emb\.inv_freq|(model\.)?(vision_tower|multi_modal_projector)\..*"
)
EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class Conversion:
    """A file that can be written. Everything in the folder was checked."""

    quant: str
    fields: dict[str, Field]
    tensors: list[GgufTensor]
    note: str = ""  # for the user

    @property
    def size_bytes(self) -> int:
        return file_bytes(self.fields, self.tensors)


def convert(
    folder: Path,
    *,
    models_dir: Path,
    progress: Progress,
    quant: str | None = None,
    output: Path | None = None,
) -> Path:
    """Return the GGUF file of a folder: an earlier one if the folder is as it was then.

    `quant` defaults to the type of the weights. `output` is another place for the file, which
    must not exist. Raises ModelError.
    """
    model = read_model(folder)
    try:
        weights = read_weights(folder)
        quant = quant or common_type(weights)
        final = output or _cached(folder, quant, models_dir)
        if output is None and final.is_file():
            check_gguf(final)
            return final
        if output is not None and output.exists():
            raise ModelError(f"{output} exists. Delete it, or give another name with -o.")
        plan = plan_conversion(folder, model, weights, quant)
        if plan.note:
            progress.say(plan.note)
        with _part(final, models_dir, progress, is_cached=output is None) as part:
            if not final.is_file():  # another process may have been faster
                _write(plan, folder.resolve().name, part, progress)
                publish(part, final)
                _forget_older(final)
    except OSError as error:
        raise ModelError(
            f"Cannot convert {folder}: {error}. Nothing was kept. Check the permissions and the "
            "free space of the target, or set REKINDLE_MODELS_DIR."
        ) from error
    return final


def plan_conversion(
    folder: Path, model: ConvertibleModel, weights: dict[str, StoredTensor], quant: str
) -> Conversion:
    """Check everything, and describe the file; raises ModelError. Reads no weights."""
    found = _canonical(weights, model)
    shapes = model.shapes(found)
    _check_names(folder, found, shapes)
    tensors = list(_tensors(model, found, shapes, quant))
    name = folder.resolve().name
    fields: dict[str, Field] = {
        "general.architecture": model.architecture.name,
        "general.file_type": FILE_TYPES[quant],
        "general.quantization_version": 2,
        **model.fields,
        **vocabulary_fields(folder, model.sizes["vocabulary"], name),
    }
    return Conversion(quant, fields, tensors, TEXT_ONLY if model.architecture.text_of else "")


def _canonical(
    weights: dict[str, StoredTensor], model: ConvertibleModel
) -> dict[str, StoredTensor]:
    """Return the tensors of the language model under the names that most models use."""
    kept = {name: each for name, each in weights.items() if not LEFT_OUT.fullmatch(name)}
    prefix = next((each for each in PREFIXES if f"{each}embed_tokens.weight" in kept), PREFIXES[0])
    found = {}
    for name, tensor in kept.items():
        if name in HEADS:
            if not model.ties_embeddings:
                found[HEADS[0]] = tensor
        elif name.startswith(prefix):
            found[f"model.{name.removeprefix(prefix)}"] = tensor
        else:
            found[name] = tensor
    return found


def _check_names(
    folder: Path, found: dict[str, StoredTensor], shapes: dict[str, tuple[int, ...]]
) -> None:
    again = "Fetch the model again, into an empty folder, or give a GGUF file."
    if missing := [name for name in shapes if name not in found]:
        raise ModelError(f"{folder} lacks the tensors {listed(missing)}. {again}")
    if unknown := [name for name in found if name not in shapes]:
        raise ModelError(
            f"{folder} has tensors that its architecture does not use ({listed(unknown)}), so it "
            "would not be converted correctly. Give a GGUF file of this model, or serve the folder "
            "with MLX (pip install 'rekindle[mlx]')."
        )
    for name, shape in shapes.items():
        if found[name].info.shape != shape:
            raise ModelError(
                f"{folder} has {name} in the shape {found[name].info.shape}, and its config.json "
                f"says {shape}. {again}"
            )


def _tensors(
    model: ConvertibleModel,
    found: dict[str, StoredTensor],
    shapes: dict[str, tuple[int, ...]],
    quant: str,
) -> Iterator[GgufTensor]:
    named = _gguf_names(model)
    stacked: dict[str, list[StoredTensor]] = {}
    for name in shapes:
        stacked.setdefault(EXPERT.sub(".experts.", name), []).append(found[name])
    offset = model.architecture.norm_offset
    for name, sources in stacked.items():
        shape = sources[0].info.shape
        is_vector = len(shape) < 2 or name.endswith("mlp.gate.weight")  # kept in full precision
        is_vocabulary = name in ("model.embed_tokens.weight", HEADS[0])
        kind = F32 if is_vector else kind_of_matrix(quant, shape, is_vocabulary=is_vocabulary)
        adds = bool(offset) and name.endswith("norm.weight")
        yield converted(
            named(name),
            sources,
            kind,
            heads=_paired_heads(model, name),
            change=(lambda values: values + np.float32(offset)) if adds else None,
        )
    for name, factors in model.rope_factors.items():
        raw = np.array(factors, np.float32).tobytes()
        yield GgufTensor(name, (len(factors),), F32, partial(iter, [raw]))


def _paired_heads(model: ConvertibleModel, name: str) -> int:
    if not model.architecture.pairs_rows:
        return 0
    heads = {"q_proj": model.heads, "k_proj": model.kv_heads}
    return heads.get(name.split(".")[-2], 0)


def _gguf_names(model: ConvertibleModel) -> Callable[[str], str]:
    """Return a function that translates the name of a tensor, with the names that gguf knows."""
    import gguf  # slow to import

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[model.architecture.name], model.layers)

    def named(name: str) -> str:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found, name
        return str(found)

    return named


def _cached(folder: Path, quant: str, models_dir: Path) -> Path:
    """Return where the conversion of a folder is stored: another path once its files change."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jinja"))
    read = [*files, *weight_files(folder)]
    state = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in read]
    start = _start(folder.resolve(), quant)
    return models_dir / CONVERTED / f"{start}{_short_hash((VERSION, state))}.gguf"


def _start(folder: Path, quant: str) -> str:
    return f"{folder.name[:80]}-{quant.upper()}-{_short_hash(str(folder))}"


def _short_hash(value: object) -> str:
    return sha256(repr(value).encode()).hexdigest()[:HASH_LETTERS]


def _forget_older(final: Path) -> None:
    """Delete conversions of the same folder as it was before."""
    if final.parent.name != CONVERTED:
        return
    start = final.stem[:-HASH_LETTERS]
    for other in final.parent.iterdir():
        if other != final and other.stem[:-HASH_LETTERS] == start:
            other.unlink(missing_ok=True)


@contextmanager
def _part(final: Path, models_dir: Path, progress: Progress, *, is_cached: bool) -> Iterator[Path]:
    """Yield the path of the unfinished file, which does not outlive an error."""
    final.parent.mkdir(parents=True, exist_ok=True)
    if is_cached:
        with workspace(final, models_dir, progress) as scratch:
            yield from _removed(scratch / final.name)
    else:
        yield from _removed(final.with_name(f".{final.name}.part"))


def _removed(part: Path) -> Iterator[Path]:
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def _write(plan: Conversion, name: str, part: Path, progress: Progress) -> None:
    size_bytes = plan.size_bytes
    require_room(part.parent, size_bytes)
    title = f"Converting {name} to GGUF ({plan.quant.upper()})"
    with task(progress, size_bytes, title) as advance:
        write_gguf(part, plan.fields, plan.tensors, advance)
    check_gguf(part)
    if part.stat().st_size != size_bytes:
        raise OSError(f"{part.stat().st_size} of {size_bytes} bytes were written")
