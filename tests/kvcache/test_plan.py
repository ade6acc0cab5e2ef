from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rekindle.kvcache.block import Block
from rekindle.kvcache.plan import Live, Plan, resolve, resolve_exact
from rekindle.kvcache.tree import Match
from rekindle.tokens import Tokens

from .naive import ROOT, Ids, PathTree, block_sizes, common, longest, runs

NO_PICTURES = Tokens()
NOTHING_STORED = Match((), 0, diverged=False)
many_runs = st.lists(runs, max_size=6)


def tree_of(stored: list[Ids], block_tokens: int, exact: set[Ids] | None = None) -> PathTree:
    paths = PathTree(block_tokens)
    for run in stored:
        paths.add(run, exact=lambda path: path in (exact or ()))
    return paths


def check_blocks(blocks: tuple[Block, ...], start: int, stop: int, request: Ids) -> None:
    """A chain of blocks from `start` to `stop`."""
    assert blocks[0].start == start
    assert all(one.stop == other.start for one, other in pairwise(blocks))
    assert blocks[-1].start < stop <= blocks[-1].stop
    held = [token for block in blocks for token in block.tokens]
    assert held[: stop - start] == list(request[start:stop])


@given(many_runs, many_runs, block_sizes, runs)
def test_the_longest_prefix_is_reused_wherever_it_is(
    stored: list[Ids], held: list[Ids], block_tokens: int, request: Ids
) -> None:
    paths = tree_of(stored, block_tokens)
    live = [Live(tokens, Tokens.of(tokens)) for tokens in held]
    match = paths.tree.match(ROOT, Tokens.of(request))
    plan = resolve(Tokens.of(request), match, live, block_tokens=block_tokens)
    in_store, on_device = longest(paths.blocks, request), longest(held, request)
    assert plan.reused_tokens == plan.matched_tokens == max(in_store, on_device) <= len(request)
    assert (plan.share is None) == (plan.shared_tokens == 0)
    if plan.share is not None:
        assert plan.shared_tokens <= common(plan.share, request) == on_device
    if in_store <= on_device:
        assert plan.blocks == ()
        assert plan.shared_tokens == plan.reused_tokens
    else:
        assert plan.shared_tokens == on_device - on_device % block_tokens
        check_blocks(plan.blocks, plan.shared_tokens, plan.reused_tokens, request)


@given(many_runs, many_runs, block_sizes, runs)
def test_planning_changes_nothing(
    stored: list[Ids], held: list[Ids], block_tokens: int, request: Ids
) -> None:
    paths = tree_of(stored, block_tokens)
    live = [Live(number, Tokens.of(tokens)) for number, tokens in enumerate(held)]
    match = paths.tree.match(ROOT, Tokens.of(request))
    first = resolve(Tokens.of(request), match, live, block_tokens=block_tokens)
    assert first == resolve(Tokens.of(request), match, iter(live), block_tokens=block_tokens)
    assert match == paths.tree.match(ROOT, Tokens.of(request))
    assert live == [Live(number, Tokens.of(tokens)) for number, tokens in enumerate(held)]


@given(many_runs, block_sizes, runs)
def test_a_live_sequence_diverges_if_both_continue(
    held: list[Ids], block_tokens: int, request: Ids
) -> None:
    live = [Live(tokens, Tokens.of(tokens)) for tokens in held]
    plan = resolve(Tokens.of(request), NOTHING_STORED, live, block_tokens=block_tokens)
    ended = plan.share is None or plan.shared_tokens in (len(plan.share), len(request))
    assert plan.diverged != ended


@given(many_runs, block_sizes, runs)
def test_a_divergence_in_the_store_is_reported(
    stored: list[Ids], block_tokens: int, request: Ids
) -> None:
    match = tree_of(stored, block_tokens).tree.match(ROOT, Tokens.of(request))
    plan: Plan[object] = resolve(Tokens.of(request), match, [], block_tokens=block_tokens)
    if plan.reused_tokens:
        assert plan.diverged == match.diverged
    assert resolve_exact(NO_PICTURES, match, step_tokens=block_tokens).diverged == match.diverged


