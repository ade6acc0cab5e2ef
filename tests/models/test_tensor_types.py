from __future__ import annotations

import gguf

from rekindle.models.tensor_types import BLOCKS


def test_every_type_of_the_reference_package_has_its_size() -> None:
    reference = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    del reference[9]  # Q8_1: the package says 40 bytes, ggml itself 36; files never hold it
    assert {kind: BLOCKS[kind] for kind in reference} == reference
