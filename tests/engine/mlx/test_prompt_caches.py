"""Prompt cache files are exchanged with mlx_lm in both directions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from rekindle.engine.mlx.layouts import Layouts
from rekindle.engine.mlx.prompt_caches import TOKENS, PromptCaches
from rekindle.errors import BadRequest, NoMemory
from tests.support.mlx_models import PROMPT, TRUNCATING, WHOLE, answer, step, tiny_model
from tests.support.rounds import rounds

FAMILIES = (*TRUNCATING, *WHOLE)
MORE = [9, 8, 7]
BLOCK = 16


def used(family: str, tokens: int) -> tuple[Any, Layouts, list[Any]]:
    model = tiny_model(family)
    layouts = Layouts(model, b"weights")
    caches = make_prompt_cache(model)
    step(model, caches, PROMPT[:tokens])
    return model, layouts, caches


def files_of(layouts: Layouts, free_bytes: int = 1 << 40) -> PromptCaches:
    return PromptCaches(layouts, layouts.default, lambda: free_bytes)


def saved_by_mlx_lm(path: Path, caches: list[Any], tokens: list[int] | None) -> Path:
    known = {"model": "tiny"} if tokens is None else {TOKENS: json.dumps(tokens)}
    save_prompt_cache(str(path), caches, known)
    return path


def restored(layouts: Layouts, files: PromptCaches, path: Path) -> tuple[list[Any], list[int]]:
    """Restore the content of a file block by block."""
    found = files.read(path)
    caches = layouts.make_caches(layouts.default)
    count = len(found.tokens)
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        blob = found.export(start, stop, resumable=stop == count)
        layouts[layouts.default].restore_block(caches, blob, start, stop, resumable=stop == count)
    return caches, found.tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [7, 50])
def test_mlx_lm_continues_from_our_file(family: str, tokens: int, tmp_path: Path) -> None:
    model, layouts, caches = used(family, tokens)
    files = files_of(layouts)
    writer = files.writer()
    layout = layouts[layouts.default]
    for start in range(0, tokens, BLOCK):
        stop = min(start + BLOCK, tokens)
        blob = layout.export_block(caches, start, stop, resumable=stop == tokens)
        writer.append(blob, stop - start, resumable=stop == tokens)
    path = tmp_path / "ours.safetensors"
    writer.save(path, PROMPT[:tokens])
    loaded, known = load_prompt_cache(str(path), return_metadata=True)
    assert json.loads(known[TOKENS]) == PROMPT[:tokens]
    again, named = restored(layouts, files, path)
    expected = answer(model, caches, MORE)
    assert answer(model, loaded, MORE) == expected
    assert answer(model, again, MORE) == expected
    assert named == PROMPT[:tokens]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [7, 50])
def test_we_continue_from_a_file_of_mlx_lm(family: str, tokens: int, tmp_path: Path) -> None:
    model, layouts, caches = used(family, tokens)
    for token in (4, 5, 6):  # a window that has begun again, a chunk that has grown
        step(model, caches, [token])
    prompt = [*PROMPT[:tokens], 4, 5, 6]
    path = saved_by_mlx_lm(tmp_path / "theirs.safetensors", caches, prompt)
    again, named = restored(layouts, files_of(layouts), path)
    assert named == prompt
    assert answer(model, again, MORE) == answer(model, caches, MORE)


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama4", "falcon_h1"])
def test_a_file_with_a_wrong_number_of_tokens_is_refused(family: str, tmp_path: Path) -> None:
    _, layouts, caches = used(family, 50)
    for count in (30, 60):
        path = saved_by_mlx_lm(tmp_path / "theirs.safetensors", caches, PROMPT[:count])
        with pytest.raises(BadRequest, match=f"50 tokens and names {count}"):
            files_of(layouts).read(path)


def test_our_file_may_end_within_the_last_block(tmp_path: Path) -> None:
    model, layouts, caches = used("llama", 50)
    writer = files_of(layouts).writer()
    writer.append(layouts[layouts.default].export_block(caches, 0, 50), 50)
    writer.save(tmp_path / "ours.safetensors", PROMPT[:30])
    loaded = load_prompt_cache(str(tmp_path / "ours.safetensors"))
    _, _, shorter = used("llama", 30)
    assert loaded[0].offset == 30
    assert mx.allclose(step(model, loaded, MORE), step(model, shorter, MORE), atol=1e-4).item()


def test_a_file_without_tokens_is_refused_with_a_remedy(tmp_path: Path) -> None:
    _, layouts, caches = used("llama", 20)
    files = files_of(layouts)
    for tokens in (None, [], ["a"], [1.5]):
        path = saved_by_mlx_lm(tmp_path / "theirs.safetensors", caches, tokens)  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match="--tokens"):
            files.read(path)


def test_state_of_another_model_is_refused(tmp_path: Path) -> None:
    _, layouts, caches = used("llama", 20)
    files = files_of(layouts)
    writer = files.writer()
    writer.append(layouts[layouts.default].export_block(caches, 0, 20), 20)
    writer.save(tmp_path / "ours.safetensors", PROMPT[:20])
    other = Layouts(tiny_model("llama"), b"other weights")
    with pytest.raises(BadRequest, match="another model"):
        files_of(other).read(tmp_path / "ours.safetensors")
    for family, message in (("llama-narrow", "shape"), ("gemma3", "Layer"), ("mamba", "Layer")):
        strange = Layouts(tiny_model(family), b"weights")
        path = saved_by_mlx_lm(tmp_path / "theirs.safetensors", caches, PROMPT[:20])
        with pytest.raises(BadRequest, match=message):
            files_of(strange).read(path)
    path = saved_by_mlx_lm(tmp_path / "more.safetensors", [*caches, KVCache()], PROMPT[:20])
    with pytest.raises(BadRequest, match="more than the 2 layers"):
        files.read(path)


def test_quantised_keys_and_limited_caches_are_refused_by_name(tmp_path: Path) -> None:
    model, layouts, caches = used("llama", 20)
    quantised = [each.to_quantized(group_size=64, bits=8) for each in caches]
    assert isinstance(quantised[0], QuantizedKVCache)
    limited = [RotatingKVCache(max_size=1024, keep=4) for _ in caches]  # --max-kv-size
    step(model, limited, PROMPT[:20])
    for strange in (quantised, limited):
        path = saved_by_mlx_lm(tmp_path / "strange.safetensors", strange, PROMPT[:20])
        with pytest.raises(BadRequest, match=type(strange[0]).__name__):
            files_of(layouts).read(path)


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Replace the header of a file."""
    content = path.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:data])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[data:])
    return path


