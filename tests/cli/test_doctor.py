"""`rekindle doctor` names the fault of each broken set-up, and its exit code says what it means."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rekindle.cli import main as cli
from rekindle.cli.build_gpu import BuildFailed
from rekindle.cli.doctor import Diagnosis, Doctor, Surroundings, disk_speed, examine, report, works
from rekindle.config import Config, load_config
from rekindle.http.key_file import append_key_line, key_line
from rekindle.protocol.frames import DeviceInfo, LibraryInfo
from rekindle.protocol.settings import GB, GIB, MB
from tests.support.tiny import write_llama

AVX2 = "CPU : SSE3 = 1 | AVX2 = 1 | FMA = 1 |"
LIBRARY = LibraryInfo("llama.cpp", "xllamacpp==1", "abc", AVX2, ())
GPU = LibraryInfo("llama.cpp", "xllamacpp==1", "abc", AVX2, (DeviceInfo("H1", 80 * GB),))
HEALTHY = Surroundings(
    free_memory=lambda: 8 * GB,
    free_disk=lambda _path: 100 * GB,
    gpus=list,
    library=lambda _path: LIBRARY,
    limits=lambda: (65_536, -1),
)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings except the test's own, and a small sample for the speed of the disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("rekindle.cli.doctor.disk_speed", lambda _folder: (900.0, 900.0))
    for name in ("REKINDLE_API_KEY", "REKINDLE_CACHE_DIR", "MAX_KV_SIZE_GB"):
        monkeypatch.delenv(name, raising=False)


@dataclass
class SetUp:
    """One machine with one configuration, healthy unless a test breaks it."""

    folder: Path
    flags: dict[str, Any] = field(default_factory=dict)
    machine: Surroundings = HEALTHY

    def config(self) -> Config:
        model = self.folder / "tiny.gguf"
        if not model.exists():
            write_llama(model)
        flags = {
            "model": [str(model)],
            "port": 0,
            "cache_dir": self.folder / "kv",
            "models_dir": self.folder / "models",
            **self.flags,
        }
        return load_config(flags, {})

    def findings(self) -> dict[str, Diagnosis]:
        """The findings by name, the worst of each."""
        order = ("ok", "warning", "failed")
        found: dict[str, Diagnosis] = {}
        for each in examine(self.config(), self.machine):
            before = found.get(each.name, each)
            found[each.name] = max(before, each, key=lambda one: order.index(one.status))
        return found


def test_a_healthy_set_up_would_work(tmp_path: Path) -> None:
    found = SetUp(tmp_path).findings()
    assert {each.status for each in found.values()} == {"ok"}
    assert set(found) == {name for name, _ in Doctor(Config(), HEALTHY).checks()}
    assert not any(each.remedy for each in found.values())


def break_keys_file(broken: SetUp) -> None:
    path = broken.folder / "keys.txt"
    path.write_text("alice sk-this-is-no-digest\n")
    broken.flags["api_keys_file"] = path


def empty_keys_file(broken: SetUp) -> None:
    path = broken.folder / "keys.txt"
    path.write_text("# nobody\n")
    path.chmod(0o600)
    broken.flags["api_keys_file"] = path


def open_to_the_network(broken: SetUp) -> None:
    broken.flags["host"] = "0.0.0.0"


def use_the_port(broken: SetUp) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    broken.flags["port"] = listener.getsockname()[1]
    SOCKETS.append(listener)


SOCKETS: list[socket.socket] = []  # open until the test has ended


def damage_the_model(broken: SetUp) -> None:
    path = write_llama(broken.folder / "damaged.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    broken.flags["model"] = [str(path)]


def lose_the_model(broken: SetUp) -> None:
    broken.flags["model"] = [str(broken.folder / "nowhere.gguf")]


def block_the_models_folder(broken: SetUp) -> None:
    (broken.folder / "models").write_text("a file")
    broken.flags["model"] = ["smollm2"]


def break_the_library(broken: SetUp) -> None:
    def refuse(_path: Path | None) -> LibraryInfo:
        raise BuildFailed("the library cannot be used: its layout is not that of the version")

    broken.machine = replace(HEALTHY, library=refuse)


def ask_for_a_gpu(broken: SetUp) -> None:
    broken.flags["gpu_layers"] = 10


def fill_the_memory(broken: SetUp) -> None:
    broken.machine = replace(HEALTHY, free_memory=lambda: 1000)


def limit_the_files(broken: SetUp) -> None:
    broken.machine = replace(HEALTHY, limits=lambda: (64, -1))


def block_the_log(broken: SetUp) -> None:
    (broken.folder / "log").write_text("a file")
    broken.flags["log_file"] = broken.folder / "log" / "rekindle.log"


def lose_the_secret(broken: SetUp) -> None:
    broken.flags["cache_secret_file"] = broken.folder / "no-secret"


@pytest.mark.parametrize(
    ("break_", "name", "said"),
    [
        (break_keys_file, "keys", "line 1 of .* is not a key"),
        (empty_keys_file, "keys", "has no key.* -> rekindle key NAME --file"),
        (lose_the_secret, "keys", "cannot read the cache secret"),
        (open_to_the_network, "settings", "without an API key.*give --api-key"),
        (use_the_port, "port", "another program uses it. Stop that program"),
        (damage_the_model, "models", "damaged.gguf is not a usable GGUF model.*fetch it again"),
        (lose_the_model, "models", "nowhere.gguf"),
        (block_the_models_folder, "models", "is not a folder -> set REKINDLE_MODELS_DIR"),
        (break_the_library, "library", "cannot be used.* -> install rekindle again"),
        (ask_for_a_gpu, "gpu", "finds no GPU -> rekindle build-gpu"),
        (fill_the_memory, "memory", "0.0 GB free.* -> choose a smaller model"),
        (limit_the_files, "open files", "at most 64 open files -> raise `ulimit -n`"),
        (block_the_log, "log", "is not a folder -> choose another --log-file"),
    ],
)
def test_a_set_up_that_cannot_serve_fails_with_the_fault_and_a_remedy(
    break_: Callable[[SetUp], None], name: str, said: str, tmp_path: Path
) -> None:
    broken = SetUp(tmp_path)
    break_(broken)
    found = broken.findings()
    while SOCKETS:
        SOCKETS.pop().close()
    bad = found[name]
    assert bad.status == "failed"
    assert_matches(said, f"{bad.detail} -> {bad.remedy}")
    assert [each.name for each in found.values() if each.status == "failed"] == [name]
    assert not works(list(found.values()))


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text, re.DOTALL), text


def open_the_keys_file(broken: SetUp) -> None:
    path = broken.folder / "keys.txt"
    append_key_line(path, key_line("alice", "sk-alice", admin=False))
    path.chmod(0o644)
    broken.flags["api_keys_file"] = path


def open_the_settings(broken: SetUp) -> None:
    path = broken.folder / "rekindle.yaml"
    path.write_text("api_key: sk-alice\n")
    path.chmod(0o644)


def block_the_cache(broken: SetUp) -> None:
    (broken.folder / "kv").write_text("a file")


def open_the_cache(broken: SetUp) -> None:
    (broken.folder / "kv").mkdir()
    (broken.folder / "kv").chmod(0o755)


def fill_the_disk(broken: SetUp) -> None:
    broken.machine = replace(HEALTHY, free_disk=lambda _path: GIB // 2)


def leave_the_gpu_unused(broken: SetUp) -> None:
    broken.machine = replace(HEALTHY, gpus=lambda: ["H1"])


def forbid_page_locking(broken: SetUp) -> None:
    broken.machine = replace(HEALTHY, library=lambda _path: GPU, limits=lambda: (65_536, 64_000))


def use_an_old_cpu(broken: SetUp) -> None:
    old = LibraryInfo("llama.cpp", "xllamacpp==1", "abc", "CPU : SSE3 = 1 |", ())
    broken.machine = replace(HEALTHY, library=lambda _path: old)


def ask_for_too_much_memory(broken: SetUp) -> None:
    broken.flags["ram_cache"] = "60GB"


def name_a_model_that_is_not_here(broken: SetUp) -> None:
    broken.flags["model"] = ["org/repo:q4_0"]


def lower_the_file_limit(broken: SetUp) -> None:
    broken.machine = replace(HEALTHY, limits=lambda: (1024, -1))


@pytest.mark.parametrize(
    ("break_", "name", "said"),
    [
        (open_the_keys_file, "keys", "other users can read .* -> chmod 600"),
        (open_the_settings, "settings", "other users can read .* -> chmod 600"),
        (block_the_cache, "disk", "is not a folder -> choose another --cache-dir"),
        (open_the_cache, "cache", "other users can enter .* -> chmod 700"),
        (fill_the_disk, "disk", "--disk-floor leaves 1GiB free -> free some space"),
        (leave_the_gpu_unused, "gpu", "H1.* is not used -> rekindle build-gpu"),
        (forbid_page_locking, "page-locking", "raise `ulimit -l`"),
        (use_an_old_cpu, "cpu", "without AVX2 it computes slowly"),
        (ask_for_too_much_memory, "memory", "too much together -> lower --ram-cache"),
        (name_a_model_that_is_not_here, "models", "will be downloaded -> rekindle pull org/repo"),
        (lower_the_file_limit, "open files", "at most 1024 open files, one per client"),
    ],
)
def test_a_set_up_that_serves_badly_gets_a_warning(
    break_: Callable[[SetUp], None],
    name: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    broken = SetUp(tmp_path)
    break_(broken)
    found = broken.findings()
    assert found[name].status == "warning"
    assert_matches(said, f"{found[name].detail} -> {found[name].remedy}")
    assert works(list(found.values()))


def test_a_damaged_cache_folder_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    (folder / "secret").write_bytes(b"s" * 32)
    model = folder / ("0" * 32)
    (model / "blocks").mkdir(parents=True)
    (model / "lock").touch()
    (model / "blocks" / "what-is-this").write_text("x")
    found = SetUp(tmp_path).findings()["cache"]
    assert found.status == "warning"
    assert found.remedy == "rekindle cache check --repair"


def test_doctor_changes_nothing(tmp_path: Path) -> None:
    set_up = SetUp(tmp_path)
    set_up.config()
    before = sorted(tmp_path.rglob("*"))
    set_up.findings()
    assert sorted(tmp_path.rglob("*")) == before


def test_the_speed_of_a_disk_is_measured_and_the_sample_removed(tmp_path: Path) -> None:
    write_mb_s, read_mb_s = disk_speed(tmp_path, 2 * MB)
    assert write_mb_s > 0
    assert read_mb_s > 0
    assert list(tmp_path.iterdir()) == []


def test_each_finding_is_one_line_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    found = [Diagnosis("port", "ok", "free"), Diagnosis("models", "failed", "gone", "pull [it]")]
    report(found, Console(width=200))
    first, second, verdict = capsys.readouterr().out.splitlines()
    assert first == "ok      port    free"
    assert second == "failed  models  gone -> pull [it]"
    assert verdict.startswith("`rekindle serve` would not work here.")


@pytest.mark.parametrize("port_is_free", [True, False])
def test_the_exit_code_says_whether_serving_would_work(
    port_is_free: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.cli.doctor.Surroundings", lambda: HEALTHY)
    model = write_llama(tmp_path / "tiny.gguf")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = 0 if port_is_free else listener.getsockname()[1]
        flags = ["--model", str(model), "--port", str(port), "--cache-dir", str(tmp_path / "kv")]
        result = CliRunner().invoke(cli.app, ["doctor", *flags, "--json"])
    answer = json.loads(result.output)
    assert answer["works"] is port_is_free
    assert result.exit_code == (0 if port_is_free else 1)
    assert {each["name"] for each in answer["checks"]} >= {"port", "models", "cache"}


@pytest.mark.parametrize("text", ["port: [", "prot: 1", "port: many"])
def test_a_broken_settings_file_is_a_finding(text: str, tmp_path: Path) -> None:
    (tmp_path / "rekindle.yaml").write_text(text)
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    [check] = json.loads(result.output)["checks"]
    assert (check["name"], check["status"], result.exit_code) == ("settings", "failed", 1)
    assert "rekindle.yaml" in check["detail"]
