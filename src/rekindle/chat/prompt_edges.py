"""Where the tokens of a prompt are in its text, and what several prompts begin with."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from rekindle.chat.escaping import escape_prefix, spans_from, unescape
from rekindle.chat.known_prefix import KnownPrefix, is_character_boundary
from rekindle.chat.message_spans import TokenEdges, token_offsets
from rekindle.chat.prompt import Prompt
from rekindle.tokens import MEDIA_BIT, Tokenizer, Tokens

NOTHING = KnownPrefix(b"", Tokens())


class PromptEdges:
    """For the prompts of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._piece = functools.cache(functools.partial(tokenizer.piece, special=True))

    def texts(self, tokens: Tokens) -> list[bytes]:
        """The text of each token; those of pictures have none."""
        return [self._piece(token) if token < MEDIA_BIT else b"" for token in tokens]

    def of(self, prompt: Prompt, known: KnownPrefix = NOTHING) -> TokenEdges:
        """Where the tokens are in the text: all of them, or, when those of the known prefix stand
        for another text than is rendered, those after it."""
        tokens, escaped = prompt.tokens, prompt.escaped
        pieces, text = self._pieces(prompt), unescape(escaped)
        if self._is_bos_added(tokens) and not escaped.startswith(pieces[0]):
            pieces[0] = b""
        if offsets := token_offsets(pieces, text):
            return TokenEdges(offsets)
        count, at_bytes = len(known.tokens), len(unescape(known.escaped))
        if not count:
            return TokenEdges(())
        return TokenEdges(token_offsets(pieces[count:], text[at_bytes:]), count, at_bytes)

    def _pieces(self, prompt: Prompt) -> list[bytes]:
        """The text of each token. What stands for a picture begins with its first token and ends
        with its last, so that no message seems to begin or end inside it."""
        pieces = self.texts(prompt.tokens)
        for text, (start, stop) in prompt.placed_pictures:
            inside = [b""] * (stop - start - 2)
            pieces[start:stop] = [text[:1].encode(), *inside, text[1:].encode()]
        return pieces

    def _is_bos_added(self, tokens: Tokens) -> bool:
        return self._tokenizer.add_bos and tokens[:1].ids() == [self._tokenizer.bos]

    def common(self, prompts: Sequence[Prompt]) -> Prompt:
        """What all of these begin with."""
        first, *others = prompts
        return self.first(first, min(first.tokens.common_prefix(each.tokens) for each in others))

    def first(self, prompt: Prompt, count: int) -> Prompt:
        """The prompt up to a token; without escaped bytes where tokens do not match the text."""
        offsets, text = self.of(prompt).offsets, unescape(prompt.escaped)
        inside = (start for _, (start, stop) in prompt.placed_pictures if start < count < stop)
        count = next(inside, count)
        while offsets and not is_character_boundary(text, offsets[count]):
            count -= 1
        escaped = escape_prefix(spans_from(prompt.escaped, 0), offsets[count]) if offsets else b""
        spans = tuple(span for span in prompt.spans if span.end <= count)
        return Prompt(prompt.tokens[:count], spans, escaped, pictures=prompt.pictures)
