"""The seams of the source tree, guarded: who imports whom, and where tests live."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import rekindle

SOURCE = Path(rekindle.__file__).parent
TESTS = Path(__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PARTS = ("chat", "kvcache", "engine")  # they meet in runtime, and nowhere else
FRONT = ("http", "worker", "api", "front", "cli", "media")  # the HTTP process and the command line
BEHIND_PROTOCOL = (*PARTS, "runtime")  # the process of one model

#: Imports from the front that cross the seam, each with its reason.
ALLOWED = {
    # `rekindle cache check` verifies a cache folder on disk, without any server.
    ("cli/cache.py", "rekindle.kvcache.disk.check"),
    ("cli/cache.py", "rekindle.kvcache.disk.secret"),
}

#: Files that see tiers through their interface alone.
TIER_CLIENTS = [
    *(SOURCE / "kvcache" / f"{name}.py" for name in ("store", "placement", "fetches", "tiered")),
    *(SOURCE / "runtime").rglob("*.py"),
]

#: Files of those that may name a tier, each with its reason.
MAY_NAME_TIERS = {
    "runtime/storage/storage.py",  # it says what RAM and the disk hold
    "runtime/storage/opening.py",  # it composes the tiers
}

#: Folders of tests that are about the whole program or what is beside it, or help the others.
NOT_MIRRORED = {"support", "contract", "e2e", "stress", "security", "bench", "tools"}

#: Suites about several modules of their folder together.
CROSS_CUTTING = {
    "api/anthropic/test_client.py",
    "api/openai/test_client.py",
    "api/openai/test_tool_client.py",
    "api/responses/test_client.py",
    "chat/tools/test_fuzz.py",
    "chat/tools/test_slips.py",
    "chat/tools/test_transcripts.py",
    "kvcache/disk/test_fuzz.py",
    "kvcache/test_resumable.py",
    "kvcache/test_tiers.py",
    "kvcache/tiers/test_contract.py",
    "runtime/test_exactness.py",
    "runtime/test_format_loops.py",
    "runtime/test_parts.py",
    "runtime/test_promises.py",
    "runtime/test_restart.py",
    "runtime/test_tool_loop.py",
    "test_dependencies.py",
    "test_docs.py",
    "test_hatch_build.py",
    "front/test_disconnect.py",
    "front/test_failures.py",
}

MAX_FUNCTION_LINES = 45

#: Measures of the import graph. A new capability may raise a number, with its reason next to it.
MAX_MODULES = 280
MAX_IMPORT_DEPTH = 27  # modules on the longest chain of imports
MAX_SMALL_MODULES = 8  # below SMALL_MODULE_LINES and imported by a single other module
SMALL_MODULE_LINES = 60  # not counting blank ones
MAX_SHARED_CLASS_NAMES = 34  # class names that two modules outside the dialects define

#: The folders that each folder may import, besides itself. Modules at the root (errors, tokens,
#: memory, version, event_stream) may be imported from everywhere.
FOLDER_IMPORTS = {
    "protocol": set(),
    "http": set(),
    "config": {"protocol", "media"},
    "media": {"protocol"},
    "models": {"protocol"},
    "worker": {"protocol", "http"},
    "api": {"base", "http", "worker", "protocol", "media", "config", "models"},
    "front": {"api", "http", "worker", "protocol", "media", "config", "models"},
    "chat": {"protocol"},
    "kvcache": {"protocol"},
    "engine": {"protocol", "models"},
    "runtime": {"chat", "kvcache", "engine", "protocol", "models"},
    "bench": {"models"},
    "cli": {"front", "bench", "config", "models", "media", "protocol", "kvcache", "http"},
}

#: Ways to turn bytes or text from outside into running code.
BANNED = re.compile(
    r"\b(pickle|cloudpickle|dill|marshal|shelve)\b"
    r"|\btorch\.load\b|\ballow_pickle\b|\byaml\.(unsafe_|full_)?load(_all)?\("
    r"|(?<![\w.])(eval|exec)\("
)


def name_of(path: Path) -> str:
    """A file's module name; a package's is that of its folder."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("rekindle", *(parts[:-1] if parts[-1] == "__init__" else parts)))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MODULES = {name_of(path): path for path in FILES}


