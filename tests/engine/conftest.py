"""Fixtures for samplers."""

from __future__ import annotations

from ctypes import CDLL

import pytest

from rekindle.engine.sampling import native

COMPILED = native.load()
SAMPLERS = {"numpy": None} | ({"compiled": COMPILED} if COMPILED else {})


@pytest.fixture(params=SAMPLERS.values(), ids=list(SAMPLERS))
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CDLL | None:
    """Run a test with compiled code and without it."""
    chosen: CDLL | None = request.param
    monkeypatch.setattr(native, "load", lambda: chosen)
    return chosen
