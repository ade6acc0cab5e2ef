"""`rekindle cache export` and `import` exchange state between a real server and mlx_lm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from typer.testing import CliRunner, Result

import rekindle.engine.mlx  # noqa: F401  # before mlx_lm, whose import it makes harmless
from rekindle.cli import main as cli
from tests.support.server import Server, running
from tests.support.tiny import TEMPLATE
from tests.support.tiny_mlx import write_tiny_mlx

PROMPT = [3 + (7 * n) % 200 for n in range(90)]
OTHER = [5 + (11 * n) % 190 for n in range(70)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mlx(tmp_path_factory.mktemp("state_files") / "tiny", "gemma3")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    keys = ("--api-key", "alice", "--api-key", "bob", "--admin-key", "root")
    with running(folder, folder.parent, *keys) as found:
        yield found


def complete(server: Server, prompt: Any, key: str = "alice", **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    with server.client() as client:
        headers = {"Authorization": f"Bearer {key}"}
        answer = client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cache(server: Server, *words: str | Path, key: str = "alice") -> Result:
    where = ("--base-url", f"{server.url}/v1", "--api-key", key)
    return CliRunner().invoke(cli.app, ["cache", *map(str, words), *where])


def test_mlx_lm_continues_from_state_that_a_server_exported(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    import mlx.core as mx
    from mlx_lm.models.cache import load_prompt_cache
    from mlx_lm.utils import load_model

    first = complete(server, PROMPT, return_cache_key=True, session_id="anna's chat")
    path = tmp_path / "ours.safetensors"
    assert cache(server, "export", "anna's chat", tmp_path / "named.safetensors").exit_code == 0
    result = cache(server, "export", first["x_cache"]["new_cache_key"], path)
    assert result.exit_code == 0, result.output
    caches, known = load_prompt_cache(str(path), return_metadata=True)
    tokens = json.loads(known["rekindle_tokens"])
    assert tokens[:90] == PROMPT
    assert (tmp_path / "named.safetensors").read_bytes() == path.read_bytes()
    assert f"the state of {len(tokens)} tokens" in result.output.replace("\n", " ")
    model, _ = load_model(folder)
    alone = model(mx.array([[*tokens, 7, 8]]))[0, -1]
    resumed = model(mx.array([[7, 8]]), cache=caches)[0, -1]
    assert mx.allclose(alone, resumed, rtol=1e-3, atol=1e-3).item()


def test_a_server_continues_from_state_that_mlx_lm_saved(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([OTHER]), cache=caches))
    path, tokens = tmp_path / "theirs.safetensors", tmp_path / "tokens.json"
    save_prompt_cache(str(path), caches, {"model": "tiny"})
    refused = cache(server, "import", path, "--key", "theirs")
    assert refused.exit_code == 1
    assert "--tokens" in str(refused.exception)
    tokens.write_text(json.dumps(OTHER))
    result = cache(server, "import", path, "--key", "theirs", "--tokens", tokens)
    assert result.exit_code == 0, result.output
    asked = [*OTHER, 9, 8, 7]
    cold = complete(server, asked, key="bob")
    assert cold["x_cache"]["reused_tokens"] == 0
    warm = complete(server, asked, session_id="theirs")
    assert warm["x_cache"]["reused_tokens"] == len(OTHER)
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]


def test_the_prompt_of_cache_prompt_gives_the_tokens_of_a_file(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
    from mlx_lm.utils import load_model
    from tokenizers import Tokenizer

    text = "The sea is wide and the sun is low."
    messages = [{"role": "user", "content": text}]
    rendered = jinja2.Template(TEMPLATE).render(messages=messages, add_generation_prompt=False)
    rendered = rendered[: rendered.index(text) + len(text)]  # the text will be continued
    prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(rendered).ids
    model, _ = load_model(folder)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt]), cache=caches))
    path, written = tmp_path / "theirs.safetensors", tmp_path / "prompt.txt"
    save_prompt_cache(str(path), caches)
    written.write_text(text)
    result = cache(server, "import", path, "--prompt", written, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["token_count"] == len(prompt)
    message = {"role": "user", "content": text + " Go on."}
    with server.client() as client:
        answer = client.post(
            "/v1/chat/completions",
            json={"messages": [message], "max_tokens": 2},
            headers={"Authorization": "Bearer alice"},
        )
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 2


def test_a_tenant_cannot_export_state_of_another(server: Server, tmp_path: Path) -> None:
    first = complete(server, PROMPT[:40], return_cache_key=True)
    key = first["x_cache"]["new_cache_key"]
    with server.client() as client:
        for other, status in (("bob", 404), ("root", 404), ("nobody", 401)):
            headers = {"Authorization": f"Bearer {other}"}
            assert client.get(f"/v1/cache/{key}/export", headers=headers).status_code == status
        headers = {"Authorization": "Bearer bob", "Content-Type": "application/octet-stream"}
        bad = client.post("/v1/cache/import", content=b"x" * 1000, headers=headers)
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "file")
