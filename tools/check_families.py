"""Checks that every short name of the catalogue leads to a model on the hub. Needs a network.

    python tools/check_families.py [NAME ...]

Prints repository, best file, size and licence of each name. Exits with status 1 if one is missing.
Run it before a release. HF_ENDPOINT and HF_TOKEN are obeyed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.filesize import decimal

from rekindle.errors import ModelError
from rekindle.models.families import repositories
from rekindle.models.gguf_files import best_projector, candidates
from rekindle.models.hub import explained, folder_files, read_listing


def check(names: Sequence[str]) -> int:
    """Check these names, or all. Returns the number of names that lead to no model."""
    known = dict(repositories())
    failures = 0
    for name in names or known:
        try:
            print(f"{name}: {_described(name, known[name])}")
        except (ModelError, KeyError) as error:
            failures += 1
            print(f"FAILED {name}: {error}")
    return failures


def _described(name: str, repo: str) -> str:
    """Describe what somebody with enough memory gets. Raises ModelError if there is no model."""
    with explained(repo):
        listed, licence = read_listing(repo)
    sizes = {file.name: file.size_bytes or 0 for file in listed}
    if name.startswith("qwen3-vl") and not best_projector(sizes):
        raise ModelError(f"{repo} has no projector, so the model would read no images")
    if folder := folder_files(listed):
        title, size_bytes = "a folder", sum(sizes[file.name] for file in folder)
    elif found := candidates(sizes):
        title, size_bytes = found[0].files[0], found[0].size_bytes
    else:
        raise ModelError(f"{repo} has no complete model")
    return f"{repo}, {title}, {decimal(size_bytes)}, licence {licence or 'unknown'}"


if __name__ == "__main__":
    failed = check(sys.argv[1:])
    print(f"{failed} names lead to no model" if failed else "every name leads to a model")
    sys.exit(bool(failed))
