"""The catalogue's embedding model agrees with a plain implementation of BERT."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.engine.base import Embedder, EngineOptions
from rekindle.engine.registry import load_embedder
from tests.support.reference_bert import ReferenceBert

SUBJECTS = ("The cat", "A naïve café owner", "Python 3.11", "My neighbour's dog", "日本語の本")
VERBS = ("sleeps", "doesn't like", "was unaffably reorganising", "e-mailed", "costs $4.20 at")
ENDS = ("on the mat.", "the quick brown fox, which jumped over 13 lazy dogs; and then it rained!")
SENTENCES = [f"{subject} {verb} {end}" for subject in SUBJECTS for verb in VERBS for end in ENDS]


@pytest.fixture(scope="module")
def embedder(minilm_path: Path) -> Iterator[Embedder]:
    loaded = load_embedder(EngineOptions(path=minilm_path, threads=1))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def reference(minilm_path: Path) -> ReferenceBert:
    return ReferenceBert(minilm_path)


def test_texts_are_tokenised_like_the_reference(
    embedder: Embedder, reference: ReferenceBert
) -> None:
    for sentence in SENTENCES:
        assert embedder.encode(sentence) == reference.tokens(sentence)


def test_fifty_sentences_have_the_same_vectors_as_the_reference(
    embedder: Embedder, reference: ReferenceBert
) -> None:
    assert len(set(SENTENCES)) == 50
    found = embedder.embed([embedder.encode(sentence) for sentence in SENTENCES])
    assert (found * reference.embed(SENTENCES)).sum(axis=1).min() > 0.999


def test_the_published_folder_has_the_same_vectors_as_the_gguf_file(
    embedder: Embedder, minilm_folder: Path
) -> None:
    sentences = SENTENCES[::5]
    published = load_embedder(EngineOptions(path=minilm_folder, threads=1))
    try:
        assert published.info.dimensions == embedder.info.dimensions
        assert published.info.context_tokens == embedder.info.context_tokens
        for sentence in SENTENCES:
            assert published.encode(sentence) == embedder.encode(sentence)
        tokens = [embedder.encode(sentence) for sentence in sentences]
        assert (published.embed(tokens) * embedder.embed(tokens)).sum(axis=1).min() > 0.999
    finally:
        published.close()


def test_sentences_with_the_same_meaning_are_closest(embedder: Embedder) -> None:
    texts = ["How old are you?", "What is your age?", "The train to Rome leaves at noon."]
    one, same, other = embedder.embed([embedder.encode(text) for text in texts])
    assert one @ same > 0.5 > one @ other + 0.2
