"""Checks the dependencies as far as possible without a network. `make check` runs this, too."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
RUN_LOCK = ROOT / "requirements.lock"  # what a server needs
DEV_LOCK = ROOT / "requirements-dev.lock"  # also tests, checks and all extras
LOCKS = (RUN_LOCK, DEV_LOCK)
MAX_RUN_PACKAGES = 60
#: NVIDIA's libraries take gigabytes, and MLX is installed either for the CPU or for CUDA.
UNLOCKED = {"mlx-cuda"}
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
PIN = re.compile(r"[a-z0-9][a-z0-9.-]*==[0-9][\w.+!-]*")

#: Licences that allow anybody to use, change and redistribute. MPL-2.0 covers only changes to its
#: own files, and we make none.
ALLOWED_LICENCES = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "CNRI-Python", "ISC", "MIT",
    "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib",
}  # fmt: skip
#: The same for packages with a classifier instead of an SPDX expression.
ALLOWED_CLASSIFIERS = {
    "Apache Software License", "BSD License", "ISC License (ISCL)", "MIT License",
    "Mozilla Public License 2.0 (MPL 2.0)", "Python Software Foundation License",
}  # fmt: skip
#: Classifiers of single packages, which a person has checked. Of docutils only a file for Emacs has
#: the GPL, and it is not installed. Everything else in it is public domain or BSD.
CHECKED_CLASSIFIERS = {
    "docutils": {"BSD License", "GNU General Public License (GPL)", "Public Domain"},
}
#: The first line of the licence of packages with neither, which a person has checked.
ALLOWED_WORDS = {
    "protobuf": "3-Clause BSD License",
    "tiktoken": "MIT License",
    "transformers": "Apache 2.0 License",
}


@dataclass(frozen=True)
class Locked:
    """One entry of the lock file."""

    requirement: Requirement
    options: tuple[str, ...]

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def is_for_here(self) -> bool:
        return self.requirement.marker is None or self.requirement.marker.evaluate()


def entries(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each requirement with its options, without comments."""
    lines = (line.partition(" #")[0] for line in text.splitlines() if line.strip()[:1] != "#")
    for entry in re.split(r"(?<!\\)\n", "\n".join(lines)):
        first, *options = (part.strip() for part in entry.split("\\\n"))
        if first:
            yield first, tuple(options)


def locked(lock: Path) -> list[Locked]:
    return [Locked(Requirement(first), options) for first, options in entries(lock.read_text())]


def declared(lock: Path) -> list[Requirement]:
    """The requirements in pyproject.toml that a lock file pins."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, groups = about["project"], about["dependency-groups"]
    every = [*project["dependencies"], *groups["build"]]
    if lock == DEV_LOCK:
        extras = project["optional-dependencies"].items()
        every += [each for name, extra in extras if name not in UNLOCKED for each in extra]
        every += [each for each in groups["dev"] if isinstance(each, str)]
    return [Requirement(each) for each in every]


def problem(first: str, options: tuple[str, ...]) -> str | None:
    """What is wrong with an entry of the lock file, if anything."""
    if not PIN.fullmatch(first.partition(";")[0].strip()):
        return f"{first} is not one version of one package"
    if not options or not all(HASH.fullmatch(option) for option in options):
        return f"{first} has something else than SHA-256 hashes"
    return None


def licence_problem(found: Distribution) -> str | None:
    """Why a package's licence is not allowed, if so."""
    name, about = canonicalize_name(found.metadata["Name"]), found.metadata.json
    classifiers = {
        line.rpartition(" :: ")[2]
        for line in about.get("classifier", [])
        if line.startswith("License :: ")
    }
    if "license_expression" not in about and classifiers:
        allowed = ALLOWED_CLASSIFIERS | CHECKED_CLASSIFIERS.get(name, set())
        return None if classifiers <= allowed else f"{name}: {sorted(classifiers)}"
    words = str(about.get("license_expression") or about.get("license") or "no licence")
    named = {word for word in re.split(r"[\s()]+", words) if word not in ("", "AND", "OR")}
    first_line = words.splitlines()[0]
    is_allowed = named <= ALLOWED_LICENCES or ALLOWED_WORDS.get(name) == first_line
    return None if is_allowed else f"{name}: {first_line}"


