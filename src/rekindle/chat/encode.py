"""Encodes messages and text into prompts: render, escape, tokenise, find the messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

from rekindle.chat.escaping import (
    ControlTexts,
    Escaper,
    Placeholders,
    TextSpan,
    escape,
    escape_prefix,
    spans_from,
)
from rekindle.chat.messages import Message, with_pictures_as_text, with_text_after
from rekindle.chat.prompt import (
    NO_PICTURES,
    NO_PREFIX,
    ChatPrompt,
    KnownPrefix,
    Pictures,
    Prompt,
    PromptEdges,
    Recall,
    Render,
    continued_spans,
    find_messages,
    is_character_boundary,
)
from rekindle.chat.template import ChatTemplate
from rekindle.errors import BadRequest, TemplateFailed
from rekindle.tokens import MEDIA_BIT, Tokenizer, Tokens

# First user messages that have nothing in common. Prompts that end with them share exactly the
# text that comes before any user message.
PROBES = ("a", "\nb", " c", "1", "é", "“", ".")
PADDED = "needle \n"
ANCHOR = "\n"  # no SentencePiece token combines a line feed with the text after it


class Encoder:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._control = ControlTexts(tokenizer.control_texts)
        self._edges = PromptEdges(tokenizer)

    def text(self, text: str, *, recall: Recall | None = None) -> Prompt:
        """The prompt of a plain completion. Its author may write control tokens."""
        spans = [TextSpan(text, literal=False)]
        escaped, tokens, known = self._tokenise(spans, recall)
        return Prompt(tokens, (), escaped, len(known.tokens), raw=True)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        recall: Recall | None = None,
        pictures: Pictures = NO_PICTURES,
        earlier: ChatPrompt | None = None,
    ) -> ChatPrompt:
        """The prompt of a conversation, in which only the template writes control tokens.

        `pictures` has all pictures of the messages. `earlier` is the prompt of an earlier turn.
        """
        template = self._required_template()
        template.check(template_kwargs)
        escaper = Escaper(self._control)
        plain_tools = earlier.plain_tools if earlier and earlier.tools is tools else frozenset()
        shown_tools, plain_tools = escaper.hide_each(tools or (), plain_tools)
        kwargs = {"add_generation_prompt": add_generation_prompt, **escaper.hide(template_kwargs)}
        render: Render = partial(template.render, tools=shown_tools, **kwargs)
        render = _up_to_last_text(render) if continue_final_message else render
        placed = with_pictures_as_text(messages, escaper.place_picture) if pictures else messages
        same = earlier.same_messages(messages) if earlier else frozenset[int]()
        hidden, plain = escaper.hide_each(placed, earlier.plain & same if earlier else same)
        spans = escaper.spans(render(hidden))
        escaped, tokens, known = self._tokenise(spans, recall, pictures)
        prompt = ChatPrompt(
            tokens,
            escaped=escaped,
            known_tokens=len(known.tokens),
            pictures=pictures,
            messages=messages,
            tools=tools,
            plain=plain,
            plain_tools=plain_tools,
        )
        found = continued_spans(earlier, prompt, same, self._edges.pieces) if earlier else None
        if found is None:
            text = "".join(span.text for span in spans)
            places = find_messages(hidden, text, lambda marked: escaper.restore(render(marked)))
            found = self._edges.of(prompt, known).message_spans(messages, places)
        return replace(prompt, spans=found)

    def prefix(
        self,
        messages: Sequence[Message],
        *,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        pictures: Pictures = NO_PICTURES,
    ) -> Prompt:
        """The longest prompt with which every conversation begins that begins with `messages`."""
        encode = partial(
            self.chat,
            template_kwargs=template_kwargs,
            tools=tools,
            add_generation_prompt=False,
            pictures=pictures,
        )
        probed = _probed(messages, encode)
        prompt = self._edges.common(probed) if probed else encode(messages)
        if probed and (alone := _alone(messages, encode)):
            # Prefer the end of the messages themselves. A request with just them then matches too.
            shorter = self._edges.common([prompt, alone])
            if alone.spans[-1].end <= len(shorter.tokens):
                prompt = shorter
        if set(prompt.tokens) <= {self._tokenizer.bos}:
            raise BadRequest(
                "The prompt renders to nothing before the first user message.", param="messages"
            )
        spans = tuple(span for span in prompt.spans if span.index < len(messages))
        return replace(prompt, spans=spans)

    def known_after(self, prompt: Prompt, reply: Sequence[int], text: str) -> KnownPrefix | None:
        """The known prefix after a turn whose client got `text`, or None without escaped bytes.

        The client sends the whole text back, so all of it determines which parts are literals.
        """
        if not prompt.escaped:
            return None
        before = KnownPrefix(prompt.escaped, prompt.tokens)
        if prompt.raw:
            spans = _completion_spans(self._control, prompt.escaped, text)
            return None if spans is None else self._extended(before, reply, spans)
        if self._template_trims:
            kept, _ = self._matching_tokens(reply, text.rstrip().encode())
            reply = reply[:kept]
        return self._extended(before, reply, list(self._control.split(text)))

    def _required_template(self) -> ChatTemplate:
        if self._template is None:
            raise TemplateFailed(
                "This model has no chat template. Send it a prompt through /v1/completions."
            )
        return self._template

    @cached_property
    def _template_trims(self) -> bool:
        """Whether the template strips blanks from the end of a reply."""
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PADDED}]
        try:
            rendered = self._required_template().render(talk, add_generation_prompt=False)
        except TemplateFailed:
            return True
        return PADDED not in rendered

    def _tokenise(
        self,
        spans: Sequence[TextSpan],
        recall: Recall | None,
        pictures: Pictures = NO_PICTURES,
    ) -> tuple[bytes, Tokens, KnownPrefix]:
        """The escaped bytes and the tokens of a prompt, and the known prefix they begin with."""
        escaped = _escaped(spans)
        known = recall(escaped) if recall else None
        known = _with_media(known, pictures) if known and pictures else known
        if known is not None:
            rest = self._tokens_after(known, escaped, pictures)
            if rest is not None:
                return escaped, known.tokens + rest, known
        tokens, bos = self._tokens(spans, pictures), self._tokenizer.bos
        if bos is None or not self._tokenizer.add_bos or bos in tokens[:1]:  # the template wrote it
            return escaped, tokens, NO_PREFIX
        return escaped, Tokens.of([bos]) + tokens, NO_PREFIX

    def _tokens(self, spans: Iterable[TextSpan], pictures: Pictures) -> Tokens:
        """Tokenises each span on its own. The tokens of a picture are known."""
        found, ids = Tokens(), list[int]()
        for span in spans:
            if span.picture:
                found, ids = found + Tokens.of(ids) + pictures[span.text], []
            else:
                ids += self._tokenizer.encode(span.text, special=not span.literal)
        return found + Tokens.of(ids)

    def _tokens_after(
        self, known: KnownPrefix, escaped: bytes, pictures: Pictures
    ) -> Tokens | None:
        """The tokens of a prompt after a known prefix, or None if it is not a prefix of it."""
        at = len(known.escaped)
        if not (known.escaped and known.tokens and escaped.startswith(known.escaped)):
            return None
        if self._control.cut_at(escaped, at):
            return None
        try:
            spans = spans_from(escaped, at)
        except UnicodeDecodeError:
            return None
        (last,) = known.tokens[-1:]
        in_text = last < MEDIA_BIT and bool(self._tokenizer.piece(last, special=False))
        if not (spans and in_text and self._adds_space) or spans[0].picture:
            return self._tokens(spans, pictures)
        # The text continues in the middle, so it must not get the added space of a beginning.
        encode = partial(self._tokenizer.encode, special=not spans[0].literal)
        anchor, first = encode(ANCHOR), encode(ANCHOR + spans[0].text)
        if first[: len(anchor)] != anchor:
            return None
        return Tokens.of(first[len(anchor) :]) + self._tokens(spans[1:], pictures)

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer adds a space in front of a text, as SentencePiece does."""
        tokens = self._tokenizer.encode("a", special=False)
        return b"".join(self._tokenizer.piece(token, special=False) for token in tokens) == b" a"

    def _extended(
        self, prefix: KnownPrefix, reply: Sequence[int], spans: Sequence[TextSpan]
    ) -> KnownPrefix:
        text = "".join(span.text for span in spans).encode()
        count, size_bytes = self._matching_tokens(reply, text)
        escaped = prefix.escaped + escape_prefix(spans, size_bytes)
        return KnownPrefix(escaped, prefix.tokens + Tokens.of(reply[:count]))

    def _matching_tokens(self, reply: Sequence[int], text: bytes) -> tuple[int, int]:
        """Number of reply tokens that spell whole characters of `text`, and of their bytes.

        They end before a control token, which the client never gets, and where the client got
        different text: at a stop string inside a token, or at a replacement for invalid bytes.
        """
        count = size_bytes = at = 0
        for tried, token in enumerate(reply, start=1):
            piece = self._tokenizer.piece(token, special=False)
            if not piece or not text.startswith(piece, at):
                break
            at += len(piece)
            if is_character_boundary(text, at):  # the rest is tokenised as text
                count, size_bytes = tried, at
        return count, size_bytes


