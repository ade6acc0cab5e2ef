"""How much text the messages of one request may become."""

from __future__ import annotations

from rekindle.api.fields import MOST_CHARACTERS
from rekindle.errors import BadRequest


class TextAllowance:
    """Of one request: a few bytes of it may stand for much, as those of a reference to a tool and
    of a packed text do."""

    def __init__(self, characters: int = MOST_CHARACTERS, *, param: str = "messages") -> None:
        """`param`: the request's field that has the messages."""
        self._param = param
        self._left = characters

    def take(self, text: str) -> str:
        """A text that becomes part of a message."""
        self.spend(len(text))
        return text

    def spend(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise BadRequest(
                f"`{self._param}` may become at most {MOST_CHARACTERS} characters of text, with "
                "the tools that are referred to and the reasoning that is packed in it: send less.",
                param=self._param,
            )