def installed() -> Iterator[tuple[Locked, Distribution]]:
    for each in locked(DEV_LOCK):
        if each.is_for_here:
            yield each, distribution(each.name)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_locked_package_has_one_version_with_hashes(lock: Path) -> None:
    found = list(entries(lock.read_text()))
    assert len(found) > 50
    assert [why for first, options in found if (why := problem(first, options))] == []


@pytest.mark.parametrize(
    ("first", "options"),
    [
        ("blake3>=1.0", ("--hash=sha256:" + "0" * 64,)),
        ("blake3", ("--hash=sha256:" + "0" * 64,)),
        ("blake3 @ https://somewhere/blake3.whl", ("--hash=sha256:" + "0" * 64,)),
        ("blake3==1.*", ("--hash=sha256:" + "0" * 64,)),
        ("-e .", ()),
        ("--find-links somewhere", ()),
        ("blake3==1.0.11", ()),
        ("blake3==1.0.11", ("--hash=md5:" + "0" * 32,)),
        ("blake3==1.0.11", ("--hash=sha256:" + "0" * 64, "--trusted-host somewhere")),
    ],
)
def test_each_loose_entry_is_detected(first: str, options: tuple[str, ...]) -> None:
    assert problem(first, options)
    [entry] = entries(" \\\n    ".join([first, *options]) + "\n    # via something\n")
    assert entry == (first, options)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_each_declared_package_is_locked_in_an_allowed_version(lock: Path) -> None:
    pins = locked(lock)
    for wanted in declared(lock):
        found = [each for each in pins if each.name == canonicalize_name(wanted.name)]
        assert found, f"{wanted.name} is not locked: run `make lock`"
        for pin in found:
            [version] = pin.requirement.specifier
            assert wanted.specifier.contains(version.version), f"{wanted} is locked as {pin}"


def test_both_locks_pin_the_same_versions() -> None:
    """So what the tests ran with is what a server gets."""
    dev = {str(each.requirement): each.options for each in locked(DEV_LOCK)}
    run = {str(each.requirement): each.options for each in locked(RUN_LOCK)}
    assert run.items() <= dev.items(), "run `make lock`"


def test_a_server_installs_nothing_that_only_tests_or_extras_need() -> None:
    """`av` alone is a quarter of the size of everything else together."""
    names = {each.name for each in locked(RUN_LOCK)}
    assert not names & {"av", "mlx", "transformers", "matplotlib", "pytest", "openai", "uv"}
    assert len(names) <= MAX_RUN_PACKAGES


def test_the_installed_packages_are_the_locked_ones() -> None:
    differing = []
    for pin in locked(DEV_LOCK):
        if pin.is_for_here:
            try:
                version = distribution(pin.name).version
            except PackageNotFoundError:
                version = "missing"
            if not pin.requirement.specifier.contains(version if version != "missing" else "0"):
                differing.append(f"{pin.requirement}: {version}")
    assert differing == [], "run `make dev`"


def test_every_licence_is_allowed() -> None:
    assert [why for _, found in installed() if (why := licence_problem(found))] == []


def test_a_package_with_an_unknown_licence_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "strange-1.dist-info"
    folder.mkdir()
    for line in (
        "License-Expression: AGPL-3.0-only",
        "License-Expression: MIT AND SSPL-1.0",
        "Classifier: License :: Other/Proprietary License",
        "License: all rights reserved",
        "Summary: nothing is said",
    ):
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: strange\n{line}\n")
        assert licence_problem(Distribution.at(folder))
