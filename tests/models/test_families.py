from __future__ import annotations

import pytest

from rekindle.models.catalogue import CATALOGUE, HUB_ID
from rekindle.models.families import (
    FAMILIES,
    find_in_families,
    name_of_repo,
    repositories,
    smaller_names,
)


def test_every_family_has_its_default_size() -> None:
    for name, family in FAMILIES.items():
        assert family.default in family.members
        assert name not in CATALOGUE


def test_every_name_means_exactly_one_repository() -> None:
    found = list(repositories())
    assert len({repo for _, repo in found}) == len(found)
    for name, repo in found:
        assert HUB_ID.fullmatch(repo)
        meant = find_in_families(name)
        assert meant is not None
        assert (meant.name, meant.repo, meant.quant) == (name, repo, None)
        assert name_of_repo(repo) == name


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "llama3.2", "mistral", "phi4", "gpt-oss",
                                    "smollm3", "qwen3-vl", "qwen3-embedding"])  # fmt: skip
def test_the_families_that_people_ask_for_are_listed(family: str) -> None:
    assert family in FAMILIES


@pytest.mark.parametrize("name", ["", ":", "qwen3:", "qwen", "qwen3-4b", "qwen3:4b-", "qwen3/4b",
                                  "qwen3-vl:4b-mlx"])  # fmt: skip
def test_any_other_name_is_not_found(name: str) -> None:
    assert find_in_families(name) is None


def test_smaller_sizes_are_named_from_large_to_small() -> None:
    assert smaller_names("qwen3:4b") == ["qwen3:1.7b", "qwen3:0.6b"]
    assert smaller_names("qwen3:0.6b") == []
    assert smaller_names("qwen3:4b-mlx") == []


def test_a_repository_of_no_family_has_no_short_name() -> None:
    assert name_of_repo("org/repo") is None
