"""GET /v1/cache/tree."""

from __future__ import annotations

from rekindle.protocol.admin import (
    AdminOp,
    AdminResult,
    Branch,
    BranchText,
    PrefixTree,
    ShowBranch,
    ShowTree,
)
from tests.api.scripted import Front, ScriptedRuntime

BRANCH = Branch("ab" * 32, None, 0, 64, 1000, "ram", 2)


def answers(op: AdminOp) -> AdminResult:
    if isinstance(op, ShowTree):
        return PrefixTree([BRANCH], is_complete=op.limit > 1)
    assert isinstance(op, ShowBranch)
    return BranchText(f"text of {op.key}")


def test_each_model_has_a_tree() -> None:
    front = Front(*(ScriptedRuntime(name=name, answers=answers) for name in ("a", "b")))
    trees = front.get("/v1/cache/tree").json()["trees"]
    assert [tree["model"] for tree in trees] == ["a", "b"]
    assert trees[0]["is_complete"]
    [branch] = trees[0]["branches"]
    assert (branch["tokens"], branch["tier"], branch["conversations"]) == (64, "ram", 2)


def test_the_number_of_branches_can_be_limited() -> None:
    front = Front(ScriptedRuntime(answers=answers))
    assert not front.get("/v1/cache/tree?limit=1").json()["trees"][0]["is_complete"]
    assert front.get("/v1/cache/tree?limit=0").status_code == 400


def test_text_is_asked_for_as_a_tenant_even_with_an_admin_key() -> None:
    runtime = ScriptedRuntime(answers=answers)
    front = Front(runtime, api_key=["alpha"], admin_key=["root"])
    headers = {"authorization": "Bearer root"}
    shown = front.get(f"/v1/cache/tree/{BRANCH.key}", headers=headers).json()
    assert shown == {"text": f"text of {BRANCH.key}", "is_complete": True}
    assert not runtime.admin_request.admin
