"""What we depend on, as far as it can be told without a network; `make check` runs this, too."""

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
LOCK = ROOT / "requirements.lock"
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
PIN = re.compile(r"[a-z0-9][a-z0-9.-]*==[0-9][\w.+!-]*")

#: Licences that let anybody use, change and pass on what is built with them. MPL-2.0 asks for
#: changes to its own files alone, and none are made.
ALLOWED_LICENCES = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "CNRI-Python", "ISC", "MIT",
    "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib",
}  # fmt: skip
#: The same where a package has no SPDX expression, but only a classifier.
ALLOWED_CLASSIFIERS = {
    "Apache Software License", "BSD License", "ISC License (ISCL)", "MIT License",
    "Mozilla Public License 2.0 (MPL 2.0)", "Python Software Foundation License",
}  # fmt: skip
#: And where it has neither: the first line of its own words, looked at by a person.
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
    """Each requirement as it is written, with its options; comments left out."""
    lines = (line.partition(" #")[0] for line in text.splitlines() if line.strip()[:1] != "#")
    for entry in re.split(r"(?<!\\)\n", "\n".join(lines)):
        first, *options = (part.strip() for part in entry.split("\\\n"))
        if first:
            yield first, tuple(options)


def locked() -> list[Locked]:
    return [Locked(Requirement(first), options) for first, options in entries(LOCK.read_text())]


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    every = [*project["dependencies"], *(each for extra in extras for each in extra)]
    wanted = [Requirement(each) for each in every]
    return [each for each in wanted if each.name != project["name"]]  # an extra within an extra


def problem(first: str, options: tuple[str, ...]) -> str | None:
    """What is wrong with an entry of the lock, if anything is."""
    if not PIN.fullmatch(first.partition(";")[0].strip()):
        return f"{first} is not one version of one package"
    if not options or not all(HASH.fullmatch(option) for option in options):
        return f"{first} has something else than SHA-256 hashes"
    return None


def licence_problem(found: Distribution) -> str | None:
    """Why a package's licence is not one of those allowed, if it is not."""
    name, about = canonicalize_name(found.metadata["Name"]), found.metadata.json
    classifiers = {
        line.rpartition(" :: ")[2]
        for line in about.get("classifier", [])
        if line.startswith("License :: ")
    }
    if "license_expression" not in about and classifiers:
        return None if classifiers <= ALLOWED_CLASSIFIERS else f"{name}: {sorted(classifiers)}"
    words = str(about.get("license_expression") or about.get("license") or "no licence")
    named = {word for word in re.split(r"[\s()]+", words) if word not in ("", "AND", "OR")}
    first_line = words.splitlines()[0]
    is_allowed = named <= ALLOWED_LICENCES or ALLOWED_WORDS.get(name) == first_line
    return None if is_allowed else f"{name}: {first_line}"


def installed() -> Iterator[tuple[Locked, Distribution]]:
    for each in locked():
        if each.is_for_here:
            yield each, distribution(each.name)


def test_every_locked_package_is_one_version_with_its_hashes() -> None:
    found = list(entries(LOCK.read_text()))
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
def test_each_loose_entry_would_be_seen(first: str, options: tuple[str, ...]) -> None:
    assert problem(first, options)
    [entry] = entries(" \\\n    ".join([first, *options]) + "\n    # via something\n")
    assert entry == (first, options)


def test_what_is_declared_is_locked_in_a_version_that_was_asked_for() -> None:
    pins = locked()
    for wanted in declared():
        found = [each for each in pins if each.name == canonicalize_name(wanted.name)]
        assert found, f"{wanted.name} is not locked: run `make lock`"
        for pin in found:
            [version] = pin.requirement.specifier
            assert wanted.specifier.contains(version.version), f"{wanted} is locked as {pin}"


def test_what_is_installed_is_what_is_locked() -> None:
    differing = []
    for pin in locked():
        if pin.is_for_here:
            try:
                version = distribution(pin.name).version
            except PackageNotFoundError:
                version = "missing"
            if not pin.requirement.specifier.contains(version if version != "missing" else "0"):
                differing.append(f"{pin.requirement}: {version}")
    assert differing == [], "run `make install`"


def test_every_licence_is_one_that_is_allowed() -> None:
    assert [why for _, found in installed() if (why := licence_problem(found))] == []


def test_a_package_stays_out_until_somebody_has_looked_at_its_licence(tmp_path: Path) -> None:
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
