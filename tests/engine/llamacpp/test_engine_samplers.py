"""DRY and typical-p do what llama.cpp's own samplers do."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rekindle.engine.base import Row
from rekindle.engine.llamacpp.bindings import declare, load_library
from rekindle.engine.llamacpp.tokenizer import LlamaTokenizer
from rekindle.engine.sampling.penalties import DryPenalty
from rekindle.engine.sampling.sampler import TokenSampler
from rekindle.protocol.requests import SamplingParams
from rekindle.runtime.encode.sampling import SamplingEncoder
from tests.support.gguf_vocabulary import llama_tokenizer
from tests.support.rounds import rounds
from tests.support.tiny import write_llama

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
WINDOW = 4096  # longer than every text here
TEXTS = (
    'The cat: on the "mat".\n* one\n* two\nThe cat: on the mat, the cat: on ',
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(",
    " hello END hello END hello",
)
BREAKERS = (("\n", ":", '"', "*"), ("END",), (" the",), ("zq",), ("print(", "\n"))


class Candidates(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", c_void_p), ("size", c_size_t), ("selected", c_int64), ("sorted", c_bool),
    ]  # fmt: skip


DRY_ARGUMENTS = [c_void_p, c_float, c_float, c_int32, c_int32, POINTER(c_char_p), c_size_t]
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_sampler_init_dry": (c_void_p, DRY_ARGUMENTS),
    "llama_sampler_init_typical": (c_void_p, [c_float, c_size_t]),
    "llama_sampler_accept": (None, [c_void_p, c_int32]),
    "llama_sampler_apply": (None, [c_void_p, POINTER(Candidates)]),
    "llama_sampler_free": (None, [c_void_p]),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaTokenizer]:
    path: Path = write_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    with llama_tokenizer(path) as found:
        yield found


@pytest.fixture(scope="module")
def library() -> Any:
    found = load_library()
    declare(found, SIGNATURES)
    return found


def applied(library: Any, sampler: int, row: Row) -> dict[int, float]:
    """The tokens that a sampler of llama.cpp leaves, with their logits."""
    left = np.zeros(row.size, CANDIDATE)
    left["id"], left["logit"] = np.arange(row.size), row
    array = Candidates(left.ctypes.data, row.size, -1, False)
    library.llama_sampler_apply(sampler, ctypes.byref(array))
    library.llama_sampler_free(sampler)
    return {int(each["id"]): float(each["logit"]) for each in left[: array.size]}


@pytest.mark.long
def test_dry_penalties_are_llamacpps(tokenizer: LlamaTokenizer, library: Any) -> None:
    rng, encoder = random.Random(1), SamplingEncoder(tokenizer)
    for _ in range(rounds(60, 2000)):
        breakers = rng.choice(BREAKERS)
        sampling = SamplingParams(
            dry_multiplier=0.8,
            dry_base=rng.choice([1.1, 1.75]),
            dry_allowed_length=rng.randrange(4),
            dry_penalty_last_n=rng.choice([-1, 5, 12, 64]),
            dry_sequence_breakers=breakers,
        )
        ids = tokenizer.encode(rng.choice(TEXTS) * rng.randint(1, 3), special=False)
        ids = ids[: rng.randint(1, len(ids))]
        window = sampling.dry_penalty_last_n if sampling.dry_penalty_last_n > 0 else WINDOW
        theirs = library.llama_sampler_init_dry(
            tokenizer._vocab,
            sampling.dry_multiplier,
            sampling.dry_base,
            sampling.dry_allowed_length,
            window,
            (c_char_p * len(breakers))(*(each.encode() for each in breakers)),
            len(breakers),
        )
        for token in ids:
            library.llama_sampler_accept(theirs, token)
        row = np.zeros(tokenizer.size, np.float32)
        expected = applied(library, theirs, row)
        DryPenalty(encoder.encode(sampling), ids).apply(row)
        assert dict(enumerate(row.tolist())) == pytest.approx(expected, rel=1e-4), (ids, sampling)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_typical_tokens_are_llamacpps(library: Any, share: float, spread: float) -> None:
    row = np.random.default_rng(1).normal(0, spread, 300).astype(np.float32)
    left = set(applied(library, library.llama_sampler_init_typical(share, 1), row.copy()))
    sampling = SamplingParams(temperature=100, top_p=1, typical_p=share, seed=1)
    sampler = TokenSampler(sampling, [])
    drawn = {sampler.sample(row.copy()).token for _ in range(30 * len(left))}
    assert drawn == left
