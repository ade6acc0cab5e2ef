"""A model has several KV types, and blocks can be requantised."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from rekindle.engine.mlx.layers import leaves
from rekindle.engine.mlx.layouts import Layouts
from rekindle.errors import CorruptBlock, ModelError
from tests.support.mlx_models import PROMPT, answer, step, tiny_model

ALL = ["q8_g64", "q8_g32", "q4_g64", "q4_g32"]
MIXES = ("llama", "gemma3", "lfm2", "falcon_h1")


def used(layouts: Layouts, model: Any, kv_type: str, tokens: int) -> list[Any]:
    caches = layouts.make_caches(kv_type)
    for start in range(0, tokens, 20):
        step(model, caches, PROMPT[start : min(start + 20, tokens)])
    return caches


@pytest.mark.parametrize("family", MIXES)
def test_a_model_has_the_types_that_its_heads_allow(family: str) -> None:
    layouts = Layouts(tiny_model(family), b"weights")
    assert list(layouts.kv) == ["f32", *ALL]
    assert layouts.default == "f32"
    known = layouts.kv["q8_g64"]
    assert (known.bits, known.group_size) == (8, 64)
    assert known.token_bytes < layouts.kv["q8_g32"].token_bytes < layouts.kv["f32"].token_bytes
    assert known.checkpoint_bytes == layouts.kv["f32"].checkpoint_bytes
    assert (layouts.kv["f32"].bits, layouts.kv["f32"].group_size) == (32, None)
    assert len({each.fingerprint for each in layouts.kv.values()}) == 5


@pytest.mark.parametrize("family", ["llama-narrow", "mamba", "gpt_oss"])
def test_narrow_heads_recurrent_state_and_sinks_have_only_the_default_type(family: str) -> None:
    assert list(Layouts(tiny_model(family), b"weights").kv) == ["f32"]


def test_the_default_type_is_that_of_keys_and_values() -> None:
    for dtype, name in ((mx.bfloat16, "bf16"), (mx.float16, "f16")):
        layouts = Layouts(tiny_model("llama", dtype), b"weights")
        assert layouts.default == name
        assert layouts.kv[name].bits == 16


def test_another_model_has_other_fingerprints() -> None:
    one, other = (Layouts(tiny_model("llama"), name) for name in (b"one", b"other"))
    assert one.kv["f32"].fingerprint != other.kv["f32"].fingerprint


def test_measuring_computes_nothing() -> None:
    model = tiny_model("llama")
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    Layouts(model, b"weights")
    assert mx.get_peak_memory() - before < 1 << 20


def test_settings_name_a_type_by_its_bits() -> None:
    layouts = Layouts(tiny_model("llama"), b"weights")
    assert layouts.named("f16") == "f32"
    assert layouts.named("q8_0") == "q8_g64"
    assert layouts.named("q4_g32") == "q4_g32"
    with pytest.raises(ModelError, match="q8_g64"):
        Layouts(tiny_model("mamba"), b"weights").named("q8_0")


@pytest.mark.parametrize("family", MIXES)
@pytest.mark.parametrize("kv_type", ALL)
def test_quantised_state_is_restored_bit_by_bit(family: str, kv_type: str) -> None:
    model = tiny_model(family)
    layouts = Layouts(model, b"weights")
    layout = layouts[kv_type]
    caches = used(layouts, model, kv_type, 45)
    again = layouts.make_caches(kv_type)
    for start, stop in ((0, 20), (20, 45)):
        blob = layout.export_block(caches, start, stop, resumable=stop == 45)
        layout.restore_block(again, blob, start, stop, resumable=stop == 45)
    assert answer(model, again, [5, 6]) == answer(model, caches, [5, 6])


@pytest.mark.parametrize("family", MIXES)
@pytest.mark.parametrize("kv_type", ALL)
def test_a_requantised_block_equals_the_quantised_cache_of_mlx_lm(
    family: str, kv_type: str
) -> None:
    model = tiny_model(family, mx.bfloat16 if family == "llama" else mx.float32)
    layouts = Layouts(model, b"weights")
    usual = layouts.default
    caches = used(layouts, model, usual, 45)
    bits, group_size = layouts.kv[kv_type].bits, layouts.kv[kv_type].group_size
    quantised = [
        each.to_quantized(group_size=group_size, bits=bits)
        if type(each).__name__ == "KVCache"
        else each
        for each in leaves(caches)
    ]
    for start, stop in ((0, 45), (7, 13)):
        end = stop == 45
        blob = layouts[usual].export_block(caches, start, stop, resumable=end)
        made = layouts.requantise(blob, stop - start, usual, kv_type, resumable=end)
        assert made == layouts[kv_type].export_block(quantised, start, stop, resumable=end)


def test_8_bit_blocks_can_become_4_bit_blocks() -> None:
    model = tiny_model("llama")
    layouts = Layouts(model, b"weights")
    caches = used(layouts, model, "q8_g64", 30)
    blob = layouts["q8_g64"].export_block(caches, 0, 30)
    whole = layouts.requantise(blob, 30, "q8_g64", "q4_g32")
    into = layouts.make_caches("q4_g32")
    layouts["q4_g32"].restore_block(into, whole, 0, 30)
    part = layouts["q8_g64"].export_block(caches, 3, 9)
    made = layouts.requantise(part, 6, "q8_g64", "q4_g32")
    assert layouts["q4_g32"].export_block(into, 3, 9) == made


def test_requantising_to_more_bits_and_damaged_blocks_are_refused() -> None:
    model = tiny_model("gemma3")
    layouts = Layouts(model, b"weights")
    caches = used(layouts, model, "f32", 30)
    blob = layouts["f32"].export_block(caches, 0, 30)
    for target in ("f32", "q8_g32"):
        with pytest.raises(ValueError, match="fewer bits"):
            layouts.requantise(blob, 30, "q8_g64", target)
    for bad in (blob[:-1], blob + b"\0", b"", blob[: len(blob) // 2]):
        with pytest.raises(CorruptBlock):
            layouts.requantise(bad, 30, "f32", "q8_g64")
    with pytest.raises(CorruptBlock):
        layouts.requantise(blob, 30, "f32", "q8_g64", resumable=True)
    with pytest.raises(CorruptBlock):
        layouts["q8_g64"].restore_block(layouts.make_caches("q8_g64"), blob, 0, 30)


class OwnCache:
    """A cache that a model defines itself."""


def test_an_unknown_kind_of_cache_is_refused_by_name() -> None:
    class Model:
        layers = ()

        def make_cache(self) -> list[OwnCache]:
            return [OwnCache()]

        def __call__(self, _tokens: mx.array, cache: list[Any]) -> None: ...

    with pytest.raises(ModelError, match="OwnCache"):
        Layouts(Model(), b"weights")
