"""English-like text made of common words, the same for the same source of chance."""

from __future__ import annotations

from random import Random

_LINES = {
    "person": "teacher doctor farmer writer painter driver captain student baker singer",
    "deed": "found built moved carried opened painted watched measured repaired described",
    "kind": "old small quiet heavy bright open narrow early common wooden",
    "thing": "bridge garden letter engine window market river house table tower",
    "place": "village harbor station library valley forest island city school museum",
    "time": "spring winter summer morning evening autumn weather darkness silence company",
    "short": "time work life hand part place case week point fact home water room area money",
}
WORDS = {kind: line.split() for kind, line in _LINES.items()}
SENTENCE = "The {kind} {person} {deed} the {thing} near the {place} in the {time}."
SENTENCES_A_PARAGRAPH = 5
NONCE_WORDS = 6


def prose(chance: Random, words: int) -> str:
    """Paragraphs of whole sentences, with at least this many words."""
    sentences: list[str] = []
    while words > 0:
        sentences.append(_sentence(chance))
        words -= len(sentences[-1].split())
    starts = range(0, len(sentences), SENTENCES_A_PARAGRAPH)
    return "\n\n".join(" ".join(sentences[n : n + SENTENCES_A_PARAGRAPH]) for n in starts)


def filler(chance: Random, words: int) -> str:
    """Exactly this many short words, each one token for nearly every tokeniser."""
    return " ".join(chance.choice(WORDS["short"]) for _ in range(words))


def nonce(chance: Random) -> str:
    """A line nobody sent before: put first, it keeps a server from reusing an older prompt."""
    every = [word for words in WORDS.values() for word in words]
    return " ".join(chance.choice(every) for _ in range(NONCE_WORDS)).capitalize()


def _sentence(chance: Random) -> str:
    return SENTENCE.format(**{kind: chance.choice(words) for kind, words in WORDS.items()})
