"""A key's line says to whom it belongs and what it may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.errors import ConfigError
from rekindle.http.auth import Keys
from rekindle.http.key_file import (
    KeyFile,
    key_digest,
    key_line,
    options_of_tenant,
    remove_tenant,
)
from rekindle.http.limits import NO_LIMITS, KeyLimits


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o600)
    return path


def line(name: str, key: str, *options: str, admin: bool = False) -> str:
    return key_line(name, key, admin=admin, options=options)


def digest(key: str) -> str:
    return f"blake3:{key_digest(key).hex()}"


def keys(path: Path) -> Keys:
    return Keys(file=KeyFile(path))


def refusal(path: Path, *lines: str) -> str:
    with pytest.raises(ConfigError) as refused:
        KeyFile(write(path, *lines))
    return str(refused.value)


def test_the_lines_of_earlier_versions_keep_their_tenants(path: Path) -> None:
    """Also where two keys have one name, which has no meaning in them."""
    write(path, f"bob {digest('one')}", f"bob {digest('two')}", f"root {digest('three')} admin")
    callers = [keys(path).caller(f"Bearer {key}") for key in ("one", "two", "three")]
    assert [each.salt for each in callers] == [key_digest(key) for key in ("one", "two", "three")]
    assert [each.admin for each in callers] == [False, False, True]
    assert all(each.limits == NO_LIMITS and not each.groups for each in callers)


def test_all_options_of_a_key_are_read(path: Path) -> None:
    options = (
        "group=team,staff",
        "requests_per_minute=60",
        "tokens_per_minute=100000",
        "concurrent_turns=4",
        "cache_bytes=2GB",
        "models=small,large",
    )
    caller = keys(write(path, line("bob", "bobs", *options, admin=True))).caller("Bearer bobs")
    assert (caller.name, caller.admin, caller.groups) == ("bob", True, ("team", "staff"))
    assert caller.limits == KeyLimits(60, 100_000, 4, 2 * 10**9, ("small", "large"))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("requests_per_minute=0", "a whole number from 1"),
        ("requests_per_minute=many", "a whole number from 1"),
        ("cache_bytes=0", "a size such as 2GB"),
        ("tenant=bob", "the digest of another key"),
        ("group=a,,b", "names of groups"),
        ("rate=5", "the options are tenant, group, requests_per_minute"),
    ],
)
def test_a_wrong_option_is_refused_with_what_it_takes(
    path: Path, option: str, expected: str
) -> None:
    message = refusal(path, line("anna", "annas"), f"bob {digest('bobs')} {option}")
    assert "line 2" in message
    assert expected in message


def test_a_line_that_is_refused_is_not_quoted(path: Path) -> None:
    assert "secret" not in refusal(path, "bob secret-key-in-the-wrong-place")
    assert "secret" not in refusal(path, f"bob {digest('bobs')} secret-key")


def test_two_keys_belong_to_one_tenant_if_one_names_the_other(path: Path) -> None:
    write(path, line("bob", "old"), line("bob", "new", f"tenant={digest('old')}"))
    assert keys(path).caller("Bearer new").salt == keys(path).caller("Bearer old").salt


def test_a_name_of_several_tenants_gets_no_further_key(path: Path) -> None:
    write(path, line("bob", "one"), line("bob", "two"))
    with pytest.raises(ConfigError, match="several tenants"):
        options_of_tenant(path, "bob", [])
    assert options_of_tenant(path, "anna", []) is None


def test_a_tenant_is_removed_with_all_its_keys_and_nothing_else(path: Path) -> None:
    others = ("# staff", line("anna", "annas"))
    bobs = (line("bob", "old"), line("bobby", "new", f"tenant={digest('old')}"))
    write(path, others[0], bobs[0], others[1], bobs[1])
    assert remove_tenant(path, "bob") == [digest("old")]
    assert path.read_text().splitlines() == list(others)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="no line"):
        remove_tenant(path, "bob")


def test_a_key_of_the_settings_has_a_name_that_does_not_show_it() -> None:
    caller = Keys(["sk-very-secret"]).caller("Bearer sk-very-secret")
    assert caller.name.startswith("key-")
    assert "secret" not in caller.name
