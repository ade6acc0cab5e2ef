"""Converts a conversation in Anthropic's form to the messages that templates read.

A tool result, which is part of a user message in Anthropic's form, becomes a message of its own.
`cache_control` is dropped, and a string equals a list of one text block. Clients vary both from
turn to turn, and the prompt must not change with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rekindle.api.anthropic.blocks import (
    DocumentBlock,
    FileBlock,
    ImageBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    as_blocks,
)
from rekindle.api.anthropic.schema import InputMessage, PromptFields, Toolbox
from rekindle.api.base.fields import TextBudget
from rekindle.api.base.messages import (
    FilePart,
    ImagePart,
    Message,
    TextPart,
    file_part,
    plain_message,
    reply_message,
    tool_call,
)
from rekindle.api.base.signature import signed_text
from rekindle.errors import BadRequest

SEPARATOR = "\n"  # between blocks of text
KNOWN_ERRORS = ("error", "<tool_use_error>")  # beginnings of results that are clearly errors
Parts = list[TextPart | ImagePart | FilePart]


def messages_of(body: PromptFields, toolbox: Toolbox) -> list[Message]:
    """Render the system prompt, then the messages in their order."""
    rendering = _Rendering(toolbox)
    system = rendering.joined(as_blocks(body.system))
    first = [plain_message("system", content=system)] if system else []
    return [*first, *(each for sent in body.messages for each in rendering.messages(sent))]


def loaded_tools(body: PromptFields, toolbox: Toolbox) -> list[dict[str, Any]]:
    """The deferred tools that the conversation refers to or `tool_choice` names."""
    named = [body.tool_choice.name] if body.tool_choice and body.tool_choice.name else []
    referred = [each.tool_name for each in body.blocks if isinstance(each, ToolReferenceBlock)]
    names = dict.fromkeys([*referred, *named])
    return [toolbox.deferred[name] for name in names if name in toolbox.deferred]


class _Rendering:
    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._budget = TextBudget()
        self._described: set[str] = set()  # deferred tools that the prompt already describes

    def messages(self, sent: InputMessage) -> Iterator[Message]:
        match sent.role:
            case "assistant":
                yield self._reply(sent.blocks)
            case "system":
                yield plain_message("system", content=self.joined(sent.blocks))
            case "user":
                yield from self._input(sent.blocks)

    def _input(self, blocks: Sequence[Any]) -> Iterator[Message]:
        """Split a user message into the user's own words and tool results, in order."""
        for is_result, run in groupby(blocks, lambda each: isinstance(each, ToolResultBlock)):
            if is_result:
                yield from (self._result(block) for block in run)
            else:
                yield plain_message("user", content=self._content(list(run)))
        if not blocks:
            yield plain_message("user", content="")

    def _result(self, block: ToolResultBlock) -> Message:
        content = self._content(block.blocks)
        if block.is_error and not _text(content).lower().startswith(KNOWN_ERRORS):
            content = _with_text_before("Error: ", content)
        return plain_message("tool", content=content, tool_call_id=block.tool_use_id)

    def _content(self, blocks: Sequence[Any]) -> str | Parts:
        """Join the blocks to one text, unless there are images or files."""
        shown = (each for block in blocks for each in _opened(block))
        parts = [part for block in shown if (part := self._part(block)) is not None]
        if any(isinstance(part, ImagePart | FilePart) for part in parts):
            return parts
        return SEPARATOR.join(part.text for part in parts if isinstance(part, TextPart))

    def _part(self, block: Any) -> TextPart | ImagePart | FilePart | None:
        match block:
            case TextBlock():
                return self._text_part(block.text)
            case ImageBlock():
                return ImagePart.model_construct(type="image_url", image_url=block.source.url)
            case FileBlock():
                return file_part(block.url)
            case SearchResultBlock():
                texts = [block.title, block.source, *(each.text for each in block.content)]
                return self._text_part(SEPARATOR.join(texts))
            case ToolReferenceBlock():
                return self._text_part(self._definition(block.tool_name))
            case ToolUseBlock():
                raise BadRequest(
                    "Blocks of type 'tool_use' belong in messages of the role 'assistant'.",
                    param="messages",
                )
        return None  # a block of Anthropic's servers

    def _definition(self, name: str) -> str:
        """Describe a deferred tool as JSON in one line. The second time, only name it."""
        tool = self._toolbox.deferred.get(name)
        if tool is None:
            if name in self._toolbox.names or not self._toolbox.names:
                return name
            raise BadRequest(
                f"A `tool_reference` names the tool {name[:128]!r}, which is not among `tools`.",
                param="messages",
            )
        if name in self._described:
            return name
        self._described.add(name)
        return json.dumps(tool["function"], ensure_ascii=False)

    def _reply(self, blocks: Sequence[Any]) -> Message:
        """Render a reply. The blocks of its text are joined without a separator, as written."""
        calls = [
            tool_call(block.id, block.name, block.input)
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ]
        text = self.joined(blocks, separator="")
        thoughts = (each for each in blocks if isinstance(each, ThinkingBlock))
        known = (signed_text(each.thinking, each.signature, self._budget) for each in thoughts)
        return reply_message(text, "".join(filter(None, known)), calls)

    def joined(self, blocks: Sequence[Any], separator: str = SEPARATOR) -> str:
        texts = (block.text for block in blocks if isinstance(block, TextBlock))
        return self._budget.take(separator.join(texts))

    def _text_part(self, text: str) -> TextPart:
        return _text_part(self._budget.take(text))


def _opened(block: Any) -> list[Any]:
    """The blocks of a document, or the block itself."""
    return block.parts if isinstance(block, DocumentBlock) else [block]


def _text_part(text: str) -> TextPart:
    return TextPart.model_construct(type="text", text=text)


def _text(content: str | Parts) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, TextPart))


def _with_text_before(text: str, content: str | Parts) -> str | Parts:
    return text + content if isinstance(content, str) else [_text_part(text), *content]
