"""Serves /v1/responses/compact: replaces a long conversation by a short one with its summary.

The model writes the summary as the next reply to the conversation. Its prompt therefore begins like
the conversation's other prompts, and the state of these tokens is reused.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any, Literal

import orjson
from pydantic import Field
from starlette.requests import Request

from rekindle.api.base.fields import CacheRetention, Id
from rekindle.api.base.messages import Message, plain_message
from rekindle.api.base.reply import Reply
from rekindle.api.base.request import RenderedChat, RequestBuilder, retention
from rekindle.api.base.signature import seal
from rekindle.api.responses.errors import ResponseNotFound
from rekindle.api.responses.items import ID_BYTES, new_id
from rekindle.api.responses.request import Conversation, prompt_fields
from rekindle.api.responses.response import usage
from rekindle.api.responses.schema import PromptFields
from rekindle.protocol.events import AssistantMessage, Event, Part
from rekindle.protocol.requests import GenerateRequest, Names, SamplingParams, ToolUse
from rekindle.worker.client import RuntimeClient

MAX_SUMMARY_TOKENS = 2048
INSTRUCTION = (
    "Summarise this conversation so that it can continue without the messages above. Write down "
    "the user's goals and preferences, what was decided and done, facts, names, numbers and "
    "results of tools that are still needed, and what is open. Write only the summary."
)


class CompactRequest(PromptFields):
    """POST /v1/responses/compact."""

    model: str | None = Field()  # it has to be sent
    # What does not fit is left out of the summary. Messages of the user stay in any case.
    truncation: Literal["auto"] = "auto"
    prompt_cache_key: Id | None = None
    prompt_cache_retention: CacheRetention | None = None

    @property
    def reply_tokens(self) -> int:
        return MAX_SUMMARY_TOKENS


def with_instruction(messages: list[Message]) -> list[Message]:
    """Ask for the summary. Two messages of the user in a row would be refused by some templates."""
    *before, last = messages or [plain_message("user", content="")]
    if last.role == "user" and isinstance(last.content, str):
        joined = "\n\n".join(filter(None, [last.content, INSTRUCTION]))
        return [*before, plain_message("user", content=joined)]
    return [*messages, plain_message("user", content=INSTRUCTION)]


def compact_request(
    body: CompactRequest, conversation: Conversation, chat: RenderedChat, builder: RequestBuilder
) -> GenerateRequest:
    names = Names(
        **retention(body.prompt_cache_retention),
        cache_key=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
    )
    return builder.build(
        **prompt_fields(body, conversation, chat, builder.config),
        tool_use=ToolUse(choice="none"),
        sampling=SamplingParams(temperature=0),
        max_tokens=MAX_SUMMARY_TOKENS,
        names=names,
    )


class CompactReply(Reply):
    """The compacted conversation. It is never streamed."""

    def __init__(
        self,
        http: Request,
        runtime: RuntimeClient,
        request: GenerateRequest,
        conversation: Conversation,
    ) -> None:
        super().__init__(http, runtime, [request])
        self._conversation = conversation
        self._message = AssistantMessage(keeps_logprobs=False)

    def add(self, index: int, part: Part) -> None:
        self._message.add(part)

    def chunks(self, index: int, event: Event) -> list[bytes]:
        raise AssertionError("a compaction is sent whole")

    async def body(self) -> dict[str, Any]:
        [finished] = self.finished
        summary = {
            "id": new_id("compaction"),
            "type": "compaction",
            "encrypted_content": seal(self._message.text.strip()),
        }
        return {
            "id": f"{ResponseNotFound.prefix}{secrets.token_hex(ID_BYTES)}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*self._kept(), summary],
            "usage": usage(finished, None),
        }

    def _kept(self) -> Iterator[dict[str, Any]]:
        """The messages of the user, and instructions."""
        for line in self._conversation.lines:
            item = orjson.loads(line)
            if item["type"] == "message" and item["role"] != "assistant":
                yield item