def test_overlapping_arrays_and_too_many_entries_are_refused(tmp_path: Path) -> None:
    _, layouts, caches = used("llama", 20)
    path = tmp_path / "theirs.safetensors"

    def overlap(header: dict[str, Any]) -> None:
        header["1.0"] = header["0.0"]

    def fill(header: dict[str, Any]) -> None:
        header["__metadata__"] |= {f"0.{n}": "" for n in range(1000)}

    for change, message in ((overlap, "overlap"), (fill, "more arrays or metadata")):
        saved_by_mlx_lm(path, caches, PROMPT[:20])
        with pytest.raises(BadRequest, match=message):
            files_of(layouts).read(rewritten(path, change))


def test_buffers_far_longer_than_the_tokens_are_refused(tmp_path: Path) -> None:
    _, layouts, caches = used("llama", 20)
    for cache in caches:
        longer = [(0, 0), (0, 0), (0, 300), (0, 0)]
        cache.keys, cache.values = mx.pad(cache.keys, longer), mx.pad(cache.values, longer)
    path = saved_by_mlx_lm(tmp_path / "theirs.safetensors", caches, PROMPT[:20])
    with pytest.raises(BadRequest, match="another shape"):
        files_of(layouts).read(path)


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_nothing_is_read_without_memory_for_it(family: str, tmp_path: Path) -> None:
    _, layouts, caches = used(family, 20)
    path = saved_by_mlx_lm(tmp_path / "theirs.safetensors", caches, PROMPT[:20])
    found = files_of(layouts, free_bytes=1000).read(path)
    assert found.tokens == PROMPT[:20]
    with pytest.raises(NoMemory, match="state in this file"):
        found.export(0, 20, resumable=True)


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1", "llama4"])
@pytest.mark.long
def test_a_damaged_file_is_refused_or_has_other_values(family: str, tmp_path: Path) -> None:
    chance = random.Random(11)
    model, layouts, caches = used(family, 30)
    files = files_of(layouts)
    path = saved_by_mlx_lm(tmp_path / "good.safetensors", caches, PROMPT[:30])
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    bad = tmp_path / "bad.safetensors"
    for _ in range(rounds(150, 3000)):
        content = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(chance.choice((header, len(good))))
            content[place] = chance.choice((0, 34, 44, 48, 57, 93, 255, chance.randrange(256)))
        cut = chance.choice((len(content), len(content), chance.randrange(len(content))))
        bad.write_bytes(content[:cut])
        try:
            again, _ = restored(layouts, files, bad)
        except BadRequest:
            continue
        step(model, again, [5])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        (40).to_bytes(8, "little") + b'{"__metadata__":{"0.rekindle_tokens":7}}',
    ],
)
def test_a_file_in_another_format_is_refused(content: bytes, tmp_path: Path) -> None:
    layouts = Layouts(tiny_model("llama"), b"weights")
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadRequest, match="not a prompt cache in safetensors format"):
        files_of(layouts).read(path)
