"""Only an admin learns about tenants and erases them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.http.key_file import key_digest, key_line
from rekindle.protocol.admin import AdminOp, AdminResult, Removed, RemoveTenant
from tests.api.scripted import Front, ScriptedRuntime, error


def answer(op: AdminOp) -> AdminResult:
    assert isinstance(op, RemoveTenant)
    return Removed(3, 700)


@pytest.fixture
def front(tmp_path: Path) -> Front:
    path = tmp_path / "keys"
    second = (f"tenant=blake3:{key_digest('bobs').hex()}",)
    lines = [
        key_line("bob", "bobs", admin=False, options=("group=team",)),
        key_line("bob", "bobs-new", admin=False, options=second),
        key_line("anna", "annas", admin=False),
        key_line("root", "roots", admin=True),
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o600)
    runtimes = (ScriptedRuntime(name=name, answers=answer) for name in ("m0", "m1"))
    return Front(*runtimes, api_keys_file=path, model=("m0", "m1"))


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def test_an_admin_lists_tenants_by_name_without_anything_of_their_keys(front: Front) -> None:
    answer = front.get("/v1/tenants", headers=key("roots"))
    listed = {each["name"]: each for each in answer.json()["tenants"]}
    assert list(listed) == ["bob", "anna", "root"]
    assert (listed["bob"]["keys"], listed["bob"]["groups"]) == (2, ["team"])
    assert "blake3" not in answer.text
    assert key_digest("bobs").hex() not in answer.text


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_nobody_else_learns_which_names_exist(front: Front, method: str) -> None:
    """The answer is the same for a name that exists and for one that does not."""
    paths = ["/v1/tenants"] if method == "GET" else ["/v1/tenants/bob", "/v1/tenants/nobody"]
    answers = [front.request(method, path, headers=key("annas")) for path in paths]
    assert {each.status_code for each in answers} == {403}
    assert len({each.text for each in answers}) == 1
    assert not any(runtime.admin_requests for runtime in front.runtimes)


@pytest.mark.parametrize("name", ["bob", f"blake3:{key_digest('bobs').hex()}"])
def test_a_tenant_is_removed_from_every_model_by_its_name_or_its_digest(
    front: Front, name: str
) -> None:
    answer = front.request("DELETE", f"/v1/tenants/{name}", headers=key("roots"))
    assert answer.json() == {"status": "ok", "removed": 6, "freed_bytes": 1400}
    for runtime in front.runtimes:
        [received] = runtime.admin_requests
        assert received.op == RemoveTenant(key_digest("bobs"))


def test_an_unknown_name_is_not_found(front: Front) -> None:
    answer = front.request("DELETE", "/v1/tenants/nobody", headers=key("roots"))
    assert answer.status_code == 404
    assert "nobody" in error(answer)["message"]
