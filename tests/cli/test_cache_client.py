"""Prompt cache files are sent to a server with their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.cli.cache_client import CacheClient, PromptCacheFile, RequestRefused, read_tokens
from rekindle.errors import RekindleError

DATA = bytes(range(200)) * 10_000


def written(path: Path, header: dict[str, Any]) -> Path:
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + DATA)
    return path


def header_of(content: bytes) -> dict[str, Any]:
    stop = 8 + int.from_bytes(content[:8], "little")
    assert content[stop:] == DATA
    found: dict[str, Any] = json.loads(content[8:stop])
    return found


def test_tokens_are_added_to_the_header_and_nothing_else_changes(tmp_path: Path) -> None:
    header = {"0.0": {"dtype": "U8"}, "__metadata__": {"0.model": "tiny"}}
    file = PromptCacheFile(written(tmp_path / "a.safetensors", header))
    assert not file.has_tokens
    assert header_of(b"".join(file.parts())) == header
    file.name_tokens([1, 2, 3])
    named = header_of(b"".join(file.parts()))
    assert named["0.0"] == header["0.0"]
    assert named["__metadata__"] == {"0.model": "tiny", "0.rekindle_tokens": "[1, 2, 3]"}
    again = written(tmp_path / "b.safetensors", named)
    assert PromptCacheFile(again).has_tokens
    bare = PromptCacheFile(written(tmp_path / "c.safetensors", {}))
    bare.name_tokens([7])
    assert header_of(b"".join(bare.parts())) == {"__metadata__": {"0.rekindle_tokens": "[7]"}}


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 20, (2).to_bytes(8, "little") + b"[]"])
def test_another_file_format_is_refused_in_one_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(RekindleError, match="not a safetensors file"):
        PromptCacheFile(path)
    with pytest.raises(RekindleError, match="cannot read"):
        PromptCacheFile(tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("{}", "list of token ids"),
        ('["a"]', "list of token ids"),
        ("[true]", "token ids"),
    ],
)
def test_anything_but_a_list_of_token_ids_is_refused(
    content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(content)
    with pytest.raises(RekindleError, match=message):
        read_tokens(path)
    with pytest.raises(RekindleError, match="cannot read"):
        read_tokens(tmp_path / "none")
    path.write_text("[3, 4]")
    assert read_tokens(path) == [3, 4]


def test_a_refused_export_leaves_the_existing_file(tmp_path: Path) -> None:
    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(409, json={"error": {"message": "nothing is left"}})

    path = tmp_path / "a.safetensors"
    path.write_bytes(b"before")
    client = CacheClient("http://here/v1", None, httpx.MockTransport(answer))
    with pytest.raises(RequestRefused, match="nothing is left"):
        client.export("/cache/key", path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_chat_template_the_prompt_is_tokenised_as_text() -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        if "messages" in asked[-1]:
            return httpx.Response(400, json={"error": {"message": "no template"}})
        return httpx.Response(200, json={"tokens": [1, 2]})

    client = CacheClient("http://here/v1", None, httpx.MockTransport(answer))
    assert client.tokenize("hello", "tiny") == [1, 2]
    assert asked[0]["continue_final_message"] is True
    assert asked[1] == {"prompt": "hello", "model": "tiny"}
