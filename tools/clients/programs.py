"""Configures third-party programs to use a server, and runs their turns.

Each program runs headless with its own home and project folder. It does not get the environment of
this process, which may contain keys.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from tools.clients.terminal import type_into

TURN_S = 900
KEY = "none"
MODEL = "tiny"


class ProgramFailed(Exception):
    """A program failed or did not end."""


class Program(ABC):
    name: ClassVar[str]
    package: ClassVar[str]
    tool: ClassVar[str | None] = None  # read-only tool that its first reply is forced to call
    second_turn: ClassVar[float] = 0.95  # minimum share of the prompt that must be reused
    second_session: ClassVar[float] = 0.0

    def __init__(
        self, installed: Path, folder: Path, url: str, answers: Callable[[], int] = lambda: 0
    ) -> None:
        """`answers` returns the number of answers that the program has received."""
        self.installed = installed.absolute()
        self.url = url
        self.answers = answers
        self.home = folder / "home"
        self.project = folder / "project"
        for each in (self.home, self.project):
            each.mkdir(parents=True)
        (self.project / "README.md").write_text("A project.\n")
        self.prepare()

    def prepare(self) -> None:  # noqa: B027  # most programs need only their environment
        """Write the configuration files of the program."""

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables of the program."""
        return {}

    @abstractmethod
    def command(self, text: str, *, resumes: bool) -> list[str]:
        """The command that sends a text in a new session, or in the previous one if `resumes`."""

    def node(self, *path: str) -> str:
        return str(self.installed.joinpath("node_modules", *path))

    def say(self, text: str, *, resumes: bool = False) -> str:
        return self.run(self.command(text, resumes=resumes))

    @property
    def environment(self) -> dict[str, str]:
        own = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(self.home)}
        return {**own, **self.settings}

    def run(self, command: list[str]) -> str:
        try:
            done = subprocess.run(
                command,
                cwd=self.project,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TURN_S,
            )
        except subprocess.TimeoutExpired:
            raise ProgramFailed(f"{self.name} did not end within {TURN_S} s") from None
        if done.returncode:
            raise ProgramFailed(f"{self.name} failed: {done.stdout}{done.stderr}")
        return done.stdout

    def close(self) -> None:
        """End processes that the program left running, such as Cline's daemon, by their HOME."""
        home = f"HOME={self.home}".encode()
        for each in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # the process has ended or belongs to another user
                if home in each.read_bytes().split(b"\0"):
                    os.kill(int(each.parent.name), signal.SIGTERM)

    def write(self, path: Path, content: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


class ClaudeCode(Program):
    name, package = "Claude Code", "@anthropic-ai/claude-code"
    tool, second_session = "Read", 0.75

    @property
    def settings(self) -> dict[str, str]:
        return {
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "API_TIMEOUT_MS": str(TURN_S * 1000),
        }

    def command(self, text: str, *, resumes: bool) -> list[str]:
        program = self.node("@anthropic-ai", "claude-code-linux-x64", "claude")
        return [program, "--model", MODEL, *(["--continue"] if resumes else []), "-p", text]


class OpenCode(Program):
    name, package = "opencode", "opencode-ai"
    tool, second_session = "read", 0.95

    def prepare(self) -> None:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{self.url}/v1", "apiKey": KEY},
            "models": {MODEL: {"name": MODEL}},
        }
        self.write(self.project / "opencode.json", {"provider": {"rekindle": provider}})

    @property
    def settings(self) -> dict[str, str]:
        return {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}

    def command(self, text: str, *, resumes: bool) -> list[str]:
        program = self.node("opencode-linux-x64", "bin", "opencode")
        model = ["--model", f"rekindle/{MODEL}"]
        return [program, "run", *model, *(["--continue"] if resumes else []), text]


class Copilot(Program):
    package = "@github/copilot"
    tool, second_session = "view", 0.4
    wire: ClassVar[dict[str, str]]
    path = "/v1"

    @property
    def settings(self) -> dict[str, str]:
        return {
            "COPILOT_PROVIDER_BASE_URL": self.url + self.path,
            "COPILOT_PROVIDER_API_KEY": KEY,
            "COPILOT_MODEL": MODEL,
            "COPILOT_OFFLINE": "true",
            **self.wire,
        }

    def command(self, text: str, *, resumes: bool) -> list[str]:
        program = self.node("@github", "copilot-linux-x64", "copilot")
        return [program, "--allow-all-tools", *(["--continue"] if resumes else []), "-p", text]


class CopilotChat(Copilot):
    name, wire = "Copilot CLI (chat completions)", {"COPILOT_PROVIDER_WIRE_API": "completions"}


class CopilotResponses(Copilot):
    name, wire = "Copilot CLI (responses)", {"COPILOT_PROVIDER_WIRE_API": "responses"}


class CopilotMessages(Copilot):
    name, wire, path = "Copilot CLI (messages)", {"COPILOT_PROVIDER_TYPE": "anthropic"}, ""


