"""What the source tree as a whole promises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rekindle

SOURCE = Path(rekindle.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PARTS = ("chat", "kvcache", "engine")  # they meet in runtime, and nowhere else

#: Ways to turn bytes or text from outside into running code.
BANNED = re.compile(
    r"\b(pickle|cloudpickle|dill|marshal|shelve)\b"
    r"|\btorch\.load\b|\ballow_pickle\b|\byaml\.(unsafe_|full_)?load(_all)?\("
    r"|(?<![\w.])(eval|exec)\("
)


def imported(path: Path) -> Iterator[str]:
    """Every module a file imports, by its full name."""
    package = ("rekindle", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, node.module) if node.module else above)
            yield module
            yield from (f"{module}.{name.name}" for name in node.names)


def test_there_is_something_to_look_at() -> None:
    assert {part for part in PARTS if (SOURCE / part).is_dir()} == set(PARTS)
    assert "rekindle.kvcache.key" in imported(SOURCE / "kvcache" / "store.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_bytes_from_outside_can_become_code(path: Path) -> None:
    assert not BANNED.search(path.read_text())


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "yaml.unsafe_load(text)",
        "x = eval(text)",
        "exec(text)",
    ],
)
def test_each_banned_way_would_be_seen(line: str) -> None:
    assert BANNED.search(line)


@pytest.mark.parametrize(
    "line", ["yaml.safe_load(text)", "model.eval()", "create_subprocess_exec("]
)
def test_what_only_looks_alike_is_let_through(line: str) -> None:
    assert not BANNED.search(line)


def test_only_engine_knows_which_engines_there_are() -> None:
    """Everybody else sees the protocol, and the runtime the registry."""
    inside = re.compile(r"rekindle\.engine\.(?!base|registry|sampling)\w")
    met = {
        f"{path.relative_to(SOURCE)}: {module}"
        for path in FILES
        for module in imported(path)
        if SOURCE / "engine" not in path.parents and inside.match(module)
    }
    assert met == set()


@pytest.mark.parametrize("part", PARTS)
def test_chat_kvcache_and_engine_never_import_each_other(part: str) -> None:
    others = tuple(f"rekindle.{other}" for other in PARTS if other != part)
    met = {
        f"{path.name}: {module}"
        for path in (SOURCE / part).rglob("*.py")
        for module in imported(path)
        if module.startswith(others)
    }
    assert met == set()
