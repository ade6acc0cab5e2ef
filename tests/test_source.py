"""Guards the structure of the source tree: who imports whom, how deep, and where tests are."""

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

#: Imports that break the rules, each with its reason.
ALLOWED = {
    # `rekindle cache check` verifies a cache folder on disk, without any server.
    ("cli/cache.py", "rekindle.kvcache.disk.check"),
    ("cli/cache.py", "rekindle.kvcache.disk.secret"),
    ("cli/cache.py", "rekindle.kvcache.disk.backup"),
    # `rekindle doctor` also looks at it.
    ("cli/doctor.py", "rekindle.kvcache.disk.check"),
    ("cli/doctor.py", "rekindle.kvcache.disk.folder"),
    ("cli/doctor.py", "rekindle.kvcache.disk.secret"),
}

#: Files that may use tiers only through their interface.
TIER_CLIENTS = [
    *(SOURCE / "kvcache" / f"{name}.py" for name in ("store", "placement", "fetches")),
    *(SOURCE / "runtime").rglob("*.py"),
]

#: Exceptions, which may name a tier, each with its reason.
MAY_NAME_TIERS = {
    "runtime/storage/storage.py",  # it says what RAM and the disk hold
    "runtime/storage/opening.py",  # it composes the tiers
}

#: Test folders that do not mirror a source folder.
NOT_MIRRORED = {"support", "contract", "e2e", "stress", "security", "bench", "tools"}

#: Suites that cover several modules of their folder.
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
    "runtime/test_ownership.py",
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
#: Beyond 280: converting safetensors and llama.cpp endpoints (5), pictures of MLX models (5), the
#: console (3), request records with their metrics and traces, health, `doctor`, `service`, GPUs and
#: backups (9), stored chat completions and the text of PDF files (2), limits, key files and tenants
#: (5), stopping and reloading (1), models on demand (8).
MAX_MODULES = 318
MAX_IMPORT_DEPTH = 19  # modules on the longest chain of imports
MAX_SMALL_MODULES = 8  # below SMALL_MODULE_LINES and imported by a single other module
SMALL_MODULE_LINES = 60  # not counting blank ones
MAX_SHARED_CLASS_NAMES = 1  # `Engine` is the Python API and the engine interface

#: The folders that each folder may import, besides itself. Modules at the root (errors, tokens,
#: memory, version, event_stream) may be imported from everywhere.
FOLDER_IMPORTS = {
    "protocol": set(),
    "http": {"protocol"},
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
    """Return the module name of a file. A package has the name of its folder."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("rekindle", *(parts[:-1] if parts[-1] == "__init__" else parts)))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MODULES = {name_of(path): path for path in FILES}


def imported(path: Path) -> Iterator[str]:
    """Yield the full name of every module that a file imports."""
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
    """Return the modules of this package that a file imports, also in functions and for types."""
    return {name for name in imported(path) if name in MODULES and name != name_of(path)}


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return module.split(".")[:2] in [["rekindle", package] for package in packages]


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one node (Tarjan)."""
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


def test_the_guards_see_the_source_tree() -> None:
    assert {part for part in PARTS if (SOURCE / part).is_dir()} == set(PARTS)
    assert "rekindle.kvcache.block" in imported(SOURCE / "kvcache" / "store.py")
    assert "rekindle.front.app" in imported_modules(SOURCE / "front" / "launch.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_executes_untrusted_bytes(path: Path) -> None:
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
def test_every_banned_call_is_detected(line: str) -> None:
    assert BANNED.search(line)


@pytest.mark.parametrize(
    "line", ["yaml.safe_load(text)", "model.eval()", "create_subprocess_exec("]
)
def test_similar_but_harmless_calls_are_allowed(line: str) -> None:
    assert not BANNED.search(line)


def test_only_the_engine_folder_imports_engine_implementations() -> None:
    """Everybody else imports the interface, and the runtime the registry."""
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


def test_the_front_does_not_import_model_code() -> None:
    met = {
        (str(path.relative_to(SOURCE)), module)
        for package in FRONT
        for path in (SOURCE / package).rglob("*.py")
        for module in imported_modules(path)
        if is_in(module, BEHIND_PROTOCOL)
    }
    assert met - ALLOWED == set()


def test_a_launched_server_has_not_loaded_model_code() -> None:
    """This also covers indirect imports."""
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


def test_the_protocol_imports_no_other_folder() -> None:
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
    """The registry has three lines that do: for text generation, embeddings and the library."""
    named = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in FILES
        if not path.is_relative_to(SOURCE / "engine" / "llamacpp")
        for line in path.read_text().splitlines()
        if re.search(r"llama_?cpp", line, re.IGNORECASE)
    ]
    assert [line for line in named if not line.startswith("engine/registry.py: ")] == []
    assert len(named) <= 3


def tiers_named(path: Path) -> set[str]:
    """Return the tiers that a file imports or names in a string."""
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


def test_only_the_composition_root_names_tiers() -> None:
    met = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in TIER_CLIENTS
        if str(path.relative_to(SOURCE)) not in MAY_NAME_TIERS
        for name in tiers_named(path)
    }
    assert met == set()


def test_every_named_tier_is_detected() -> None:
    modules = ("disk.DiskTier", "disk", "ram.RamTier", "ram")
    imported = {f"rekindle.kvcache.tiers.{name}" for name in modules}
    assert tiers_named(SOURCE / "runtime" / "storage" / "opening.py") == imported
    assert {"ram", "disk"} < tiers_named(SOURCE / "runtime" / "storage" / "storage.py")
    assert tiers_named(SOURCE / "kvcache" / "tiers" / "ram.py") == {"ram"}


def test_there_are_no_import_cycles() -> None:
    """Imports inside functions and behind TYPE_CHECKING count as well."""
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
def test_every_import_cycle_is_detected(graph: dict[str, set[str]], found: list[list[str]]) -> None:
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
    """Return the modules that are not empty, with their imports."""
    modules = {name: path for name, path in MODULES.items() if path.read_text().strip()}
    return {name: imported_modules(path) & modules.keys() for name, path in modules.items()}


def import_depth(graph: dict[str, set[str]]) -> int:
    """Return the number of modules on the longest chain of imports."""
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
    """`tests/X/test_Y.py` and `tests/X/test_Y_topic.py` test the module `X/Y.py`."""
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