def imported(path: Path) -> Iterator[str]:
    """Every module a file imports, by its full name."""
    package = ("rekindle", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, node.module) if node.module else above)
            names = [f"{module}.{name.name}" for name in node.names]
            yield from names
            if not all(name in MODULES for name in names):
                yield module


def imported_modules(path: Path) -> set[str]:
    """The modules of ours that a file imports anywhere: in functions and for types too."""
    return {name for name in imported(path) if name in MODULES and name != name_of(path)}


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return module.split(".")[:2] in [["rekindle", package] for package in packages]


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_there_is_something_to_look_at() -> None:
    assert {part for part in PARTS if (SOURCE / part).is_dir()} == set(PARTS)
    assert "rekindle.kvcache.block" in imported(SOURCE / "kvcache" / "store.py")
    assert "rekindle.front.app" in imported_modules(SOURCE / "front" / "launch.py")


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
    inside = re.compile(r"rekindle\.engine\.(?!base|registry)\w")
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


def test_the_front_imports_nothing_of_what_runs_a_model() -> None:
    met = {
        (str(path.relative_to(SOURCE)), module)
        for package in FRONT
        for path in (SOURCE / package).rglob("*.py")
        for module in imported_modules(path)
        if is_in(module, BEHIND_PROTOCOL)
    }
    assert met - ALLOWED == set()


def test_a_launched_server_has_loaded_nothing_of_what_runs_a_model() -> None:
    """Also not by way of something else that the front may import."""
    code = (
        "import sys, rekindle.config, rekindle.front.launch as launch\n"
        "launch.build_app(rekindle.config.Config(), None)\n"
        "print(*sys.modules, sep='\\n')"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "rekindle.api.openai.routes" in loaded
    assert [module for module in loaded if is_in(module, BEHIND_PROTOCOL)] == []


def test_the_protocol_imports_nothing_else_of_ours() -> None:
    met = {
        f"{path.name}: {module}"
        for path in (SOURCE / "protocol").rglob("*.py")
        for module in imported_modules(path)
        if not is_in(module, ("protocol",))
    }
    assert met == set()


def test_a_dialect_imports_no_other_dialect() -> None:
    folders = [path.name for path in (SOURCE / "api").iterdir() if (path / "__init__.py").exists()]
    dialects = [name for name in folders if name != "base"]
    assert {"openai", "cache"} <= set(dialects)
    met = {
        f"{path.relative_to(SOURCE)}: {module}"
        for dialect in dialects
        for path in (SOURCE / "api" / dialect).rglob("*.py")
        for module in imported_modules(path)
        if module.split(".")[2:3] != [dialect]
        and module.startswith(tuple(f"rekindle.api.{other}" for other in dialects))
    }
    assert met == set()


def test_no_engine_is_named_outside_the_engines() -> None:
    """But for two lines of the registry: what generates text, and what makes vectors."""
    named = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in FILES
        if not path.is_relative_to(SOURCE / "engine" / "llamacpp")
        for line in path.read_text().splitlines()
        if re.search(r"llama_?cpp", line, re.IGNORECASE)
    ]
    assert [line for line in named if not line.startswith("engine/registry.py: ")] == []
    assert len(named) <= 2


def tiers_named(path: Path) -> set[str]:
    """The tiers that a file imports, or names in a string of its own."""
    tiers = {each.stem for each in (SOURCE / "kvcache" / "tiers").glob("*.py")}
    tiers -= {"__init__", "base", "budget"}
    modules = {f"rekindle.kvcache.tiers.{tier}" for tier in tiers}
    constants = {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    found = {module for module in imported(path) if module.startswith(tuple(modules))}
    return found | (constants & tiers)


def test_only_the_composition_knows_which_tiers_there_are() -> None:
    met = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in TIER_CLIENTS
        if str(path.relative_to(SOURCE)) not in MAY_NAME_TIERS
        for name in tiers_named(path)
    }
    assert met == set()


