"""The response object: what was asked, as it was understood, and what came of it."""

from __future__ import annotations

import secrets
import time
from typing import Any

from rekindle.api.responses.errors import field_of
from rekindle.api.responses.schema import ResponsesRequest
from rekindle.config import Config
from rekindle.errors import ServerError

PREFIX = "resp_"
RANDOM_BYTES = 16


def new_number() -> str:
    """What a response's id and those of its items have in common."""
    return secrets.token_hex(RANDOM_BYTES)


class ResponseObject:
    """One response, in each of its states."""

    def __init__(self, body: ResponsesRequest, number: str, model: str, config: Config) -> None:
        self.number = number
        self.id = f"{PREFIX}{number}"
        self._fields: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            **_asked(body, config),
        }

    def begun(self) -> dict[str, Any]:
        return self._with("in_progress", [])

    def ended(self, status: str, output: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """`fields`: usage and reports."""
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
        result: dict[str, Any] = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._fields, **result, "status": status, "output": output, **fields}


def _asked(body: ResponsesRequest, config: Config) -> dict[str, Any]:
    """The request's fields, with the defaults that hold."""
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    options = body.prompt_cache_options
    fields: dict[str, Any] = {
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "conversation": {"id": body.conversation_id} if body.conversation_id else None,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": body.reasoning.model_dump() if body.reasoning else None,
        "service_tier": "default",
        "store": body.is_stored,
        "temperature": config.temperature if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": _dumped(body.tool_choice) or "auto",
        "tools": [_dumped(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": config.top_p if body.top_p is None else body.top_p,
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


def _dumped(value: Any) -> Any:
    """A form as it was sent."""
    return value.model_dump(exclude_unset=True) if hasattr(value, "model_dump") else value
