"""`rekindle ls`, `ps`, `rm` and `show` speak about the models of this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx
import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from rekindle.cli import main as cli
from rekindle.cli.models import change_model, model_table, running_models, running_table
from rekindle.errors import RekindleError
from rekindle.models.families import FAMILIES
from rekindle.models.local import pulled_models
from tests.models.tiny import write_gguf

RUNNING = {
    "name": "smollm2:latest",
    "size": 98_362_432,
    "context_length": 8192,
    "details": {"parameter_size": "134.5M", "quantization_level": "Q4_1"},
}


@pytest.fixture(autouse=True)
def models_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("REKINDLE_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path / "models"


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, list(arguments), env={"TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.stdout


def text(view: RenderableType) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def put(models_dir: Path) -> Path:
    folder = models_dir / "hub" / "unsloth" / "Qwen3-4B-GGUF"
    write_gguf(folder / "mmproj-F16.gguf")
    return write_gguf(folder / "Qwen3-4B-Q4_K_M.gguf")


def test_ls_names_the_pulled_models_and_what_to_do_without_any(models_dir: Path) -> None:
    assert "rekindle pull" in shown("ls")
    put(models_dir)
    header, line = shown("ls").splitlines()
    assert header.split() == ["name", "size", "pulled"]
    assert line.startswith("qwen3:4b ")


def test_a_pipe_gets_whole_lines(models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    path = put(models_dir)
    assert str(path) in shown("show", "qwen3:4b")


def test_the_catalogue_lists_every_family_with_its_sizes() -> None:
    listed = shown("ls", "--catalogue")
    for name, family in FAMILIES.items():
        [line] = [line for line in listed.splitlines() if line.startswith(f"{name} ")]
        assert ", ".join(family.members) in line


def test_rm_removes_all_or_nothing(models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(models_dir)
    monkeypatch.setattr(sys, "argv", ["rekindle", "rm", "qwen3:4b", "minilm"])
    with pytest.raises(SystemExit):
        cli.main()
    assert path.is_file()
    assert shown("rm", "qwen3:4b", "qwen3:4b").startswith("qwen3:4b is deleted, ")
    assert not path.exists()


def test_show_tells_what_the_files_say(models_dir: Path) -> None:
    path = put(models_dir)
    lines = dict(line.split(maxsplit=1) for line in shown("show", "qwen3:4b").splitlines())
    assert lines["architecture"].strip() == "llama"
    assert lines["quantisation"].strip() == "Q4_K_M"
    assert lines["parameters"].strip() == f"{32 * 4 + 32 * 64:,}"
    assert lines["projector"].strip() == "mmproj-F16.gguf"
    assert lines["path"].strip() == str(path)


def test_show_reads_the_settings_of_a_folder(models_dir: Path) -> None:
    folder = models_dir / "hub" / "mlx-community" / "Qwen3-4B-4bit"
    folder.mkdir(parents=True)
    settings = {"model_type": "qwen3", "quantization": {"bits": 4}, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(b"weights")
    [model] = pulled_models(models_dir)
    view = text(model_table(model))
    for part in ("qwen3:4b-mlx", "MLX", "4 bits", "4,096 tokens", str(folder)):
        assert part in view


def test_ps_lists_what_a_server_has_loaded() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"models": [RUNNING]})

    found = running_models("http://here:1/v1/", "key", httpx.MockTransport(answer))
    assert str(asked[0].url) == "http://here:1/api/ps"
    assert asked[0].headers["authorization"] == "Bearer key"
    line = text(running_table(found)).splitlines()[1]
    assert line.split() == ["smollm2", "134.5M", "Q4_1", "98.4", "MB", "8,192", "tokens"]


def test_ps_says_that_no_server_runs() -> None:
    def refuse(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("[Errno 111] Connection refused")

    with pytest.raises(RekindleError, match=r"no server answers at .* \(Connection refused\)"):
        running_models("http://here:1/v1", None, httpx.MockTransport(refuse))


def test_load_and_unload_ask_the_server_and_say_what_became_of_the_model() -> None:
    asked: list[tuple[str, object, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(
            (request.url.path, json.loads(request.content), request.headers["authorization"])
        )
        status = "loaded" if request.url.path.endswith("/load") else "unloaded"
        memory = 98_000_000 if status == "loaded" else 0
        return httpx.Response(200, json={"name": "a", "status": status, "memory_bytes": memory})

    transport = httpx.MockTransport(answer)
    said = [
        change_model("load", "a", "http://here:1/v1/", "key", transport),
        change_model("unload", "a", "http://here:1/v1", "key", transport),
    ]
    assert said == ["a is loaded, 98.0 MB of memory.", "a is unloaded."]
    assert asked == [
        ("/v1/internal/model/load", {"model": "a"}, "Bearer key"),
        ("/v1/internal/model/unload", {"model": "a"}, "Bearer key"),
    ]


def test_a_model_that_cannot_be_loaded_is_an_error_with_the_servers_reason() -> None:
    def refuse(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(503, json={"error": {"message": "the file is damaged"}})

    with pytest.raises(RekindleError, match="the file is damaged"):
        change_model("load", "a", "http://here:1/v1", None, httpx.MockTransport(refuse))