class QwenCode(Program):
    name, package = "Qwen Code", "@qwen-code/qwen-code"
    tool, second_session = "read_file", 0.95

    @property
    def settings(self) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": KEY,
            "OPENAI_MODEL": MODEL,
        }

    def command(self, text: str, *, resumes: bool) -> list[str]:
        program = [self.node(".bin", "qwen"), "--auth-type", "openai", "--model", MODEL]
        return [*program, *(["--continue"] if resumes else []), "-p", text]


class Cline(Program):
    name, package = "Cline", "cline"
    tool, second_session = "read_files", 0.95

    def prepare(self) -> None:
        asked = ["--apikey", KEY, "--modelid", MODEL, "--baseurl", f"{self.url}/v1"]
        self.run([self.node(".bin", "cline"), "auth", "openai-compatible", *asked])

    def command(self, text: str, *, resumes: bool) -> list[str]:
        program = [self.node(".bin", "cline"), "-P", "openai-compatible", "-m", MODEL]
        if not resumes:
            return [*program, text]
        sessions = json.loads(self.run([program[0], "history", "--json"]))
        return [*program, "--id", sessions[0]["sessionId"]]

    def say(self, text: str, *, resumes: bool = False) -> str:
        """It goes on with a session in a terminal alone."""
        if not resumes:
            return super().say(text)
        before = self.answers()
        done = type_into(
            self.command(text, resumes=True),
            text,
            folder=self.project,
            environment=self.environment,
            asks=b"Ask anything",
            is_done=lambda: self.answers() > before,
            patience_s=TURN_S,
        )
        if not done:
            raise ProgramFailed(f"{self.name} was not answered in its terminal")
        return ""


class Continue(Program):
    name, package = "Continue", "@continuedev/cli"
    tool = "Read"

    def prepare(self) -> None:
        model = {
            "name": MODEL,
            "provider": "openai",
            "model": MODEL,
            "apiBase": f"{self.url}/v1",
            "apiKey": KEY,
            "roles": ["chat"],
            "capabilities": ["tool_use"],
        }
        config = {"name": "rekindle", "version": "1.0.0", "schema": "v1", "models": [model]}
        self.write(self.home / "config.yaml", config)  # JSON is YAML

    def command(self, text: str, *, resumes: bool) -> list[str]:
        program = [self.node(".bin", "cn"), "--config", str(self.home / "config.yaml")]
        return [*program, *(["--resume"] if resumes else []), "-p", text]


class Pi(Program):
    name, package = "pi", "@mariozechner/pi-coding-agent"
    tool = "read"

    def prepare(self) -> None:
        provider = {
            "baseUrl": f"{self.url}/v1",
            "api": "openai-completions",
            "apiKey": KEY,
            "models": [{"id": MODEL}],
        }
        models = {"providers": {"rekindle": provider}}
        self.write(self.home / ".pi" / "agent" / "models.json", models)

    def command(self, text: str, *, resumes: bool) -> list[str]:
        program = [self.node(".bin", "pi"), "--offline", "--provider", "rekindle"]
        return [*program, "--model", MODEL, *(["--continue"] if resumes else []), "-p", text]


class Aider(Program):
    name, package = "aider", "aider-chat"
    second_turn = 0.5  # it puts the history before the files

    @property
    def settings(self) -> dict[str, str]:
        return {"OPENAI_API_BASE": f"{self.url}/v1", "OPENAI_API_KEY": KEY}

    def command(self, text: str, *, resumes: bool) -> list[str]:
        quiet = ["--yes-always", "--no-check-update", "--analytics-disable", "--no-git"]
        quiet += ["--no-show-model-warnings", "--no-detect-urls"]
        program = [str(self.installed / "aider" / "bin" / "aider"), "--model", f"openai/{MODEL}"]
        resumed = ["--restore-chat-history"] if resumes else ["--no-restore-chat-history"]
        return [*program, *quiet, *resumed, "--message", text, "README.md"]


class Codex(Program):
    name, package = "Codex", "@openai/codex"
    tool, second_session = "get_goal", 0.95

    def prepare(self) -> None:
        config = f"""\
model = "{MODEL}"
model_provider = "rekindle"
[model_providers.rekindle]
name = "rekindle"
base_url = "{self.url}/v1"
wire_api = "responses"
"""
        self.write(self.home / ".codex" / "config.toml", config)

    def command(self, text: str, *, resumes: bool) -> list[str]:
        vendor = self.node("@openai", "codex-linux-x64", "vendor", "x86_64-unknown-linux-musl")
        program = [f"{vendor}/bin/codex", "exec", *(["resume", "--last"] if resumes else [])]
        return [*program, "--skip-git-repo-check", text]


PROGRAMS: tuple[type[Program], ...] = (
    ClaudeCode,
    OpenCode,
    CopilotChat,
    CopilotMessages,
    CopilotResponses,
    QwenCode,
    Cline,
    Continue,
    Pi,
    Aider,
    Codex,
)
