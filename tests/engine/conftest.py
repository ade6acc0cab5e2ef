"""Fixtures for samplers."""

from __future__ import annotations

import pytest

from rekindle.engine import compiled_rows

CHOOSERS = ["numpy"] if compiled_rows.load() is None else ["compiled", "numpy"]


@pytest.fixture(params=CHOOSERS)
def chooser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What chooses tokens: tests that ask for it hold for both."""
    if request.param == "numpy":
        monkeypatch.setattr(compiled_rows, "load", lambda: None)
    name: str = request.param
    return name
