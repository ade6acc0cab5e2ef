"""Fixtures for samplers."""

from __future__ import annotations

from ctypes import CDLL

import pytest

from rekindle.engine.sampling import native as compiled_rows

COMPILED = compiled_rows.load()
CHOOSERS = {"numpy": None} | ({"compiled": COMPILED} if COMPILED else {})


@pytest.fixture(params=CHOOSERS.values(), ids=list(CHOOSERS))
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CDLL | None:
    """Compiled code, and none: tests that ask for it hold for both."""
    chosen: CDLL | None = request.param
    monkeypatch.setattr(compiled_rows, "load", lambda: chosen)
    return chosen
