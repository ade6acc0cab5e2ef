"""The tree of stored prefixes shows shared parts once, and a tenant's text to that tenant only."""

from __future__ import annotations

import pytest

from rekindle.errors import NotFound
from rekindle.protocol.admin import Branch, BranchText, PrefixTree, ShowBranch, ShowTree
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness

SHARED = range(100, 132)
SALT, OTHER = b"one", b"other"


def harness() -> RuntimeHarness:
    return RuntimeHarness(FakeEngine(), idle_tokens=0)


def tree(runtime: RuntimeHarness, salt: bytes = b"", limit: int = 100) -> PrefixTree:
    found = runtime.administer(ShowTree(limit=limit), salt=salt)
    assert isinstance(found, PrefixTree)
    return found


def test_a_shared_prefix_is_one_branch() -> None:
    runtime = harness()
    for first in (200, 300):
        runtime.ask([*SHARED, *range(first, first + 40)])
    [shared] = [each for each in tree(runtime).branches if each.parent is None]
    assert shared.conversations == 2
    assert shared.tokens == len(SHARED)
    own = [each for each in tree(runtime).branches if each.parent == 0]
    assert [each.conversations for each in own] == [1, 1]
    assert all(each.start == len(SHARED) for each in own)
    runtime.close()


def test_branches_add_up_to_the_stored_state() -> None:
    runtime = harness()
    for first in (200, 300, 400):
        runtime.ask([*SHARED, *range(first, first + 50)])
    branches = tree(runtime).branches
    assert sum(each.size_bytes for each in branches) == runtime.store.size_bytes(None)
    runtime.close()


def test_a_limited_tree_shows_the_most_used_branches() -> None:
    runtime = harness()
    runtime.ask(range(500, 560))
    for first in (200, 300):
        runtime.ask([*SHARED, *range(first, first + 40)])
    found = tree(runtime, limit=1)
    assert [each.conversations for each in found.branches] == [2]
    assert not found.is_complete
    runtime.close()


def branch_of(runtime: RuntimeHarness, salt: bytes) -> Branch:
    runtime.ask(range(100, 160), salt=salt)
    [branch] = tree(runtime, salt).branches
    return branch


def test_the_text_of_a_branch_is_shown_to_its_tenant_alone() -> None:
    runtime = harness()
    branch = branch_of(runtime, SALT)
    shown = runtime.administer(ShowBranch(branch.key), salt=SALT)
    assert isinstance(shown, BranchText)
    assert shown.text
    with pytest.raises(NotFound):
        runtime.administer(ShowBranch(branch.key), salt=OTHER)
    assert tree(runtime, OTHER).branches == []
    runtime.close()


@pytest.mark.parametrize("key", ["", "00" * 32, "xyz", "../" * 20, "AB" * 32])
def test_an_unknown_key_is_not_found(key: str) -> None:
    runtime = harness()
    with pytest.raises(NotFound):
        runtime.administer(ShowBranch(key), salt=SALT)
    runtime.close()
