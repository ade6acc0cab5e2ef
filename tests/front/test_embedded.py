"""The Python API runs a model inside a program, and can start a server."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle import Engine, EngineConfig
from rekindle.errors import BadRequest, ConfigError, ModelError, ModelNotFound
from tests.support.tiny import write_llama

MESSAGES = [{"role": "user", "content": "a question that is long enough to be kept " * 4}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("local") / "tiny.gguf")


def config(model: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model_id=model, threads=1, disk_cache=0, **settings)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(config(model, flash_context=True), "bf16") as engine:
        yield engine


def test_importing_the_package_is_cheap() -> None:
    code = "import rekindle, sys; assert not {'uvicorn', 'pydantic', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_cannot_be_imported() -> None:
    with pytest.raises(ImportError):
        from rekindle import Nonsense  # noqa: F401


def test_settings_have_the_servers_names_and_checks(tmp_path: Path) -> None:
    given = EngineConfig(
        model_id="org/repo",
        flash_context=False,
        force_cache=True,
        max_model_len=2048,
        kv_fraction=0.5,
        fp8_kvcache=True,
        cache_dir=tmp_path,
    ).settings
    assert (given.model, given.context_cache, given.force_cache) == (("org/repo",), False, True)
    assert (given.max_model_len, given.kv_fraction, given.fp8_kvcache) == (2048, 0.5, True)
    assert given.cache_dir == tmp_path
    with pytest.raises(ConfigError, match="unknown setting `cache_dirr`; did you mean `cache_dir`"):
        EngineConfig(cache_dirr="x")
    with pytest.raises(ConfigError, match="`max_model_len`"):
        EngineConfig(max_model_len=1)


@pytest.mark.parametrize("dtype", ["int4", "float32", ""])
def test_an_unsupported_dtype_is_rejected(dtype: str) -> None:
    with pytest.raises(ConfigError, match="auto, bf16, f16"):
        Engine(EngineConfig(), dtype)


def test_a_model_that_cannot_be_loaded_raises(tmp_path: Path) -> None:
    broken = write_llama(tmp_path / "broken.gguf")
    broken.write_bytes(broken.read_bytes()[:-5000])
    with Engine(config(broken)) as engine, pytest.raises(ModelError):
        engine.chat(MESSAGES)


def test_a_streamed_reply_equals_the_whole_reply(engine: Engine) -> None:
    whole = engine.chat(MESSAGES, **GREEDY)
    pieces = list(engine.chat(MESSAGES, stream=True, **GREEDY))
    assert isinstance(whole, str)
    assert len(pieces) > 1
    assert "".join(pieces) == whole


def test_a_session_id_is_accepted(engine: Engine) -> None:
    assert engine.chat(MESSAGES, "chat-1", **GREEDY) == engine.chat(MESSAGES, **GREEDY)


def test_fields_of_the_http_api_are_options(engine: Engine) -> None:
    assert len(engine.chat(MESSAGES, **{**GREEDY, "max_tokens": 1})) == 1
    with pytest.raises(BadRequest, match="`temperature` takes a number from 0 up"):
        engine.chat(MESSAGES, temperature=-1)
    with pytest.raises(BadRequest, match="`messages`"):
        engine.chat([])
    with pytest.raises(ModelNotFound):
        engine.chat(MESSAGES, model="other")
    with pytest.raises(BadRequest, match="one reply"):
        engine.chat(MESSAGES, n=2)
    with pytest.raises(TypeError, match="no option temperatur"):
        engine.chat(MESSAGES, temperatur=1)


def test_tools_are_rejected() -> None:
    """Tool calls would be lost, so they are rejected before anything is loaded."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    with Engine(EngineConfig()) as engine, pytest.raises(BadRequest, match="over HTTP"):
        engine.chat(MESSAGES, tools=tools)


def test_closing_a_stream_early_cancels_its_turn(engine: Engine) -> None:
    for _ in range(40):  # more than may run in parallel
        pieces = engine.chat(MESSAGES, stream=True, **{**GREEDY, "max_tokens": 3000})
        next(pieces)
        pieces.close()
    assert engine.chat(MESSAGES, **GREEDY)


def test_a_background_server_shares_the_cache_and_stops_with_the_engine(model: Path) -> None:
    with Engine(config(model), "bf16") as engine:
        reply = engine.chat(MESSAGES, **GREEDY)
        assert engine.base_url is None
        engine.start_server(0, True)
        url = f"{engine.base_url}/chat/completions"
        answer = httpx.post(url, json={"messages": MESSAGES, **GREEDY}).json()
        assert answer["choices"][0]["message"]["content"] == reply
        assert answer["x_cache"]["reused_tokens"] > 0
        with pytest.raises(ConfigError, match="already serves"):
            engine.start_server(0, True)
    with pytest.raises(httpx.TransportError):
        httpx.get(url)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_foreground_server_serves_until_a_signal(model: Path) -> None:
    port = free_port()
    program = (
        "from rekindle import Engine, EngineConfig\n"
        f"cfg = EngineConfig(model_id={str(model)!r}, threads=1, disk_cache=0)\n"
        f"Engine(cfg, 'bf16').start_server({port}, False)\n"
        "print('after')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        answered = await_health(process, port)
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert answered
    assert process.returncode == 0
    assert output == b"after\n"


def await_health(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").is_success
        except httpx.TransportError:
            time.sleep(0.1)
    return False
