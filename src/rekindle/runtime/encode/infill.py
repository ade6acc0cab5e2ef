"""Builds the prompts of text completions that are more than one text: mixed ones, and infills.

An infill asks the model for the text of a gap. The prompt has the text before and after the gap,
each behind a token that the model was trained with, and excerpts of other files in front of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rekindle.errors import Unsupported
from rekindle.protocol.requests import ExtraFile, Infill
from rekindle.runtime.encode.threads import check_token_ids
from rekindle.tokens import FimTokens, Tokenizer

REPOSITORY = "myproject\n"  # placeholder, because clients do not send a name
FILE = "filename\n"  # the same for the file with the gap
SEPARATOR = "\n\n--- snippet ---\n\n"  # between excerpts, for models without a token for it
PREFIX_SHARE = 0.75  # largest part of the prompt for the text before the gap
DEFAULT_REPLY_TOKENS = 256  # room that is left for a reply without a limit


def mixed_tokens(parts: Sequence[int | str], tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a prompt of ids and texts. BOS comes first only before a text."""
    check_token_ids((each for each in parts if isinstance(each, int)), tokenizer, "prompt")
    starts_with_text = isinstance(parts[0], str)
    found = [tokenizer.bos] if starts_with_text and tokenizer.add_bos else []
    tokens = [token for token in found if token is not None]
    for part in parts:
        tokens += [part] if isinstance(part, int) else tokenizer.encode(part, special=True)
    return tokens


class InfillEncoder:
    """Encodes infills for one model. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, context_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens

    def encode(self, infill: Infill, start: str, max_tokens: int | None) -> list[int]:
        """Return the prompt of an infill. `start` is the beginning of the text in the gap.

        What does not fit is left out: the beginning of the prefix, the end of the suffix, and
        first of all the excerpts. Raises Unsupported if the model has no tokens for it.
        """
        fim = self._tokenizer.fim
        if fim is None:
            raise Unsupported(
                "This model cannot fill in the middle: its vocabulary has no tokens for prefix, "
                "suffix and middle. Serve a model for code that has them.",
                param="model",
            )
        reply = min(max_tokens or DEFAULT_REPLY_TOKENS, self._context_tokens // 2)
        room = max(self._context_tokens - reply - 4, 0)  # 4: BOS and three control tokens
        inside = self._last(start, room // 2)
        prefix = self._last(infill.prefix, int((room - len(inside)) * PREFIX_SHARE))
        suffix = self._first(infill.suffix, room - len(inside) - len(prefix))
        around = [fim.prefix, *prefix, fim.suffix, *suffix, fim.middle, *inside]
        left = room - len(inside) - len(prefix) - len(suffix)
        excerpts = self._excerpts(infill.extra, fim)
        bos = [self._tokenizer.bos] if self._tokenizer.add_bos else []
        return [
            *(token for token in bos if token is not None),
            *excerpts[max(len(excerpts) - left, 0) :],
            *around,
        ]

    def _excerpts(self, extra: Iterable[ExtraFile], fim: FimTokens) -> list[int]:
        """Return the excerpts, as the model saw the files of a repository when it was trained."""
        tokens: list[int] = []
        for each in extra:
            head = self._plain(SEPARATOR)
            if fim.file is not None:
                head = [fim.file, *self._plain(f"{each.filename}\n")]
            tokens += [*head, *self._plain(each.text)]
        if tokens and fim.repository is not None:
            tokens = [fim.repository, *self._plain(REPOSITORY), *tokens]
        if tokens and fim.file is not None:
            tokens += [fim.file, *self._plain(FILE)]
        return tokens

    def _last(self, text: str, count: int) -> list[int]:
        """Return the last tokens of a text, without tokenising much more than them."""
        tokens = self._plain(text[-count * self._tokenizer.longest_bytes :]) if count else []
        return tokens[-count:] if count else []

    def _first(self, text: str, count: int) -> list[int]:
        return self._plain(text[: count * self._tokenizer.longest_bytes])[:count]

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=False)
