from __future__ import annotations

import pytest

from rekindle.models.gguf_files import Unclear, choose, split_names

SPLIT = tuple(f"BF16/m-BF16-0000{n}-of-00003.gguf" for n in (1, 2, 3))
REPO = ["README.md", "m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-F16.gguf", *SPLIT]
MODELS = (SPLIT[0], "m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf")


def test_the_preferred_quantisation_is_the_default() -> None:
    assert choose(REPO, None) == ("m-Q4_K_M.gguf",)


@pytest.mark.parametrize(
    ("better", "worse"),
    [("Q4_K_M", "Q4_K_S"), ("Q4_K_S", "Q5_K_M"), ("Q5_K_M", "Q4_0"), ("Q4_0", "Q8_0")],
)
def test_preferences_have_an_order(better: str, worse: str) -> None:
    assert choose([f"m.{worse}.gguf", f"m.{better}.gguf"], None) == (f"m.{better}.gguf",)


@pytest.mark.parametrize("wanted", ["Q8_0", "q8_0"])
def test_a_quantisation_is_found_in_any_case(wanted: str) -> None:
    assert choose(REPO, wanted) == ("m-Q8_0.gguf",)
    assert choose(["m.q8_0.gguf", "m.q4_0.gguf"], wanted) == ("m.q8_0.gguf",)


def test_a_quantisation_is_matched_as_a_whole_word() -> None:
    names = ["m-Q4_0_4_4.gguf", "m-IQ4_0.gguf", "m-BF16.gguf", "m-Q4_0-imat.gguf"]
    assert choose(names, "Q4_0") == ("m-Q4_0-imat.gguf",)
    assert isinstance(choose(names, "F16"), Unclear)


def test_a_split_model_is_all_its_files_in_order() -> None:
    assert choose(REPO[::-1], "BF16") == SPLIT
    assert choose(REPO[::-1], SPLIT[1].removeprefix("BF16/")) == SPLIT


def test_a_split_with_a_missing_file_is_not_a_model() -> None:
    assert choose(SPLIT[:2], None) == Unclear("has no complete GGUF model", ())
    assert isinstance(choose(SPLIT[:2], SPLIT[0]), Unclear)


def test_the_only_model_needs_no_preference() -> None:
    names = ["m-IQ2_XS.gguf", "mmproj-F16.gguf", "imatrix.gguf"]
    assert choose(names, None) == ("m-IQ2_XS.gguf",)


def test_a_projector_is_taken_only_by_its_full_name() -> None:
    assert choose(["mmproj-F16.gguf"], None) == Unclear("has no complete GGUF model", ())
    assert choose(REPO, "F16") == Unclear("has no file with F16", MODELS)
    assert choose(REPO, "mmproj-m-F16.gguf") == ("mmproj-m-F16.gguf",)


def test_several_matches_are_listed() -> None:
    names = ["a-Q4_K_M.gguf", "b-Q4_K_M.gguf", "b-Q8_0.gguf"]
    expected = Unclear("has several files with Q4_K_M", ("a-Q4_K_M.gguf", "b-Q4_K_M.gguf"))
    assert choose(names, None) == choose(names, "Q4_K_M") == expected


def test_a_file_may_be_named_with_or_without_its_folder() -> None:
    names = ["old/m.gguf", "new/m.gguf", "m2.gguf"]
    assert choose(names, "old/m.gguf") == ("old/m.gguf",)
    assert isinstance(choose(names, "m.gguf"), Unclear)
    assert choose([*names, "m.gguf"], "m.gguf") == ("m.gguf",)


@pytest.mark.parametrize("name", ["m.gguf", "m-00000-of-00000.gguf", "m-00003-of-00002.gguf"])
def test_a_file_that_is_not_split_stands_for_itself(name: str) -> None:
    assert split_names(name) == (name,)
