"""Messages and text into tokens: render, escape, tokenise, find the messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rekindle.chat.escaping import (
    ControlTexts,
    Escaper,
    Placeholders,
    Span,
    escape,
    unescape,
)
from rekindle.chat.images import flattened, picture_text
from rekindle.chat.message_spans import (
    Encoding,
    MessageSpan,
    Render,
    continued_spans,
    find_messages,
)
from rekindle.chat.messages import Message, with_text_after
from rekindle.chat.prompt import (
    NO_PICTURES,
    NOTHING,
    ChatPrompt,
    KnownPrefix,
    Pictures,
    Prompt,
    PromptEdges,
    Recall,
    adds_space,
    completion_spans,
    extended,
    matching_tokens,
    tokenise,
    tokens_after,
    with_media,
)
from rekindle.chat.template import ChatTemplate
from rekindle.errors import BadRequest, TemplateFailed
from rekindle.tokens import Tokenizer, Tokens

#: First messages of users, so different that all they have in common is what any has.
PROBES = ("a", "\nb", " c", "1", "é", "“", ".")
PADDED = "needle \n"


class Encoder:
    """Makes prompts for one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._control = ControlTexts(tokenizer.control_texts)
        self._edges = PromptEdges(tokenizer)

    def text(self, text: str, *, recall: Recall | None = None) -> Prompt:
        """A plain completion's prompt; its author may write control tokens."""
        escaped = _utf8(text)
        tokens, known = self._tokenise([Span(text, literal=False)], escaped, recall)
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
        """A conversation's prompt, in which only the template writes control tokens; `pictures`
        are all that its messages name. It may go on from one that was encoded `earlier`."""
        template = self._required_template()
        template.check(template_kwargs)
        escaper = Escaper(self._control)
        shown_tools, plain_tools = _hidden_tools(escaper, tools, earlier)
        kwargs = {"add_generation_prompt": add_generation_prompt, **escaper.hide(template_kwargs)}
        render: Render = functools.partial(template.render, tools=shown_tools, **kwargs)
        if continue_final_message:
            render = _up_to_last_text(render)
        placed = flattened(messages, lambda digest: escaper.place_picture(picture_text(digest)))
        same = earlier.same_messages(messages) if earlier else frozenset[int]()
        hidden, plain = escaper.hide_each(placed, earlier.plain & same if earlier else same)
        literals = escaper.spans(render(hidden))
        text = "".join(span.text for span in literals)
        _utf8(text)  # or a BadRequest
        escaped = escape(literals)
        tokens, known = self._tokenise(literals, escaped, recall, pictures)
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
        spans = self._continued_spans(earlier, prompt, same)
        if spans is None:
            places = find_messages(hidden, text, lambda placed: escaper.restore(render(placed)))
            spans = self._edges.of(prompt, known).message_spans(messages, places)
        return replace(prompt, spans=spans)

    def _continued_spans(
        self, earlier: ChatPrompt | None, prompt: ChatPrompt, same: frozenset[int]
    ) -> tuple[MessageSpan, ...] | None:
        if earlier is None:
            return None
        return continued_spans(
            Encoding(unescape(earlier.escaped), earlier.tokens),
            earlier.spans,
            Encoding(unescape(prompt.escaped), prompt.tokens),
            prompt.messages,
            same,
            self._edges.texts,
        )

    def prefix(
        self,
        messages: Sequence[Message],
        *,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        pictures: Pictures = NO_PICTURES,
    ) -> Prompt:
        """What every conversation that begins with these messages begins with."""
        encode = functools.partial(
            self.chat,
            template_kwargs=template_kwargs,
            tools=tools,
            add_generation_prompt=False,
            pictures=pictures,
        )
        probed = _probed(messages, encode)
        prompt = self._edges.common(probed) if probed else encode(messages)
        if probed and (alone := _alone(messages, encode)):
            # Up to where the messages themselves end: then a request for just them matches too.
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
        """What is known after a turn whose client got `text`; nothing when the prompt has no text.

        The client sends the whole text back, so all of it decides which parts are literals.
        """
        if not prompt.escaped:
            return None
        before = KnownPrefix(prompt.escaped, prompt.tokens)
        if prompt.raw:
            spans = completion_spans(self._control, prompt.escaped, text)
            return None if spans is None else extended(self._tokenizer, before, reply, spans)
        if self._template_trims:
            kept, _ = matching_tokens(self._tokenizer, reply, text.rstrip().encode())
            reply = reply[:kept]
        return extended(self._tokenizer, before, reply, list(self._control.split(text)))

    def _required_template(self) -> ChatTemplate:
        if self._template is None:
            raise TemplateFailed(
                "This model has no chat template. Send it a prompt through /v1/completions."
            )
        return self._template

    @functools.cached_property
    def _template_trims(self) -> bool:
        """Whether the template takes blanks from the end of a reply."""
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PADDED}]
        try:
            rendered = self._required_template().render(talk, add_generation_prompt=False)
        except TemplateFailed:
            return True
        return PADDED not in rendered

    def _tokenise(
        self,
        spans: Sequence[Span],
        escaped: bytes,
        recall: Recall | None,
        pictures: Pictures = NO_PICTURES,
    ) -> tuple[Tokens, KnownPrefix]:
        """The prompt's tokens, and the known prefix that was used for them."""
        known = recall(escaped) if recall else None
        known = with_media(known, pictures) if known and pictures else known
        if known is not None:
            rest = tokens_after(
                self._tokenizer, self._control, known, escaped, pictures, spaced=self._spaced
            )
            if rest is not None:
                return known.tokens + rest, known
        tokens = tokenise(self._tokenizer, spans, pictures)
        return Tokens.of(self._bos(tokens)) + tokens, NOTHING

    @functools.cached_property
    def _spaced(self) -> bool:
        return adds_space(self._tokenizer)  # once: llama.cpp takes half a millisecond for any text

    def _bos(self, tokens: Tokens) -> list[int]:
        """What goes in front of `tokens`; nothing when the template wrote it already."""
        bos = self._tokenizer.bos
        if bos is None or not self._tokenizer.add_bos or bos in tokens[:1]:
            return []
        return [bos]


def _hidden_tools(
    escaper: Escaper, tools: Sequence[Any] | None, earlier: ChatPrompt | None
) -> tuple[Sequence[Any] | None, bool]:
    """The tools as the template may see them, and whether there is nothing to escape in them."""
    if earlier is not None and earlier.tools is tools and earlier.plain_tools:
        return tools, True
    before = escaper.literals
    hidden = escaper.hide(tools)
    return hidden, escaper.literals == before


def _alone(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], Prompt]
) -> Prompt | None:
    """The messages by themselves, if the template takes them so and shows the last one."""
    try:
        prompt = encode(messages)
    except TemplateFailed:
        return None
    spans = prompt.spans
    return prompt if spans and spans[-1].index == len(messages) - 1 else None


def _probed(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], Prompt]
) -> list[Prompt]:
    """The messages with each probe after them; nothing where no user message may follow."""
    if messages and messages[-1].get("role") == "user":
        return []
    try:
        return [encode([*messages, {"role": "user", "content": probe}]) for probe in PROBES]
    except TemplateFailed:
        return []


def _up_to_last_text(render: Render) -> Render:
    """Renders conversations up to the end of their last message's text, blanks at it included."""
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


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("The prompt is not valid Unicode: it holds half a character.") from error