def test_each_named_tier_would_be_seen() -> None:
    modules = ("disk.DiskTier", "disk", "ram.RamTier", "ram")
    imported = {f"rekindle.kvcache.tiers.{name}" for name in modules}
    assert tiers_named(SOURCE / "runtime" / "storage" / "opening.py") == imported
    assert {"ram", "disk"} < tiers_named(SOURCE / "runtime" / "storage" / "storage.py")
    assert tiers_named(SOURCE / "kvcache" / "tiers" / "ram.py") == {"ram"}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Counting imports inside functions and behind TYPE_CHECKING."""
    graph = {module: imported_modules(path) for module, path in MODULES.items()}
    assert cycles(graph) == []


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, [["a", "b"]]),
        ({"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": set()}, [["a", "b", "c"]]),
        ({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}}, [["c", "d"], ["a", "b"]]),
    ],
)
def test_each_circle_would_be_seen(graph: dict[str, set[str]], found: list[list[str]]) -> None:
    assert cycles(graph) == found


def function_lines(path: Path) -> Iterator[tuple[str, int]]:
    name = str(path.relative_to(SOURCE))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, FUNCTIONS) and node.end_lineno is not None:
            yield f"{name}: {node.name}()", node.end_lineno - node.lineno + 1


def test_functions_are_short_enough_to_read_at_once() -> None:
    found = [part for path in FILES for part in function_lines(path)]
    assert [part for part in found if part[1] > MAX_FUNCTION_LINES] == []
    assert ("engine/base.py: cells_bytes()", 3) in found


def import_graph() -> dict[str, set[str]]:
    """The modules that have any text, and which of them each one imports."""
    modules = {name: path for name, path in MODULES.items() if path.read_text().strip()}
    return {name: imported_modules(path) & modules.keys() for name, path in modules.items()}


def import_depth(graph: dict[str, set[str]]) -> int:
    """The number of modules on the longest chain of imports."""
    depths: dict[str, int] = {}

    def depth(module: str) -> int:
        if module not in depths:
            depths[module] = 1 + max(map(depth, graph[module]), default=0)
        return depths[module]

    return max(map(depth, graph))


def test_the_import_graph_stays_small_and_shallow() -> None:
    graph = import_graph()
    assert len(graph) <= MAX_MODULES
    assert import_depth(graph) <= MAX_IMPORT_DEPTH


def test_the_depth_of_a_graph_counts_the_modules_of_its_longest_chain() -> None:
    assert import_depth({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == 3


def test_few_small_modules_have_a_single_importer() -> None:
    """A short file that one other file needs usually reads better inside that file."""
    graph = import_graph()
    importers = Counter(target for targets in graph.values() for target in targets)
    small = [
        module
        for module in graph
        if importers[module] == 1
        and MODULES[module].name != "__init__.py"
        and sum(map(bool, MODULES[module].read_text().split("\n"))) < SMALL_MODULE_LINES
    ]
    assert len(small) <= MAX_SMALL_MODULES, small


def test_a_class_name_stands_for_one_thing_outside_the_dialects() -> None:
    names = Counter(
        node.name
        for path in FILES
        if SOURCE / "api" not in path.parents
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    shared = [name for name, count in names.items() if count > 1]
    assert len(shared) <= MAX_SHARED_CLASS_NAMES, shared


def test_folders_import_only_what_lies_below_them() -> None:
    met = {
        f"{path.relative_to(SOURCE)}: {module}"
        for folder, allowed in FOLDER_IMPORTS.items()
        for path in (SOURCE / folder).rglob("*.py")
        for module in imported_modules(path)
        if (parts := module.split("."))[1:2] != [folder]
        and len(parts) > 2
        and parts[1] not in allowed
        and (str(path.relative_to(SOURCE)), module) not in ALLOWED
    }
    assert met == set()
    assert {path.name for path in SOURCE.iterdir() if path.is_dir()} - {"__pycache__"} == set(
        FOLDER_IMPORTS
    )


def test_tests_mirror_the_source() -> None:
    """`tests/X/test_Y.py` is about the module Y of X, and so is `test_Y_topic.py`."""
    stray = [
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("test_*.py")
        if path.relative_to(TESTS).parts[0] not in NOT_MIRRORED
        and str(path.relative_to(TESTS)) not in CROSS_CUTTING
        and path != Path(__file__)
        and not mirrors_a_module(path.relative_to(TESTS))
    ]
    assert stray == []


def mirrors_a_module(test: Path) -> bool:
    words = test.stem.removeprefix("test_").split("_")
    names = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
    folder = SOURCE / test.parent
    return any((folder / f"{name}.py").is_file() or (folder / name).is_dir() for name in names)
