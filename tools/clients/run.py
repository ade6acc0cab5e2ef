"""`make clients`: real programs against a server of their own, and what of their prompts is reused.

Each takes a first turn with a call of a tool, a second turn, and a turn in a second session in the
same folder. Exits with 1 if one of them met an error of the protocol, or reused too little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.server import running
from tools.clients.model import write_model
from tools.clients.recorder import Exchange, recording

INSTALLED = Path(sys.argv[1] if len(sys.argv) > 1 else "build/clients") / "node_modules"
CLAUDE = INSTALLED / "@anthropic-ai" / "claude-code-linux-x64" / "claude"
TURN_S = 900
SECOND_TURN, SECOND_SESSION = 0.95, 0.75  # of the prompt that has to be reused, at least


@dataclass(frozen=True)
class Turn:
    """What one answer cost."""

    prompt_tokens: int
    reused_tokens: int

    @property
    def share(self) -> float:
        return self.reused_tokens / self.prompt_tokens


def turn_of(exchange: Exchange) -> Turn | None:
    """None: it is no answer of a model."""
    lines = [line for line in exchange.answer.splitlines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    ends = [event["usage"] for event in events if event["type"] == "message_delta"]
    if not ends:
        return None
    usage = ends[-1]
    reused = usage["cache_read_input_tokens"]
    created = usage["input_tokens"] + usage["cache_creation_input_tokens"]
    return Turn(reused + created, reused)


class ClaudeCode:
    """Headless, in a home and a project of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self._project = folder / "project"
        self._project.mkdir()
        (self._project / "README.md").write_text("A project.\n")
        home = folder / "home"
        home.mkdir()
        self._environment = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(home),  # nothing else of this machine's: it may hold keys
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "API_TIMEOUT_MS": str(TURN_S * 1000),
        }

    def say(self, text: str, *options: str) -> dict[str, Any]:
        command = [str(CLAUDE.absolute()), "--model", "tiny", *options, "-p", text]
        done = subprocess.run(
            [*command, "--output-format", "json"],
            cwd=self._project,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TURN_S,
        )
        if done.returncode:
            raise SystemExit(f"Claude Code failed: {done.stdout}{done.stderr}")
        return dict(json.loads(done.stdout))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            running(write_model(folder / "tiny.gguf"), folder) as server,
            recording(server.url, forced="Read") as (url, recorder),
        ):
            client, seen = ClaudeCode(folder, url), list[list[Turn]]()

            def turns_of(text: str, *options: str) -> dict[str, Any]:
                before = len(recorder.exchanges)
                answer = client.say(text, *options)
                new = map(turn_of, recorder.exchanges[before:])
                seen.append([turn for turn in new if turn is not None])
                return answer

            first = turns_of("Say hello.")
            turns_of("And again.", "--resume", first["session_id"])
            turns_of("Say goodbye.")
    report(seen, recorder.failures())


def report(seen: list[list[Turn]], failures: list[Exchange]) -> None:
    for name, turns in zip(("first turn", "second turn", "second session"), seen, strict=True):
        for turn in turns:
            counts = f"{turn.reused_tokens} of {turn.prompt_tokens} tokens reused"
            print(f"Claude Code, {name}: {counts} ({turn.share:.1%})")
    for failure in failures:
        print(f"{failure.method} {failure.path}: {failure.status} {failure.answer[:500]}")
    enough = seen[1][0].share >= SECOND_TURN and seen[2][0].share >= SECOND_SESSION
    if failures or not enough:
        raise SystemExit("protocol errors, or too little was reused")


if __name__ == "__main__":
    main()