def _with_media(known: KnownPrefix, pictures: Pictures) -> KnownPrefix | None:
    """The prefix with its pictures. Tokens that come from disk have only ids."""
    named = [pictures[span.text] for span in spans_from(known.escaped, 0) if span.picture]
    tokens = known.tokens.with_media([span for picture in named for span in picture.media])
    return known._replace(tokens=tokens) if tokens is not None else None


def _completion_spans(control: ControlTexts, prompt: bytes, text: str) -> list[TextSpan] | None:
    """The text of a plain completion up to its first literal, or None if one begins in the prompt.

    The author of a plain prompt may write control tokens. A literal of the reply would become a
    control token when a client sends it back.
    """
    if control.across(prompt.decode(), text):
        return None
    return list(takewhile(lambda span: not span.literal, control.split(text)))


def _alone(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], Prompt]
) -> Prompt | None:
    """The prompt of just the messages, if the template accepts them and shows the last one."""
    try:
        prompt = encode(messages)
    except TemplateFailed:
        return None
    spans = prompt.spans
    return prompt if spans and spans[-1].index == len(messages) - 1 else None


def _probed(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], Prompt]
) -> list[Prompt]:
    """The messages followed by each probe. Empty if no user message may follow."""
    if messages and messages[-1].get("role") == "user":
        return []
    try:
        return [encode([*messages, {"role": "user", "content": probe}]) for probe in PROBES]
    except TemplateFailed:
        return []


def _up_to_last_text(render: Render) -> Render:
    """Renders conversations up to the end of the last message's text, with its final blanks."""
    end = Placeholders().of(0)

    def up_to_end(messages: Sequence[Message]) -> str:
        *before, last = messages
        text, found, _ = render([*before, with_text_after(last, end)]).rpartition(end)
        if not found:
            raise TemplateFailed(
                "The final message cannot be continued: the model's template does not show it."
            )
        return text

    return up_to_end


def _escaped(spans: Iterable[TextSpan]) -> bytes:
    try:
        return escape(spans)
    except UnicodeEncodeError as error:
        raise BadRequest("The prompt is not valid Unicode: it has a lone surrogate.") from error
