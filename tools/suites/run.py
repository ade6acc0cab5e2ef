"""Implements `make suites`: runs the tests and programs of other projects against this server.

What no package registry has is run from a folder that is given: nothing of theirs is in this
repository. The results are for docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tools.suites import programs
from tools.suites.llama_server import (
    MODELS_VARIABLE,
    SERVERS_VARIABLE,
    SharedServers,
    write_models,
)
from tools.suites.outcomes import OUTCOMES_VARIABLE

ROOT = Path(__file__).parents[2]
#: Their files that test what this server has. Others are about its router, tools and drafts.
LLAMA_FILES = (
    *("basic", "tokenize", "completion", "chat_completion", "infill", "ctx_shift", "ignore_eos"),
    *("security", "embedding", "rerank", "metrics", "template", "vision_api", "slot_save"),
    *("compat_oai_responses", "compat_anthropic", "tool_call"),
)
LAUNCHER = """#!/bin/sh
exec "{python}" -m tools.suites.llama_server "$@"
"""


def run_llama_tests(
    build: Path, tests: Path, text_model: Path | None, port: int, chosen: list[str]
) -> list[dict[str, Any]]:
    """Run the tests in `tests`, a checkout's tools/server/tests, and return their outcomes."""
    models, servers, temporary = build / "models", build / "servers", build / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    write_models(models, text_model)
    launcher = build / "llama-server"
    launcher.write_text(LAUNCHER.format(python=sys.executable))
    launcher.chmod(0o755)
    outcomes = build / "llama.jsonl"
    outcomes.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "LLAMA_SERVER_BIN_PATH": str(launcher),
        "PORT": str(port),
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT), str(tests))),
        "TMPDIR": str(temporary),
        MODELS_VARIABLE: str(models),
        SERVERS_VARIABLE: str(servers),
        OUTCOMES_VARIABLE: str(outcomes),
    }
    plugins = ["-p", "no:cacheprovider", "-p", "tools.suites.outcomes"]
    files = [f"unit/test_{name}.py" for name in chosen or LLAMA_FILES]
    python = build / "venv" / "bin" / "python"
    try:
        subprocess.run(
            [str(python), "-m", "pytest", "-q", *plugins, "-m", "not slow", *files],
            cwd=tests,
            env=environment,
            check=False,
        )
    finally:
        SharedServers(servers).stop()
    return [json.loads(line) for line in outcomes.read_text().splitlines()]


def report(outcomes: list[dict[str, Any]]) -> str:
    """Summarise the outcomes by file, and name every test that failed."""
    counts: dict[str, Counter[str]] = {}
    for each in outcomes:
        file = each["test"].partition("::")[0]
        counts.setdefault(file, Counter())[each["outcome"]] += 1
    lines = [
        f"{file}: {found['passed']} of {found.total() - found['skipped']} passed"
        for file, found in counts.items()
    ]
    total = sum(counts.values(), Counter[str]())
    lines.append(f"in all: {total['passed']} of {total.total() - total['skipped']} passed")
    failed = (each for each in outcomes if each["outcome"] == "failed")
    lines += [f"FAILED {each['test']}: {' | '.join(each['reason'])[:200]}" for each in failed]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path, help="folder for environments, models and results")
    parser.add_argument("--llama-tests", type=Path, help="tools/server/tests of a checkout")
    parser.add_argument("--llama-text-model", type=Path, help="stories260K.gguf, if you have it")
    parser.add_argument("--port", type=int, default=18_473)
    parser.add_argument("files", nargs="*", help="such as completion; all by default")
    parser.add_argument("--ollama-examples", type=Path, help="examples of ollama-python")
    parser.add_argument(
        "--open-responses", type=Path, help="a checkout of Open Responses; needs bun"
    )
    parser.add_argument("--load-tools", action="store_true", help="run guidellm and aiperf, too")
    options = parser.parse_intermixed_args()
    build = options.build.resolve()
    if options.llama_tests is not None:
        tests = options.llama_tests.resolve()
        text_model = options.llama_text_model and options.llama_text_model.resolve()
        print(report(run_llama_tests(build, tests, text_model, options.port, options.files)))
    else:
        run_programs(build, options)


def run_programs(build: Path, options: argparse.Namespace) -> None:
    """Run everything that is not llama.cpp's."""
    found = programs.langchain_tests()
    with programs.serving(options.port) as address:
        found += programs.sdk_examples(address)
        if options.ollama_examples is not None:
            found += programs.ollama_examples(address, options.ollama_examples.resolve())
        if options.open_responses is not None:
            found += programs.open_responses(address, options.open_responses.resolve())
        if options.load_tools:
            found += programs.load_tools(address, build)
    failed = [name for name, passed in found if not passed]
    print(f"{len(found) - len(failed)} of {len(found)} programs succeeded")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
