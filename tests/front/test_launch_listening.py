"""A server listens on a Unix socket, and serves HTTPS with the files that it is given."""

from __future__ import annotations

import socket
import stat
import subprocess
from pathlib import Path

import pytest

from rekindle.config import Config, load_config
from rekindle.errors import ConfigError
from rekindle.front.launch import bound_socket, check_settings


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    files = [
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run([*command, *files], check=True, capture_output=True)
    return cert, key


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as refused:
        check_settings(config)
    return str(refused.value)


def test_a_unix_socket_is_for_the_user_and_the_group_and_goes_with_the_server(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rekindle.sock"
    with bound_socket(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert not path.exists()


def test_a_socket_that_a_killed_server_left_is_replaced_and_that_of_a_running_one_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rekindle.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with bound_socket(path) as running:
        running.listen()
        with pytest.raises(ConfigError, match="another program uses it"), bound_socket(path):
            pass
        assert path.is_socket()


def test_another_kind_of_file_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="another kind of file"), bound_socket(path):
        pass
    assert path.read_text() == "mine"


def test_a_socket_and_a_port_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "replaces the port" in refusal(load_config({"uds": "/run/a.sock", "port": 9000}, {}))


def test_a_certificate_is_checked_before_the_start(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    check_settings(Config(tls_cert=cert, tls_key=key))
    assert "--tls-cert, too" in refusal(Config(tls_key=key))
    assert "No such file" in refusal(Config(tls_cert=tmp_path / "absent", tls_key=key))
    assert "belong together" in refusal(Config(tls_cert=key, tls_key=cert))
