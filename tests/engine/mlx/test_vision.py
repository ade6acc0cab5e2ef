"""Pictures on MLX have the logits of mlx_vlm, and keep nothing in the model."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rekindle.engine.mlx
from rekindle.engine.base import EngineOptions, Row, Sequence, Work, run_step
from rekindle.engine.mlx.engine import MlxEngine
from rekindle.errors import BadRequest, ProjectorError
from rekindle.protocol.requests import Picture
from rekindle.tokens import Tokens
from tests.contract.actions import GREEDY, PROMPT, decode
from tests.support.pictures import drawn
from tests.support.tiny_vision import FAMILIES, quantise, write_tiny_vision
from tests.support.vlm_reference import reference_logits, reference_reply

BEFORE, BETWEEN, AFTER = PROMPT[:7], PROMPT[7:10], PROMPT[10:18]
#: Wide, high, small, and much larger than a tower's square.
PICTURES = (drawn(1), drawn(2, 30, 61), drawn(3, 9, 9), drawn(4, 200, 90))
#: In the others every vector of a picture attends to all of it. mlx_vlm computes that differently.
CAUSAL = sorted(set(FAMILIES) - {"gemma3"})


def open_engine(path: Path) -> MlxEngine:
    return MlxEngine(EngineOptions(path=path, mmproj=path, parallel=3, context_tokens=600))


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MlxEngine]:
    built = open_engine(write_tiny_vision(tmp_path / request.param, request.param))
    yield built
    built.close()


def prompt(engine: MlxEngine, pictures: Seq[Picture]) -> Tokens:
    tokens = Tokens.of(BEFORE)
    for picture in pictures:
        shown = engine.picture_tokens(picture.width, picture.height, picture.digest)
        tokens = tokens + shown + Tokens.of(BETWEEN)
    return tokens + Tokens.of(AFTER)


def edges(tokens: Tokens) -> Iterator[tuple[int, int]]:
    """The runs of text and the pictures, in order."""
    inner = [edge for span in tokens.media for edge in (span.start, span.stop)]
    return ((a, b) for a, b in pairwise([0, *inner, len(tokens)]) if a < b)


def prefill(engine: MlxEngine, sequence: Sequence, shown: Seq[Picture], chunk: int = 1000) -> int:
    """Prefill as the runtime does: text and pictures in steps of their own."""
    tokens = prompt(engine, shown)
    ids, vectors = tokens.ids(), [each for one in shown for each in engine.encode_picture(one)]
    spans = {span.start: rows for span, rows in zip(tokens.media, vectors, strict=True)}
    for start, stop in edges(tokens):
        for at in range(start, stop, chunk):
            until, rows = min(at + chunk, stop), spans.get(start)
            part = None if rows is None else rows[at - start : until - start]
            sampler = engine.sampler(GREEDY, []) if until == len(ids) else None
            [sampled] = run_step(engine, [Work(sequence, ids[at:until], sampler, part)])
    assert sampled is not None
    return sampled.token


def computed_logits(
    engine: MlxEngine, shown: Seq[Picture], *, exact: bool, chunk: int = 1000
) -> Row:
    """The logits behind the prompt."""
    seen: list[Row] = []
    engine.observe = lambda _sequence, row: seen.append(np.array(row))
    sequence = engine.sequences.open(exact=exact)
    prefill(engine, sequence, shown, chunk)
    engine.sequences.close(sequence)
    engine.observe = None
    [row] = seen
    return row


@pytest.mark.parametrize("shown", [PICTURES[:1], PICTURES[1:3], PICTURES[3:]])
def test_logits_equal_those_of_mlx_vlm(
    engine: MlxEngine, tmp_path: Path, shown: tuple[Picture, ...]
) -> None:
    folder = tmp_path / engine.capabilities.architecture
    expected = reference_logits(folder, prompt(engine, shown).ids(), shown)
    for exact in (False, True):
        found = computed_logits(engine, shown, exact=exact)
        assert np.abs(found - expected[: len(found)]).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("engine", CAUSAL, indirect=True)
def test_greedy_replies_equal_those_of_mlx_vlm(engine: MlxEngine, tmp_path: Path) -> None:
    folder, shown = tmp_path / engine.capabilities.architecture, PICTURES[:2]
    expected = reference_reply(folder, prompt(engine, shown).ids(), shown, 12)
    sequence = engine.sequences.open(exact=False)
    assert decode(engine, sequence, prefill(engine, sequence, shown), 11) == expected


def test_windows_narrower_than_the_prompt_keep_pictures_whole(tmp_path: Path) -> None:
    folder = write_tiny_vision(tmp_path / "narrow", "gemma3", sliding_window=20)
    engine = open_engine(folder)
    expected = reference_logits(folder, prompt(engine, PICTURES[:3]).ids(), PICTURES[:3])
    found = computed_logits(engine, PICTURES[:3], exact=False)
    assert np.abs(found - expected[: len(found)]).max() < 1e-3 * np.abs(expected).max()
    engine.close()


@pytest.mark.parametrize("family", ["llava", "smolvlm", "qwen2_5_vl", "qwen3_vl"])
def test_quantised_weights_have_the_logits_of_mlx_vlm(tmp_path: Path, family: str) -> None:
    folder = write_tiny_vision(tmp_path / family, family)
    quantise(folder)
    engine = open_engine(folder)
    about = engine.capabilities
    assert (about.quantization, about.kv_type, about.architecture) == ("4bit", "bf16", family)
    assert about.parameters > 0
    expected = reference_logits(folder, prompt(engine, PICTURES[:2]).ids(), PICTURES[:2])
    found = computed_logits(engine, PICTURES[:2], exact=False)
    assert np.abs(found - expected[: len(found)]).max() < 0.02 * np.abs(expected).max()
    engine.close()


@pytest.mark.parametrize("engine", CAUSAL, indirect=True)
def test_a_picture_may_be_cut_into_chunks(engine: MlxEngine) -> None:
    whole, cut = (computed_logits(engine, PICTURES[1:3], exact=True, chunk=n) for n in (1000, 3))
    assert np.abs(whole - cut).max() < 1e-3 * np.abs(whole).max()


def test_sequences_with_different_pictures_decode_in_one_batch(engine: MlxEngine) -> None:
    """Positions of M-RoPE differ from row to row."""
    shown: tuple[tuple[Picture, ...], ...] = (PICTURES[:1], (), PICTURES[2:4])
    alone = [replies(engine, [pictures]) for pictures in shown]
    together = replies(engine, shown)
    for found, [expected] in zip(together, alone, strict=True):
        assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


def replies(engine: MlxEngine, shown: Seq[Seq[Picture]]) -> list[Row]:
    """The logits behind each of four fixed tokens, which all sequences append together."""
    sequences = [engine.sequences.open(exact=False) for _ in shown]
    for sequence, pictures in zip(sequences, shown, strict=True):
        prefill(engine, sequence, pictures)
    rows: dict[int, list[Row]] = {sequence.slot: [] for sequence in sequences}
    engine.observe = lambda sequence, row: rows[sequence.slot].append(np.array(row))
    for token in (40, 50, 60, 70):
        run_step(engine, [Work(each, [token], engine.sampler(GREEDY, [])) for each in sequences])
    engine.observe = None
    for sequence in sequences:
        engine.sequences.close(sequence)
    return [np.array(rows[sequence.slot]) for sequence in sequences]


def test_a_family_whose_pictures_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    """The same folder can be served for its text."""
    folder = write_tiny_vision(tmp_path / "tiny", "gemma3")
    config = json.loads((folder / "config.json").read_text())
    for change, why in (
        ({"model_type": "mllama"}, r"vectors of a single picture .* Models that read pictures: "),
        ({"vision_config": {}}, "has no vision part"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ProjectorError, match=why):
            open_engine(folder)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ProjectorError, match="--adapter"):
        MlxEngine(EngineOptions(path=folder, mmproj=folder, adapter=folder))
    text = MlxEngine(EngineOptions(path=folder, context_tokens=600))
    assert text.capabilities.modalities == {"text"}
    text.close()


@pytest.mark.parametrize(
    ("family", "file", "change", "why"),
    [
        ("llava", "preprocessor_config.json", {"crop_size": 48}, "32 x 32 pixels of the vision"),
        ("llava", "preprocessor_config.json", {"image_mean": [0.5]}, "3 channels"),
        ("llava", "preprocessor_config.json", {"resample": 99}, "damaged"),
        ("smolvlm", "preprocessor_config.json", {"max_image_size": 64}, "tiles of 64 pixels"),
        ("smolvlm", "preprocessor_config.json", {"size": 1 << 30}, "from 1 to 4096"),
        ("smolvlm", "preprocessor_config.json", {"size": 128}, "no token <row_1_col_3>"),
        ("qwen2_vl", "preprocessor_config.json", {"patch_size": 16}, "other patches"),
        ("qwen3_vl", "config.json", {"vision_config": {"depth": "x"}}, "mlx_vlm cannot load"),
    ],
)
def test_a_vision_part_that_does_not_fit_is_refused(
    tmp_path: Path, family: str, file: str, change: dict[str, Any], why: str
) -> None:
    folder = write_tiny_vision(tmp_path / family, family)
    about = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(about | change))
    with pytest.raises(ProjectorError, match=why):
        open_engine(folder)


def test_weights_that_mlx_vlm_would_read_unchecked_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_vision(tmp_path / "tiny", "llava")
    other = folder / "other.safetensors"
    other.write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ProjectorError, match=r"other.safetensors next to model\*"):
        open_engine(folder)
    other.unlink()
    header = json.dumps({"x": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    file = folder / "model-2.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    before = file.read_bytes()
    with pytest.raises(ProjectorError, match="scales of 8 bits"):
        open_engine(folder)
    assert file.read_bytes() == before


def test_without_mlx_vlm_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_vision(tmp_path / "tiny", "llava")
    monkeypatch.setitem(sys.modules, "mlx_vlm.utils", None)
    with pytest.raises(ProjectorError, match=r"pip install 'rekindle\[mlx-vlm\]'"):
        open_engine(folder)


def test_loading_a_text_model_does_not_import_mlx_vlm() -> None:
    """Modules import it inside functions that only pictures need."""
    paths = list(Path(rekindle.engine.mlx.__file__).parent.glob("*.py"))
    assert len(paths) > 10
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "mlx_vlm" not in ast.unparse(node)


@pytest.mark.parametrize("engine", ["qwen2_vl", "llava"], indirect=True)
def test_a_strip_is_refused(engine: MlxEngine) -> None:
    with pytest.raises(BadRequest, match="too narrow"):
        engine.picture_tokens(900, 4, b"digest")