def test_a_live_sequence_is_preferred_if_the_store_has_no_longer_prefix() -> None:
    match = tree_of([(1, 2, 3, 4)], 2).tree.match(ROOT, Tokens.of([1, 2, 3, 4]))
    plan = resolve(
        Tokens.of([1, 2, 3, 4]), match, [Live("here", Tokens.of([1, 2, 3, 4]))], block_tokens=2
    )
    assert plan == Plan("here", 4, (), 4, 4, diverged=False)


def test_a_live_part_of_one_block_is_not_worth_sharing_when_the_block_is_restored() -> None:
    match = tree_of([(1, 2, 3, 4)], 4).tree.match(ROOT, Tokens.of([1, 2, 3, 4]))
    plan = resolve(
        Tokens.of([1, 2, 3, 4]), match, [Live("here", Tokens.of([1, 2, 3]))], block_tokens=4
    )
    assert (plan.share, plan.shared_tokens) == (None, 0)
    assert plan.blocks == match.blocks


def test_nothing_is_reused_for_an_empty_prompt() -> None:
    live = [Live("here", Tokens.of([1, 2]))]
    match = tree_of([(1, 2, 3)], 2).tree.match(ROOT, Tokens())
    assert resolve(Tokens(), match, live, block_tokens=2) == Plan.nothing()
    assert resolve_exact(NO_PICTURES, match, step_tokens=2) == Plan.nothing()


def test_nothing_is_reused_from_an_empty_cache() -> None:
    assert resolve(Tokens.of([1, 2]), NOTHING_STORED, [], block_tokens=2) == Plan.nothing()
    assert resolve_exact(NO_PICTURES, NOTHING_STORED, step_tokens=2) == Plan.nothing()


@given(many_runs, st.integers(1, 3), st.integers(1, 3), runs, st.data())
def test_an_exact_plan_is_the_longest_run_of_whole_canonical_steps(
    stored: list[Ids],
    block_tokens: int,
    blocks_a_step: int,
    request: Ids,
    data: st.DataObject,
) -> None:
    step_tokens = block_tokens * blocks_a_step
    ends = {run[:stop] for run in stored for stop in range(1, len(run) + 1)}
    decoded = data.draw(st.sets(st.sampled_from(sorted(ends)))) if ends else set()
    paths = tree_of(stored, block_tokens, ends - decoded)
    match = paths.tree.match(ROOT, Tokens.of(request))
    plan: Plan[object] = resolve_exact(NO_PICTURES, match, step_tokens=step_tokens)
    usable = [
        stop
        for stop in range(0, len(request) + 1, step_tokens)
        if all(
            is_exact(paths, request[:end]) for end in range(block_tokens, stop + 1, block_tokens)
        )
    ]
    assert plan.reused_tokens == max(usable)
    assert plan.matched_tokens == match.tokens
    assert (plan.share, plan.shared_tokens) == (None, 0)
    assert all(block.exact and len(block.tokens) == block_tokens for block in plan.blocks)
    if plan.blocks:
        check_blocks(plan.blocks, 0, plan.reused_tokens, request)
        assert plan.blocks[-1].stop == plan.reused_tokens
    else:
        assert plan.reused_tokens == 0


def test_an_exact_block_of_which_only_a_part_matches_is_not_reused() -> None:
    paths = tree_of([(1, 2, 3, 4)], 2, {(1, 2), (1, 2, 3, 4)})
    for request in ((1, 2, 3), (1, 2, 3, 9), (1, 2, 9, 9)):
        match = paths.tree.match(ROOT, Tokens.of(request))
        assert resolve_exact(NO_PICTURES, match, step_tokens=2).reused_tokens == 2
        assert resolve_exact(NO_PICTURES, match, step_tokens=4).reused_tokens == 0


def is_exact(paths: PathTree, path: Ids) -> bool:
    return path in paths.blocks and paths.blocks[path].exact
