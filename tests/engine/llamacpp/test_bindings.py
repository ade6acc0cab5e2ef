"""The native library is loaded with the right environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOAD = (
    "import os; from rekindle.engine.llamacpp.bindings import load_library; load_library();"
    "print(os.environ['GOMP_SPINCOUNT'])"
)


@pytest.mark.parametrize(("chosen", "expected"), [(None, "100000"), ("77", "77")])
def test_the_openmp_spin_count_is_set_unless_the_user_sets_it(
    chosen: str | None, expected: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment["OMP_DISPLAY_ENV"] = "verbose"  # libgomp says what it has read
    if chosen is not None:
        environment["GOMP_SPINCOUNT"] = chosen
    ran = subprocess.run(
        [sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == expected
    if sys.platform == "linux":
        assert f"GOMP_SPINCOUNT = '{expected}'" in ran.stderr
