"""Writes the prompt with which a decoder judges whether a document answers a query."""

from __future__ import annotations

import re
from functools import partial

from rekindle.errors import ModelError
from rekindle.tokens import Tokenizer, any_of

#: The prompt of Qwen3-Reranker, for models that bring none.
QWEN3_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_PLACE = re.compile(r"\{(query|document)\}")


class RerankPrompt:
    """A prompt with places for `{query}` and `{document}`."""

    def __init__(self, tokenizer: Tokenizer, prompt: str) -> None:
        """Raises ModelError if a place is missing, so that no text is ignored."""
        if set(_PLACE.findall(prompt)) != {"query", "document"}:
            raise ModelError(
                "the model's prompt for ranking has no {query} and {document}: give another file"
            )
        control = tokenizer.control_texts
        self._tokenizer = tokenizer
        self._parts = [
            control.get(part, part) for part in re.split(f"({any_of(control)})", prompt) if part
        ]

    def encode(self, query: str, document: str) -> list[int]:
        """Tokenize the prompt of a pair. Control tokens come from the prompt, never from a text."""
        texts = {"query": query, "document": document}
        ids: list[int] = []
        # Texts are filled in before tokenizing, because neighbouring characters merge into tokens.
        for part in self._parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                filled = _PLACE.sub(partial(_text_at, texts), part)
                ids += self._tokenizer.encode(filled, special=False)
        return ids


def _text_at(texts: dict[str, str], place: re.Match[str]) -> str:
    return texts[place[1]]
