from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.config import load_config
from rekindle.errors import Unauthorized
from rekindle.front.app import api_keys
from rekindle.http.key_file import key_line


def test_every_kind_of_key_in_the_settings_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(key_line("bob", "bobs", admin=False))
    path.chmod(0o600)
    keys = api_keys(load_config({"api_key": "a", "admin_key": "b", "api_keys_file": path}, {}))
    assert [keys.caller(None, key).admin for key in ("a", "b", "bobs")] == [False, True, False]
    with pytest.raises(Unauthorized):
        keys.caller(None, "c")
    assert api_keys(load_config({}, {})).is_open
