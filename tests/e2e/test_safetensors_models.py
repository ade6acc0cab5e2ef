"""MLX serves a plain folder of safetensors as it is, and llama.cpp the same after a conversion.

The flags and requests are those of vllm.rs's guide to its context cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.support.gguf_safetensors import write_gguf_as_safetensors
from tests.support.rounds import rounds
from tests.support.server import Server, running
from tests.support.tiny_safetensors import write_tiny_folder

Json = dict[str, Any]

#: The second one is SmolLM2 with the weights of its GGUF file as floats.
MODELS = ("qwen3", "smollm2")[: rounds(1, 2)]
#: What each engine's server says about the folder when it starts.
LOADED = {"mlx": "MLX loads it as it is.", "llama.cpp": "llama.cpp (--engine) loads it as a GGUF"}
FIRST = {"role": "user", "content": "Explain KV cache"}
SECOND = {"role": "user", "content": "Tell me more"}
FIXED: Json = {"model": "default", "max_tokens": 12, "temperature": 0, "logprobs": True}
LONG_START = "The sea has many ships, and every ship has a name. " * 8


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safetensors") / str(request.param)
    if request.param == "smollm2":
        return write_gguf_as_safetensors(request.getfixturevalue("smollm2_path"), path)
    return write_tiny_folder(path, str(request.param))


def ask(server: Server, messages: list[Json], **more: Any) -> Json:
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": messages, **FIXED, **more})
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def said(answer: Json) -> Json:
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def tokens(answer: Json) -> list[str]:
    return [each["token"] for each in answer["choices"][0]["logprobs"]["content"]]


def reused(answer: Json) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def serve(folder: Path, engine: str, scratch: Path) -> AbstractContextManager[Server]:
    """Runs the command of the guide."""
    flags = ("--engine", engine, "--max-model-len", "1024", "--context-cache", "--force-cache")
    environment = {"REKINDLE_MODELS_DIR": str(scratch / "models")}
    return running(folder, scratch, *flags, environment=environment, model_flag="--m")


def conversation(folder: Path, engine: str, scratch: Path) -> Iterator[Json]:
    """Two turns with an explicit session, and a third one after a restart."""
    session = {"session_id": "chat-123"}
    messages = [{"role": "system", "content": LONG_START}, FIRST]
    with serve(folder, engine, scratch) as server:
        first = ask(server, messages, **session)
        yield first
        messages += [said(first), SECOND]
        second = ask(server, messages, **session)
        yield second
        messages += [said(second), SECOND]
        check_fingerprints(server)
        assert LOADED[engine] in server.log.read_text()
    with serve(folder, engine, scratch) as server:
        yield ask(server, messages, **session)


def check_fingerprints(server: Server) -> None:
    """The guide's second strategy, which needs no `session_id`."""
    messages = [{"role": "user", "content": "Hello"}]
    messages += [said(ask(server, messages)), {"role": "user", "content": "How are you?"}]
    assert reused(ask(server, messages)) > 0
    log = server.log.read_text()
    assert "registered new session auto_session_0" in log
    assert "matched existing session auto_session_0" in log


def test_both_engines_choose_the_same_tokens_in_every_turn_and_after_a_restart(
    folder: Path, tmp_path: Path
) -> None:
    found = {}
    for engine in LOADED:
        scratch = tmp_path / engine
        scratch.mkdir()
        found[engine] = list(conversation(folder, engine, scratch))
    for mlx, llama in zip(*found.values(), strict=True):
        assert tokens(mlx) == tokens(llama)
        assert mlx["usage"]["prompt_tokens"] == llama["usage"]["prompt_tokens"]
    for first, second, third in found.values():
        assert reused(first) == 0
        assert reused(second) > first["usage"]["prompt_tokens"] * 3 // 4
        assert reused(third) > first["usage"]["prompt_tokens"] * 3 // 4  # from disk
    assert len(list((tmp_path / "llama.cpp").rglob("converted/*.gguf"))) == 1
    assert not list((tmp_path / "mlx").rglob("*.gguf"))
