from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.engine.base import Engine
from tests.contract.engines import build


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    built = build(request.param, tmp_path)
    yield built
    built.close()
