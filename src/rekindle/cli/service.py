"""Implements `rekindle service`: runs the server as a service of systemd.

A service of the user needs no root, and stops when its last session ends unless lingering is on. A
service of the system runs as a user of its own that can write to its own folders only.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from rekindle.errors import RekindleError

NAME = "rekindle.service"
SYSTEM_UNITS = Path("/etc/systemd/system")
SYSTEM_CONFIG = Path("/etc/rekindle/rekindle.yaml")
SECRETS = {"--api-key", "--admin-key"}  # flags whose values are keys
STOP_S = 150  # more than a model needs to write its state to disk


@dataclass(frozen=True, slots=True)
class Service:
    """A unit that starts `rekindle serve` with the flags that were given."""

    program: Path  # the installed command
    flags: tuple[str, ...] = ()
    is_system: bool = False

    def unit(self) -> str:
        """The text of the unit file."""
        sections = [
            "[Unit]",
            "Description=Rekindle inference server",
            *_after(self.is_system),
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={_quoted([str(self.program), 'serve', *self.flags])}",
            "ExecReload=/bin/kill -HUP $MAINPID",
            "Restart=on-failure",
            "RestartSec=5",
            f"TimeoutStopSec={STOP_S}",
            "KillMode=mixed",
            "LimitNOFILE=65536",
            "LimitMEMLOCK=infinity",
            *(_confined() if self.is_system else ()),
            "",
            "[Install]",
            f"WantedBy={'multi-user.target' if self.is_system else 'default.target'}",
        ]
        return "\n".join(sections) + "\n"

    @property
    def path(self) -> Path:
        if self.is_system:
            return SYSTEM_UNITS / NAME
        base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
        folder = base if base.is_absolute() else Path("~/.config").expanduser()
        return folder / "systemd" / "user" / NAME

    @property
    def start_command(self) -> str:
        return f"systemctl{'' if self.is_system else ' --user'} enable --now rekindle"


def _after(is_system: bool) -> list[str]:
    """The network, which a download of a model needs. A user's manager does not know it."""
    return ["Wants=network-online.target", "After=network-online.target"] if is_system else []


def _confined() -> list[str]:
    """Run as a user that exists only while the service does, with folders of its own."""
    return [
        "DynamicUser=yes",
        "StateDirectory=rekindle",
        "CacheDirectory=rekindle",
        "ConfigurationDirectory=rekindle",
        "StateDirectoryMode=0700",
        "CacheDirectoryMode=0700",
        "WorkingDirectory=/var/lib/rekindle",
        "Environment=HOME=/var/lib/rekindle",
        f"Environment=REKINDLE_CONFIG={SYSTEM_CONFIG}",
        "Environment=REKINDLE_MODELS_DIR=/var/lib/rekindle/models",
        "Environment=REKINDLE_CACHE_DIR=/var/cache/rekindle/kv",
        "UMask=0077",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        "PrivateTmp=yes",
        "ProtectKernelTunables=yes",
        "ProtectKernelModules=yes",
        "ProtectControlGroups=yes",
        "RestrictSUIDSGID=yes",
        "LockPersonality=yes",
        "RestrictNamespaces=yes",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        "CapabilityBoundingSet=",
        "SystemCallArchitectures=native",
    ]


def _quoted(words: list[str]) -> str:
    """Quote a command for systemd, which expands % and $ itself."""
    escaped = [word.replace("%", "%%").replace("$", "$$") for word in words]
    return " ".join(_quoted_word(word) for word in escaped)


def _quoted_word(word: str) -> str:
    if any(not character.isprintable() for character in word):
        raise RekindleError(f"a flag of a service cannot have line ends or tabs: {word!r}")
    if word and not set(word) & set(" \"'\\;"):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def installed_program() -> Path:
    """The `rekindle` command of this environment."""
    beside = Path(sys.executable).with_name("rekindle")
    found = beside if beside.is_file() else shutil.which("rekindle")
    if found is None:
        raise RekindleError(
            "the rekindle command is not installed next to this Python: install the package with "
            "pip or `make install`, and run this command again"
        )
    return Path(found).absolute()


def install(service: Service, console: Console) -> Path:
    """Check the unit, write it, and say how to start it."""
    names = {flag.partition("=")[0] for flag in service.flags}
    if secret := min(SECRETS & names, default=None):
        raise RekindleError(
            f"every user can read a unit file, so {secret} does not belong there: put it into "
            "rekindle.yaml, or give --api-keys-file"
        )
    text, path = service.unit(), service.path
    if service.is_system:
        _require_config()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        remedy = "run it with sudo" if service.is_system else "check the folder's permissions"
        raise RekindleError(f"cannot write {path} ({error.strerror}): {remedy}") from None
    if problem := verify(path, is_system=service.is_system):
        raise RekindleError(f"systemd refuses {path}: {problem}")
    scope = "" if service.is_system else " --user"
    lines = [
        f"Written: {path}",
        f"Start it:  systemctl{scope} daemon-reload && {service.start_command}",
        f"See its log:  journalctl{scope} -u rekindle -f",
    ]
    if not service.is_system:
        lines.append("Let it run without a session:  loginctl enable-linger")
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=True)
    return path


def _require_config() -> None:
    if not SYSTEM_CONFIG.is_file():
        raise RekindleError(
            f"the service reads its settings from {SYSTEM_CONFIG}, which does not exist. Create it "
            "(an empty file serves the default model) and run this command again."
        )


def verify(path: Path, *, is_system: bool) -> str | None:
    """What systemd says against a unit file, or None. Without systemd nothing is checked."""
    program = shutil.which("systemd-analyze")
    if program is None:
        return None
    command = [program, *([] if is_system else ["--user"]), "verify", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    said = [line for line in ran.stderr.splitlines() if path.name in line]
    return "; ".join(said) if ran.returncode and said else None


def remove(service: Service, console: Console) -> None:
    """Delete the unit file. A running service continues until it is stopped."""
    path = service.path
    if not path.exists():
        raise RekindleError(f"there is no {path}: the service is not installed")
    path.unlink()
    stop = service.start_command.replace("enable", "disable")
    console.print(
        escape(f"Removed: {path}. A running server is stopped by: {stop}"),
        highlight=False,
        soft_wrap=True,
    )


def shown(service: Service) -> str:
    """The unit and the path it would have, without writing it."""
    return f"# {shlex.quote(str(service.path))}\n{service.unit()}"
