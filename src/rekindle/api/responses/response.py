"""Builds the response object, and finds stored items by reference."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from rekindle.api.base.documents import DocumentClient
from rekindle.api.base.request import or_default
from rekindle.api.responses.errors import ResponseNotFound, field_of
from rekindle.api.responses.items import ID_BYTES, ItemReference, stored_items
from rekindle.api.responses.schema import Lifetime, ResponsesRequest, TextConfig, TextFormat
from rekindle.api.responses.tools import FunctionTool
from rekindle.config import Config
from rekindle.errors import BadRequest, NotFound, ServerError
from rekindle.protocol.events import Finished

MAX_REFERENCED = 64  # responses whose items one request may refer to

LIFETIMES_S: dict[Lifetime, float] = {"30m": 1800.0, "12h": 43_200.0}


class ResponseObject:
    """Describes one response in each of its states."""

    def __init__(self, body: ResponsesRequest, model: str, config: Config) -> None:
        self.number = secrets.token_hex(ID_BYTES)  # in its id and in those of its items
        self.id = f"{ResponseNotFound.prefix}{self.number}"
        self._fields: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": bool(body.background),
            **_asked(body, config),
        }

    def begun(self, status: str = "in_progress") -> dict[str, Any]:
        return self._with(status, [])

    def ended(self, status: str, output: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        if status == "completed":
            fields["completed_at"] = int(time.time())
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._with(status, output, incomplete_details=reason, **fields)

    def failed(self, error: ServerError, output: list[dict[str, Any]]) -> dict[str, Any]:
        told = {
            "code": error.code or "server_error",
            "message": str(error),
            "type": error.kind,
            "param": field_of(error),
        }
        return self._with("failed", output, error=told)

    def _with(self, status: str, output: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        absent = ("completed_at", "error", "incomplete_details", "usage")
        result: dict[str, Any] = dict.fromkeys(absent)
        return {**self._fields, **result, "status": status, "output": output, **fields}


def _asked(body: ResponsesRequest, config: Config) -> dict[str, Any]:
    """The request's fields, with the server's defaults filled in."""
    options = body.prompt_cache_options
    fields: dict[str, Any] = {
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "conversation": {"id": body.conversation_id} if body.conversation_id else None,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": body.reasoning.model_dump() if body.reasoning else None,
        "service_tier": "default",
        "store": body.is_stored,
        "temperature": or_default(body.temperature, config.temperature),
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "text": _text(body.text),
        "tool_choice": _dumped(body.tool_choice) or "auto",
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": or_default(body.top_p, config.top_p),
        "truncation": body.truncation or "disabled",
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
    }
    if options is not None:
        fields["prompt_cache_options"] = {
            "mode": options.mode,
            "ttl": options.ttl or "30m",
            "comparison_response_id": options.comparison_response_id,
        }
    return fields


def _text(text: TextConfig | None) -> dict[str, Any]:
    shown = text.model_dump(exclude_none=True, exclude={"format"}) if text else {}
    return {"format": _format(text.format if text else None), **shown}


def _format(form: TextFormat | None) -> dict[str, Any]:
    if form is None or form.type != "json_schema":
        return {"type": form.type if form else "text"}
    return {
        "type": form.type,
        "name": form.name or "response",
        "description": form.description,
        "schema": form.schema_,
        "strict": bool(form.strict),
    }


def _tool(tool: Any) -> dict[str, Any]:
    """A tool as the client sent it. A function has all of its fields."""
    nulls = dict.fromkeys(("description", "parameters", "strict"))
    shown: dict[str, Any] = _dumped(tool)
    return {**nulls, **shown} if isinstance(tool, FunctionTool) else shown


def _dumped(value: Any) -> Any:
    return value.model_dump(exclude_unset=True) if hasattr(value, "model_dump") else value


def usage(turn: Finished, lifetime: Lifetime | None) -> dict[str, Any]:
    """`usage` of a response. `lifetime` is the one that the client asked for."""
    reused = turn.cache.reused_tokens
    written = turn.prompt_tokens - reused if turn.cache.cached_tokens else 0
    details: dict[str, Any] = {"cached_tokens": reused, "cache_write_tokens": written}
    if lifetime is not None:
        pinned = 0 if turn.cache.pin_refused else written
        details["cache_write_tokens_details"] = {
            f"ttl_{each}_tokens": pinned if each == lifetime else 0 for each in LIFETIMES_S
        }
    return {
        "input_tokens": turn.prompt_tokens,
        "input_tokens_details": details,
        "output_tokens": turn.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": turn.reasoning_tokens},
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
    }


async def referenced(items: Sequence[Any], documents: DocumentClient) -> dict[str, Any]:
    """Find the items that the request refers to, by id.

    An item's id contains the number of its response, so that no index is needed.
    """
    wanted = {item.id for item in items if isinstance(item, ItemReference)}
    if not wanted:
        return {}
    numbers = dict.fromkeys(item_id.partition("_")[2][: 2 * ID_BYTES] for item_id in wanted)
    if len(numbers) > MAX_REFERENCED:
        raise BadRequest(
            f"One request may refer to items of at most {MAX_REFERENCED} responses: "
            "send the items themselves, or `previous_response_id`.",
            param="input",
        )
    outputs = [await _output(f"{ResponseNotFound.prefix}{number}", documents) for number in numbers]
    known = [item for output in outputs for item in output if item["id"] in wanted]
    return {item.id: item for item in stored_items.validate_python(known)}


async def _output(key: str, documents: DocumentClient) -> list[dict[str, Any]]:
    try:
        async with documents.loaded(key, ResponseNotFound) as stored:
            output: list[dict[str, Any]] = stored.object["output"]
            return output
    except NotFound:
        return []
