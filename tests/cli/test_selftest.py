"""Runs the self-test on a tiny model, and on servers with wrong answers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rekindle.cli import selftest
from rekindle.cli.main import app
from rekindle.cli.selftest import ChatClient, CheckFailed, Report, SelfTest
from rekindle.config import Config
from rekindle.errors import ConfigError
from rekindle.protocol.frames import Ready
from tests.support.tiny import write_llama

KEY = "a-secret-key"
Json = dict[str, Any]


def run(config: Config, name: str, folder: Path) -> tuple[bool, Json, str]:
    """Run the self-test, and return whether all is well, the report and the output."""
    console = Console(file=io.StringIO(), width=200)
    ok = selftest.selftest(config, name, folder / "report.json", console)
    assert isinstance(console.file, io.StringIO)
    return ok, json.loads((folder / "report.json").read_text()), console.file.getvalue()


def test_a_sound_machine_passes_and_the_report_says_nothing_about_the_user(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "private-name.gguf", context=8192)
    config = Config(threads=1, api_key=(KEY,), projects={}, exact=True)
    ok, report, output = run(config, str(model), tmp_path)
    assert ok, output
    assert [check["name"] for check in report["checks"]] == [
        "library", "model", "streaming", "warm equals cold", "parallel requests", "speed", "model",
        "restart",
    ]  # fmt: skip
    assert "All checks passed. The report is in" in output
    assert report["model"]["architecture"] == "llama"
    assert report["model"]["exact_step_tokens"] == 64
    assert report["library"]["source"].startswith("xllamacpp==")
    assert report["speed"]["decode_tokens_per_s"] > 0
    text = json.dumps(report)
    for private in (KEY, str(tmp_path), "private-name", str(Path.home()), "harbour"):
        assert private not in text


def test_a_model_that_cannot_be_loaded_is_a_failed_check_without_its_path(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    ok, report, output = run(Config(threads=1), str(broken), tmp_path)
    assert not ok
    assert str(broken) in output
    assert report["checks"][-1]["name"] == "model"
    assert not report["checks"][-1]["ok"]
    assert str(tmp_path) not in json.dumps(report)


def test_the_command_exits_with_an_error_when_a_check_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    done = CliRunner().invoke(app, ["selftest", "./broken.gguf", "--output", "report.json"])
    assert done.exit_code == 1
    assert not json.loads(Path("report.json").read_text())["checks"][-1]["ok"]


def test_a_report_that_cannot_be_written_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give another --output"):
        selftest.selftest(Config(), "smollm2", tmp_path / "none" / "report.json", Console())


def test_an_interrupted_run_leaves_no_empty_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_self: SelfTest) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SelfTest, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        selftest.selftest(Config(), "smollm2", tmp_path / "report.json", Console())
    assert not (tmp_path / "report.json").exists()


def answer(text: str, *, reused: int = 100, reason: str = "full_match") -> Json:
    return {
        "choices": [{"message": {"content": text}, "logprobs": {"content": [text]}}],
        "x_cache": {"reused_tokens": reused, "reason": reason, "tier": "disk"},
        "usage": {"completion_tokens": selftest.REPLY_TOKENS},
    }


def client(answers: Callable[[Json], Json | str]) -> ChatClient:
    """A client of a server with these answers. A text is sent as a stream."""

    def handle(request: httpx.Request) -> httpx.Response:
        found = answers(json.loads(request.content))
        if isinstance(found, str):
            return httpx.Response(200, text=found)
        return httpx.Response(200 if "choices" in found else 500, json=found)

    return ChatClient(httpx.Client(transport=httpx.MockTransport(handle), base_url="http://x/v1"))


@pytest.fixture
def test_run(tmp_path: Path) -> SelfTest:
    return SelfTest(Config(cache_dir=tmp_path), Report(), Console(file=io.StringIO()))


def is_cold(request: Json) -> bool:
    return request.get("use_kv_cache") is False


def test_a_warm_answer_that_differs_is_found(test_run: SelfTest) -> None:
    with pytest.raises(CheckFailed, match="warm answer of turn 1 differs"):
        test_run._conversation(client(lambda sent: answer("cold" if is_cold(sent) else "warm")))


def test_probabilities_that_differ_are_found(test_run: SelfTest) -> None:
    """The text can be the same although the numbers are not."""

    def answers(sent: Json) -> Json:
        found = answer("same")
        found["choices"][0]["logprobs"] = {"content": [is_cold(sent)]}
        return found

    with pytest.raises(CheckFailed, match=r"turn 1 differs.*other probabilities"):
        test_run._conversation(client(answers))


@pytest.mark.parametrize(
    ("reason", "accepted"), [("prefix_changed", False), ("computed_cheaper", True)]
)
def test_a_turn_without_reuse_fails_unless_computing_takes_less_time(
    test_run: SelfTest, reason: str, accepted: bool
) -> None:
    server = client(lambda _: answer("same", reused=0, reason=reason))
    if accepted:
        assert "3 turns" in test_run._conversation(server)
        assert "0 prompt tokens" in test_run._restart(server)
    else:
        with pytest.raises(CheckFailed, match="turn 2 reused nothing"):
            test_run._conversation(server)


@pytest.mark.parametrize("step_tokens", [64, 512, 1024])
def test_the_prompts_are_long_enough_for_exact_reuse(test_run: SelfTest, step_tokens: int) -> None:
    """Exact mode reuses whole steps, which are longer on a GPU. A token has at most one word."""

    def answers(sent: Json) -> Json:
        words = sum(len(message["content"].split()) for message in sent["messages"][:1])
        reused = words - words % step_tokens
        return answer("same", reused=reused, reason="exact_boundary")

    server = client(answers)
    test_run._model(Ready(4096, 8192, exact_step_tokens=step_tokens))
    assert "3 turns" in test_run._conversation(server)
    assert "from disk" in test_run._restart(server)


def test_a_restart_that_changes_the_answer_is_found(test_run: SelfTest) -> None:
    test_run._conversation(client(lambda _: answer("before")))
    with pytest.raises(CheckFailed, match="after a restart differs"):
        test_run._restart(client(lambda _: answer("after")))


def events(*texts: str, end: str = "data: [DONE]\n\n") -> str:
    chunks = [json.dumps({"choices": [{"delta": {"content": text}}]}) for text in texts]
    chunks.append(json.dumps({"usage": {"prompt_tokens": 9, "completion_tokens": 3}}))
    return "".join(f"data: {chunk}\n\n" for chunk in chunks) + end


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        (events("so", "me"), None),
        (events("some"), "arrived in one piece"),
        (events("so", "mething"), "differs"),
        (events("so", "me", end=""), "ended early"),
    ],
)
def test_a_wrong_stream_is_found(test_run: SelfTest, stream: str, problem: str | None) -> None:
    server = client(lambda sent: stream if sent.get("stream") else answer("some"))
    if problem is None:
        assert "equal" in test_run._streaming(server)
    else:
        with pytest.raises(CheckFailed, match=problem):
            test_run._streaming(server)


def test_an_error_of_the_server_is_a_failed_check(test_run: SelfTest) -> None:
    with pytest.raises(CheckFailed, match="answered 500"):
        test_run._conversation(client(lambda _: {"error": "out of memory"}))


def test_an_answer_that_ends_too_early_is_found() -> None:
    short = answer("x") | {"usage": {"completion_tokens": 3}}
    with pytest.raises(CheckFailed, match=r"answers have \[3, 3, 3, 3\] tokens"):
        selftest._parallel(client(lambda _: short))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("cannot read /home/me/x.gguf: no", "cannot read <path> no"),
        ("see ~/models/a, please", "see <path>, please"),
        ("C:\\Users\\me is full", "<path> is full"),
        ("41 tokens/s", "41 tokens/s"),
    ],
)
def test_paths_are_removed_from_messages(text: str, kept: str) -> None:
    assert selftest.without_paths(text) == kept
