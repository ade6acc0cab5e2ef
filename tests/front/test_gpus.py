"""Finds GPUs in imitations of Linux's files, and says which are not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.front import gpus
from rekindle.protocol.frames import DeviceInfo, Ready

ON_CPU = Ready(8192, 8192, layers=31)
ON_GPU = Ready(8192, 8192, layers=31, gpu_layers=31, gpus=(DeviceInfo("GPU", 1),))
OTHER_ENGINE = Ready(8192, 8192)


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def add_nvidia(root: Path, name: str = "NVIDIA H200", *, device_file: bool = True) -> None:
    folder = root / "proc/driver/nvidia/gpus/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   24\n")
    (root / "dev").mkdir(exist_ok=True)
    if device_file:
        (root / "dev/nvidiactl").touch()


def add_render_device(root: Path, vendor: str, address: str) -> None:
    device = root / "sys/devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    node = root / "sys/class/drm" / f"renderD{128 + len(address)}"
    node.mkdir(parents=True)
    (node / "device").symlink_to(device)


def test_a_gpu_of_nvidia_has_the_name_that_its_driver_gives(tmp_path: Path) -> None:
    add_nvidia(tmp_path)
    assert gpus.machine_gpus(tmp_path) == ["NVIDIA H200"]


def test_a_gpu_without_a_device_file_is_not_for_this_container(tmp_path: Path) -> None:
    add_nvidia(tmp_path, device_file=False)
    assert gpus.machine_gpus(tmp_path) == []


def test_a_driver_without_files_is_asked(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA GeForce RTX 4090\n")
    program.chmod(0o755)
    assert gpus.machine_gpus(tmp_path) == ["NVIDIA GeForce RTX 4090"]
    program.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    assert gpus.machine_gpus(tmp_path) == []


@pytest.mark.parametrize(
    ("vendor", "address", "found"),
    [
        ("0x1002", "0000:03:00.0", ["AMD GPU"]),
        ("0x8086", "0000:03:00.0", ["Intel GPU"]),
        ("0x8086", "0000:00:02.0", []),
        ("0x1a03", "0000:04:00.0", []),
    ],
    ids=["AMD", "Intel", "integrated into the processor", "console of a server"],
)
def test_other_gpus_are_known_by_their_vendor(
    tmp_path: Path, vendor: str, address: str, found: list[str]
) -> None:
    add_render_device(tmp_path, vendor, address)
    assert gpus.machine_gpus(tmp_path) == found


def test_a_gpu_that_the_library_cannot_use_is_named_with_the_remedy(tmp_path: Path) -> None:
    add_nvidia(tmp_path)
    hint = gpus.unused_gpus([ON_CPU], own_library=False, root=tmp_path)
    assert hint
    assert "has NVIDIA H200, but the installed llama.cpp computes on the CPU" in hint
    assert "rekindle build-gpu" in hint
    own = gpus.unused_gpus([ON_CPU], own_library=True, root=tmp_path)
    assert own
    assert "the library of `llama_lib` finds no GPU" in own


def test_nothing_is_said_without_a_gpu_or_when_it_is_used(tmp_path: Path) -> None:
    assert gpus.unused_gpus([ON_CPU], own_library=False, root=tmp_path) is None
    add_nvidia(tmp_path)
    assert gpus.unused_gpus([ON_GPU, OTHER_ENGINE], own_library=False, root=tmp_path) is None
