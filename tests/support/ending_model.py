"""Writes a tiny model whose replies are nonsense, but end.

Its weights are random, except for one direction of the embedding that all tokens share. The output
rows of tokens that end a reply or a JSON string point along this direction, so replies end soon. A
reply begins after a line break, which has the opposite direction. Therefore no reply is empty,
whatever the rounding of a machine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.tiny import CONTROL, VOCABULARY, TinyModel, write_llama

SHARED = 6.0  # length along the shared direction; in other directions it is about one


class EndingModel(TinyModel):
    ending = 2.0  # how much more likely an end is than other tokens

    @property
    def vocabulary_size(self) -> int:
        return VOCABULARY

    @property
    def ends(self) -> list[int]:
        """The tokens that end a reply, a string and an object."""
        return [CONTROL.index("<|end|>"), len(CONTROL) + ord('"'), len(CONTROL) + ord("}")]

    @property
    def line_break(self) -> int:
        return len(CONTROL) + ord("\n")

    def matrix(self, name: str, columns: int, rows: int, scale: float | None = None) -> None:
        if name != "token_embd.weight":
            super().matrix(name, columns, rows, scale)
            return
        rows = self.vocabulary_size
        embedding = self._random.standard_normal((rows, columns)).astype(np.float32)
        output = self._random.standard_normal((rows, columns)).astype(np.float32) * columns**-0.5
        embedding[:, 0] = SHARED
        output[:, 0] = 0.0
        embedding[self.line_break, 0] = -SHARED
        output[self.ends, 0] = self.ending
        self.writer.add_tensor(name, embedding)
        self.writer.add_tensor("output.weight", output)


def write_ending(
    path: Path, *, context: int = 8192, layers: int = 1, kind: type[EndingModel] = EndingModel
) -> Path:
    return write_llama(path, layers=layers, context=context, kind=kind)
