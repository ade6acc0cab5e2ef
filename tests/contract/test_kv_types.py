"""Every engine with several KV types keeps these promises."""

from __future__ import annotations

import pytest

from rekindle.engine.base import Engine, KvType, Sequence, Work, run_step
from rekindle.errors import CorruptBlock
from tests.contract.actions import GREEDY, PROMPT, answer, cold, prefill
from tests.contract.engines import several_kv_types

pytestmark = several_kv_types


def smaller(engine: Engine) -> list[KvType]:
    """Return the types with fewer bits than the default."""
    known = engine.capabilities
    return [name for name, layout in known.kv.items() if layout.bits < known.kv_layout.bits]


def test_every_kv_type_has_its_own_layout_and_fingerprint(engine: Engine) -> None:
    layouts = engine.capabilities.kv
    assert smaller(engine)
    assert len({layout.fingerprint for layout in layouts.values()}) == len(layouts)
    by_bits = sorted(layouts.values(), key=lambda layout: layout.bits)
    sizes = [layout.token_bytes for layout in by_bits]
    assert sizes == sorted(sizes)
    assert by_bits[0].group_size
    assert by_bits[-1].group_size is None


@pytest.mark.parametrize("exact", [False, True])
def test_blocks_of_each_type_have_its_size_and_can_be_restored(engine: Engine, exact: bool) -> None:
    size = engine.capabilities.step_tokens
    for kv_type, layout in engine.capabilities.kv.items():
        expected = cold(engine, PROMPT, exact=exact, kv_type=kv_type)
        source = engine.sequences.open(exact=exact, kv_type=kv_type)
        assert source.kv_type == kv_type
        prefill(engine, source, PROMPT[:size])
        one, two = (len(engine.sequences.export(source, 0, tokens)) for tokens in (1, 2))
        assert two - one == layout.token_bytes
        into = moved(engine, source, kv_type)
        assert answer(engine, into, PROMPT) == expected
        engine.sequences.close(into)


def moved(engine: Engine, source: Sequence, kv_type: KvType) -> Sequence:
    """Requantise a sequence block by block, as the runtime does."""
    into = engine.sequences.open(exact=source.exact, kv_type=kv_type)
    block = engine.capabilities.block_tokens
    while into.length < source.length:
        stop = min(into.length + block, source.length)
        resumable = stop == source.length and not engine.capabilities.can_truncate
        blob = engine.sequences.export(source, into.length, stop, resumable=resumable)
        tokens = stop - into.length
        if kv_type != source.kv_type:
            blob = engine.sequences.requantise(
                blob, tokens, source.kv_type, kv_type, resumable=resumable
            )
        engine.sequences.restore(into, blob, tokens, resumable=resumable)
    engine.sequences.close(source)
    return into


@pytest.mark.parametrize("exact", [False, True])
def test_a_requantised_sequence_continues_and_is_restored_unchanged(
    engine: Engine, exact: bool
) -> None:
    size = engine.capabilities.step_tokens
    for kv_type in smaller(engine):
        source = engine.sequences.open(exact=exact)
        prefill(engine, source, PROMPT[:size])
        into = moved(engine, source, kv_type)
        again = moved(engine, into, kv_type)
        said = answer(engine, again, PROMPT)
        engine.sequences.close(again)
        other = engine.sequences.open(exact=exact)
        prefill(engine, other, PROMPT[:size])
        other = moved(engine, other, kv_type)
        assert answer(engine, other, PROMPT) == said
        engine.sequences.close(other)


def test_requantising_a_block_does_not_depend_on_its_neighbours(engine: Engine) -> None:
    source = engine.sequences.open(exact=True)
    prefill(engine, source, PROMPT[:20])
    usual = source.kv_type
    for kv_type in smaller(engine):
        whole = engine.sequences.open(exact=True, kv_type=kv_type)
        resumable = not engine.capabilities.can_truncate
        blob = engine.sequences.export(source, 0, 20, resumable=resumable)
        blob = engine.sequences.requantise(blob, 20, usual, kv_type, resumable=resumable)
        engine.sequences.restore(whole, blob, 20, resumable=resumable)
        part = engine.sequences.requantise(
            engine.sequences.export(source, 7, 13), 6, usual, kv_type
        )
        assert engine.sequences.export(whole, 7, 13) == part
        engine.sequences.close(whole)


def test_requantising_to_more_bits_is_refused(engine: Engine) -> None:
    usual = engine.capabilities.kv_type
    for kv_type in smaller(engine):
        sequence = engine.sequences.open(exact=False, kv_type=kv_type)
        prefill(engine, sequence, PROMPT[:8])
        blob = engine.sequences.export(sequence, 0, 8)
        for target in (usual, kv_type):
            with pytest.raises(ValueError, match=r"bits|no less"):
                engine.sequences.requantise(blob, 8, kv_type, target)
        with pytest.raises(CorruptBlock):
            engine.sequences.restore(engine.sequences.open(exact=False), blob, 8)
        with pytest.raises(ValueError, match="one KV type"):
            engine.sequences.share(sequence, 8, engine.sequences.open(exact=False))


def test_sequences_of_several_types_are_computed_in_one_step(engine: Engine) -> None:
    kinds = [(kv_type, exact) for kv_type in engine.capabilities.kv for exact in (False, True)]
    kinds = kinds[: engine.capabilities.exact_sequences * 2]
    alone = [cold(engine, PROMPT[:10], exact=exact, kv_type=name)[0] for name, exact in kinds]
    free = {kv_type: engine.sequences.free_tokens(kv_type) for kv_type in engine.capabilities.kv}
    sequences = [engine.sequences.open(exact=exact, kv_type=name) for name, exact in kinds]
    samplers = [engine.sampler(GREEDY, PROMPT[:10]) for _ in sequences]
    pairs = zip(sequences, samplers, strict=True)
    results = run_step(engine, [Work(each, PROMPT[:10], sampler) for each, sampler in pairs])
    assert [sampled.token for sampled in results if sampled] == alone
    for kv_type in {name for name, exact in kinds if not exact}:
        assert engine.sequences.free_tokens(kv_type) == free[kv_type] - 10
    for sequence in sequences:
        engine.sequences.close(sequence)
    for kv_type in free:
        assert engine.sequences.free_tokens(kv_type) == free[kv_type]
    for _ in range(3):
        engine.sequences.release_idle()
    assert cold(engine, PROMPT[:10], exact=False, kv_type=kinds[-1][0])
