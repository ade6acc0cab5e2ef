"""A conversion is complete or not there, is found again, and follows its folder."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.errors import ModelError
from rekindle.models import conversion
from rekindle.models.conversion import convert
from rekindle.models.gguf import check_gguf
from rekindle.models.local import find_pulled_model, pulled_models, remove
from tests.support.tiny_safetensors import write_tiny_folder

from .tiny import RecordedProgress


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "tiny-model")


def converted(folder: Path, models_dir: Path, **options: object) -> Path:
    return convert(folder, models_dir=models_dir, progress=RecordedProgress(), **options)  # type: ignore[arg-type]


def files(models_dir: Path) -> list[Path]:
    return [path for path in models_dir.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_conversion_is_found_again_without_writing(folder: Path, models_dir: Path) -> None:
    path = converted(folder, models_dir)
    assert path.parent == models_dir / "converted"
    assert path.name.startswith("tiny-model-F32-")
    written = path.stat()
    progress = RecordedProgress()
    assert convert(folder, models_dir=models_dir, progress=progress) == path
    assert path.stat().st_mtime_ns == written.st_mtime_ns
    assert progress.tasks == []
    assert files(models_dir) == [path]


def test_equal_folders_give_equal_bytes(folder: Path, models_dir: Path, tmp_path: Path) -> None:
    other = write_tiny_folder(tmp_path / "elsewhere" / "tiny-model")
    first, second = converted(folder, models_dir), converted(other, models_dir)
    assert first != second
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_a_changed_folder_is_converted_again_and_the_old_file_goes(
    name: str, folder: Path, models_dir: Path
) -> None:
    first = converted(folder, models_dir)
    other = converted(folder, models_dir, quant="f16")
    os.utime(folder / name, ns=(1, 1))
    second = converted(folder, models_dir)
    assert second != first
    assert set(files(models_dir)) == {second, other}


def test_a_newer_converter_converts_again(
    folder: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = converted(folder, models_dir)
    monkeypatch.setattr(conversion, "VERSION", conversion.VERSION + 1)
    assert converted(folder, models_dir) != first
    assert not first.exists()


def test_a_damaged_conversion_is_refused(folder: Path, models_dir: Path) -> None:
    path = converted(folder, models_dir)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(ModelError, match="truncated"):
        converted(folder, models_dir)


def test_progress_reaches_exactly_the_announced_size(folder: Path, models_dir: Path) -> None:
    progress = RecordedProgress()
    path = convert(folder, models_dir=models_dir, progress=progress, quant="q8_0")
    [(title, total)] = progress.tasks
    assert title == "Converting tiny-model to GGUF (Q8_0)"
    assert total == path.stat().st_size
    assert 0.99 * total <= progress.advanced[0] <= total
    assert progress.open == 0


def test_a_file_of_the_users_choice_is_written_and_never_replaced(
    folder: Path, models_dir: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "mine.gguf"
    assert converted(folder, models_dir, output=output) == output
    assert list(output.parent.iterdir()) == [output]
    assert output.read_bytes() == converted(folder, models_dir).read_bytes()
    with pytest.raises(ModelError, match=r"mine.gguf exists. Delete it"):
        converted(folder, models_dir, output=output)


def test_too_little_space_is_noticed_before_anything_is_written(
    folder: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ModelError, match=r"needs .* and the disk .* has 1.0 kB free"):
        converted(folder, models_dir)
    assert files(models_dir) == []


def test_a_disk_that_becomes_full_leaves_nothing(folder: Path, models_dir: Path) -> None:
    """The limit on the size of files stands for a disk that others have filled meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        with pytest.raises(ModelError, match=r"Cannot convert .*File too large.*Nothing was kept"):
            converted(folder, models_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(models_dir) == []
    check_gguf(converted(folder, models_dir))


SLOW = """
import signal, sys, time
from pathlib import Path
from rekindle.models import weights
from rekindle.models.conversion import convert
from tests.models.tiny import RecordedProgress

class Slow(RecordedProgress):
    def advance(self, size_bytes):
        print(size_bytes, flush=True)
        time.sleep(0.05)

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in background
weights.CHUNK_BYTES = 4096
convert(Path(sys.argv[1]), models_dir=Path(sys.argv[2]), progress=Slow())
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_conversion_is_never_found(
    sent: signal.Signals, folder: Path, models_dir: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(folder), str(models_dir)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    for _ in range(5):
        process.stdout.readline()
    process.send_signal(sent)
    process.wait()
    process.stdout.close()
    assert process.returncode != 0
    assert pulled_models(models_dir) == []
    path = converted(folder, models_dir)
    check_gguf(path)
    assert files(models_dir) == [path]  # no part of the first one is left


def test_two_processes_convert_a_folder_once(folder: Path, models_dir: Path) -> None:
    command = [sys.executable, "-c", SLOW, str(folder), str(models_dir)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(map(len, outputs))[0] == 0  # one of them only waited
    [path] = files(models_dir)
    check_gguf(path)


def test_a_missing_shard_is_refused(tmp_path: Path, models_dir: Path) -> None:
    folder = write_tiny_folder(tmp_path / "sharded", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00003.safetensors"):
        converted(folder, models_dir)
    assert files(models_dir) == []


def test_a_shortened_weight_file_is_refused(folder: Path, models_dir: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(ModelError, match="truncated or damaged"):
        converted(folder, models_dir)
    assert files(models_dir) == []


@pytest.mark.parametrize("config", [{"hidden_size": 128}, {"vocab_size": 300}])
def test_weights_of_other_shapes_than_the_configuration_says_are_refused(
    config: dict[str, int], folder: Path, models_dir: Path
) -> None:
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(given | config))
    with pytest.raises(ModelError, match=r"in the shape .*config.json\s+says"):
        converted(folder, models_dir)
    assert files(models_dir) == []


def test_a_conversion_is_listed_and_can_be_removed(folder: Path, models_dir: Path) -> None:
    path = converted(folder, models_dir)
    [model] = pulled_models(models_dir)
    assert model.path == path
    assert find_pulled_model(model.name, models_dir) == model
    assert remove(model, models_dir) > 0
    assert not path.exists()
    assert folder.is_dir()


def test_a_conversion_keeps_one_chunk_in_memory(tmp_path: Path, models_dir: Path) -> None:
    """Of 200 MB of weights, the process needs less than half."""
    import mlx.core as mx

    from tests.support.tiny_safetensors import write_weights

    folder = write_tiny_folder(tmp_path / "wide")
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 131_072}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    for layer in range(2):
        for name, shape in (
            ("gate", (131_072, 64)),
            ("up", (131_072, 64)),
            ("down", (64, 131_072)),
        ):
            loaded[f"model.layers.{layer}.mlp.{name}_proj.weight"] = mx.zeros(shape)
    write_weights(folder, loaded)
    assert sum(path.stat().st_size for path in folder.iterdir()) > 200e6
    code = (
        "import sys, resource, gguf, numpy\n"
        "from pathlib import Path\n"
        "from rekindle.models import weights\n"
        "from rekindle.models.conversion import convert\n"
        "from tests.models.tiny import RecordedProgress\n"
        "weights.CHUNK_BYTES = 1 << 20\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "convert(Path(sys.argv[1]), models_dir=Path(sys.argv[2]), progress=RecordedProgress())\n"
        "print(peak() - before)"
    )
    command = [sys.executable, "-c", code, str(folder), str(models_dir)]
    grown_kb = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown_kb < 100_000


def test_the_slow_conversion_of_these_tests_is_slow_enough(folder: Path, models_dir: Path) -> None:
    """Otherwise the interrupted ones would have been complete."""
    command = [sys.executable, "-c", SLOW, str(folder), str(models_dir)]
    lines = subprocess.run(command, check=True, capture_output=True).stdout.splitlines()
    assert len(lines) > 20
