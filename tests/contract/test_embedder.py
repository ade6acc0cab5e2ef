"""Every embedder keeps these promises."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rekindle.engine.base import Embedder
from tests.contract.embedders import WRITERS, build_embedder


@pytest.fixture(scope="module", params=WRITERS)
def embedder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Embedder]:
    built = build_embedder(request.param, tmp_path_factory.mktemp("model"))
    yield built
    built.close()


def inputs(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(sum(lengths))
    return [random.integers(4, 60, length).tolist() for length in lengths]


def test_every_input_has_a_row_of_length_one(embedder: Embedder) -> None:
    vectors = embedder.embed(inputs(1, 20, 7))
    assert vectors.shape == (3, embedder.info.dimensions)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_an_input_has_the_same_vector_alone_and_in_any_company(embedder: Embedder) -> None:
    together = inputs(5, 90, 1, 40, 40, 3, 127, 64) * 20  # more than one call takes
    alone = np.concatenate([embedder.embed([each]) for each in together[:8]])
    vectors = embedder.embed(together).reshape(20, *alone.shape)
    assert (vectors * alone).sum(axis=-1).min() > 0.9999


def test_other_tokens_or_another_order_give_another_vector(embedder: Embedder) -> None:
    one, turned, longer = embedder.embed([[5, 6, 7], [7, 6, 5], [5, 6, 7, 7]])
    assert one @ turned < 0.9999
    assert one @ longer < 0.9999


def test_an_input_may_be_as_long_as_the_context(embedder: Embedder) -> None:
    [longest] = inputs(embedder.info.context_tokens)
    assert np.isfinite(embedder.embed([longest])).all()


def test_no_inputs_give_no_rows(embedder: Embedder) -> None:
    assert embedder.embed([]).shape == (0, embedder.info.dimensions)
