"""A stopping server says what it waits for, and SIGHUP changes what a running server can change."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rekindle.config import Config
from rekindle.errors import ConfigError, Unauthorized
from rekindle.front.app import api_keys
from rekindle.front.operating import CHANGEABLE, DrainReport, Reloader
from rekindle.http.auth import Keys
from rekindle.http.key_file import append_key_line, key_line
from rekindle.http.middleware import Drain, RequestMiddleware
from tests.api.scripted import Front


def test_without_a_terminal_the_wait_is_logged_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    report = DrainReport(Console(file=io.StringIO()), lambda: 5)
    for tenths in range(300, -1, -1):
        report(3, tenths / 10)
    report(0, 0.0)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "Stopping: waiting for 3 requests with 5 turns, at most 30 s."
    assert lines[-1] == "Stopping: 3 requests with 5 turns end with an error."
    assert len(lines) == 4


def test_a_terminal_counts_down_and_names_the_way_out() -> None:
    output = io.StringIO()
    report = DrainReport(Console(file=output, force_terminal=True, width=120), lambda: 1)
    report(1, 2.0)
    report.end()
    assert "waiting for 1 request with 1 turn, at most 2 s" in output.getvalue()
    assert "Press Ctrl-C again to end them now" in output.getvalue()


class Reloading:
    """A server's parts that a reload changes, and the settings that it reads next."""

    def __init__(self, **settings: Any) -> None:
        self.config = self.next = Config(**settings)
        self.keys: Keys = api_keys(self.config)
        self.app: RequestMiddleware = Front(**settings).app()
        self.drain = Drain(self.config.drain_timeout)
        self.reloader = Reloader(
            self.config, self._load, keys=self.keys, app=self.app, drain=self.drain
        )

    def _load(self) -> Config:
        return self.next

    def reload(self, **settings: Any) -> None:
        self.next = Config(**settings)
        self.reloader.reload()

    def opens(self, key: str) -> bool:
        try:
            self.keys.caller(f"Bearer {key}")
        except Unauthorized:
            return False
        return True


def test_a_reload_replaces_the_keys_of_settings_and_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    append_key_line(path, "# keys")
    server = Reloading(api_key=("one",), api_keys_file=path)
    append_key_line(path, key_line("bob", "bobs", admin=False))
    server.reload(api_key=("two",), api_keys_file=path)
    assert [server.opens(key) for key in ("one", "two", "bobs")] == [False, True, True]


def test_a_reload_says_what_it_changed_and_what_needs_a_restart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    root, before = logging.getLogger(), logging.getLogger().level
    server = Reloading(drain_timeout=30.0)
    try:
        server.reload(drain_timeout=5.0, log_level="warning", port=9000, cors_origin=("*",))
        assert root.level == logging.WARNING
    finally:
        root.setLevel(before)
    assert server.drain.timeout_s == 5.0
    text = " ".join(record.getMessage() for record in caplog.records)
    assert "next start only: port" in text


def test_an_invalid_file_changes_nothing_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    server = Reloading(api_key=("one",))

    def fail() -> Config:
        raise ConfigError("unknown setting `prot`")

    Reloader(server.config, fail, keys=server.keys, app=server.app, drain=server.drain).reload()
    assert server.opens("one")
    assert "unknown setting `prot`" in caplog.text


def test_every_changeable_setting_exists() -> None:
    assert all(hasattr(Config(), name) for name in CHANGEABLE)
