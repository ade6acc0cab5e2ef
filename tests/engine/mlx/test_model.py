"""A folder is loaded, or refused with a remedy. Its code is never run."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from rekindle.engine.base import EngineOptions
from rekindle.engine.mlx import _limits_kept
from rekindle.engine.mlx.model import UNLIMITED_TOKENS, LoadedModel, load_model, state_fingerprint
from rekindle.engine.mlx.tokenizer import load_tokenizer
from rekindle.errors import BadRequest, ModelError
from tests.support.rounds import rounds
from tests.support.tiny import VOCABULARY
from tests.support.tiny_mlx import CONTEXT, FAMILIES, write_tiny_adapter, write_tiny_mlx

VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 1 << 31, 1 << 40, 1e308, float("nan"), "", "x", "../x", "auto",
    [], [1], [[]], {}, {"a": 1},
)  # fmt: skip


def load(path: Path, adapter: Path | None = None) -> LoadedModel:
    return load_model(EngineOptions(path=path, adapter=adapter), lambda _done: None)


def configure(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_mlx(tmp_path / "tiny")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_loaded_whole(tmp_path: Path, family: str) -> None:
    done: list[float] = []
    loaded = load_model(EngineOptions(path=write_tiny_mlx(tmp_path, family)), done.append)
    assert (loaded.vocabulary_size, loaded.context_tokens) == (VOCABULARY, CONTEXT)
    assert done == sorted(done)
    assert done[-1] == 1.0


def test_quantised_weights_are_loaded_as_they_are(folder: Path) -> None:
    from mlx_lm.utils import load_model as load_whole
    from mlx_lm.utils import quantize_model, save_config, save_model

    plain = load(folder)
    assert (plain.architecture, plain.quantization) == ("llama", "float32")
    weights: dict[str, mx.array] = dict(tree_flatten(plain.model.parameters()))
    assert plain.parameters == sum(array.size for array in weights.values())
    model, config = load_whole(folder)
    model, config = quantize_model(model, config, group_size=32, bits=4)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    loaded = load(folder)
    assert loaded.model.layers[0].mlp.gate_proj.bits == 4
    assert loaded.vocabulary_size == VOCABULARY
    assert (loaded.quantization, loaded.parameters) == ("4bit", plain.parameters)


def test_a_model_without_a_longest_context_gets_one(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).context_tokens == UNLIMITED_TOKENS


def test_importing_mlx_lm_does_not_lower_the_limit_on_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with _limits_kept():
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


# -- the fingerprint -----------------------------------------------------------------------------


def test_the_fingerprint_does_not_depend_on_the_path(folder: Path, tmp_path: Path) -> None:
    assert load(folder).fingerprint == load(write_tiny_mlx(tmp_path / "other")).fingerprint


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_everything_that_changes_state_changes_the_fingerprint(folder: Path, name: str) -> None:
    before = load(folder).fingerprint
    if name == "model.safetensors":
        write_tiny_mlx(folder, seed=1)
    else:
        (folder / name).write_text((folder / name).read_text() + "\n")
    assert load(folder).fingerprint != before


def test_the_fingerprint_includes_the_quantisation_of_weights(folder: Path) -> None:
    """mlx_lm reads it from another file if the configuration has none."""
    found = set()
    for content in (None, "{}", '{"producer": {}}'):
        if content is not None:
            (folder / "hf_quant_config.json").write_text(content)
        found.add(state_fingerprint(folder, None))
    assert len(found) == 3


def test_a_template_changes_no_state(folder: Path) -> None:
    before = load(folder).fingerprint
    (folder / "chat_template.jinja").write_text("another")
    assert load(folder).fingerprint == before


# -- adapters ------------------------------------------------------------------------------------


def test_an_adapter_changes_what_is_computed_and_the_fingerprint(
    folder: Path, tmp_path: Path
) -> None:
    plain = load(folder)
    adapted = load(folder, write_tiny_adapter(tmp_path / "adapter", folder))
    other = load(folder, write_tiny_adapter(tmp_path / "other", folder, seed=1))
    prompt = mx.array([[70, 71, 72]])
    rows = [each.model(prompt) for each in (plain, adapted, other)]
    assert not mx.allclose(rows[0], rows[1])
    assert not mx.allclose(rows[1], rows[2])
    assert len({each.fingerprint for each in (plain, adapted, other)}) == 3


@pytest.mark.parametrize("lost", ["adapter_config.json", "adapters.safetensors"])
def test_the_missing_file_of_an_adapter_is_named(folder: Path, tmp_path: Path, lost: str) -> None:
    adapter = write_tiny_adapter(tmp_path / "adapter", folder)
    (adapter / lost).unlink()
    with pytest.raises(ModelError, match=f"is not an adapter: it needs .*{lost}"):
        load(folder, adapter)


def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = write_tiny_mlx(tmp_path / "wide", "llama-wide")
    adapter = write_tiny_adapter(tmp_path / "adapter", other)
    with pytest.raises(ModelError, match=r"with the adapter .*incompatible tensors"):
        load(folder, adapter)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["model_file", "trust_remote_code"])
def test_code_in_a_folder_is_never_run(folder: Path, setting: str) -> None:
    (folder / "evil.py").write_text("raise SystemExit('run')")
    configure(folder, **{setting: "evil.py"})
    with pytest.raises(ModelError, match="never run"):
        load(folder)


@pytest.mark.parametrize("kind", ["", "../os", "os.path", 3, None])
def test_an_invalid_model_type_is_refused(folder: Path, kind: object) -> None:
    configure(folder, model_type=kind)
    with pytest.raises(ModelError, match="names no `model_type`"):
        load(folder)


@pytest.mark.parametrize("kind", ["quartz", "cache", "base"])
def test_an_unknown_architecture_is_refused(folder: Path, kind: str) -> None:
    configure(folder, model_type=kind)
    with pytest.raises(ModelError, match="newer than the installed mlx-lm"):
        load(folder)


@pytest.mark.parametrize(
    "lie",
    [
        {"hidden_size": 128},
        {"vocab_size": 1 << 40},
        {"num_hidden_layers": 3},
        {"num_attention_heads": 0},
        {"num_attention_heads": "many"},
        {"rope_scaling": {"rope_type": "quartz"}},
        {"quantization": {"bits": 3}},
    ],
)
def test_settings_that_do_not_fit_the_weights_are_refused(
    folder: Path, lie: dict[str, Any]
) -> None:
    configure(folder, **lie)
    with pytest.raises(ModelError, match="mlx_lm cannot load tiny"):
        load(folder)


def test_more_layers_than_tensors_are_refused(folder: Path) -> None:
    configure(folder, num_hidden_layers=1 << 30)
    with pytest.raises(ModelError, match="more layers than there are tensors"):
        load(folder)


def test_a_damaged_weight_file_is_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match="truncated"):
        load(folder)


def test_a_folder_without_a_tokenizer_says_how_to_make_one(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="save_pretrained"):
        load(folder)


@pytest.mark.long
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_changed_folder_is_loaded_or_refused(folder: Path, name: str) -> None:
    path = folder / name
    whole = json.loads(path.read_text())
    for seed in range(rounds(30, 1_500)):
        path.write_text(json.dumps(mutated(whole, random.Random(seed))))
        with suppress(ModelError, BadRequest):
            loaded = load(folder)
            tokenizer = load_tokenizer(folder, loaded.vocabulary_size)
            tokens = tokenizer.encode("then <|end|> é", special=False)
            assert max(tokens, default=0) < tokenizer.size == loaded.vocabulary_size


def mutated(whole: Any, rng: random.Random) -> Any:
    """Replace or remove one or two values anywhere."""
    copy = json.loads(json.dumps(whole))
    for _ in range(rng.randint(1, 2)):
        holder, key = rng.choice(list(places(copy)))
        if rng.random() < 0.2 and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = rng.choice(VALUES)
    return copy


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place of a value, the first few of each list or object."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items)[:20]:
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def test_a_folder_name_with_wildcards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="rename it"):
        load(write_tiny_mlx(tmp_path / "tiny[4bit]"))
