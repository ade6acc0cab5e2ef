"""Lists families of models that people use, by short names, and where a hub has them.

`qwen3` means its default size and `qwen3:4b` a given one. A quantisation may follow, as in
`qwen3:4b-q8_0`, or `mlx` for the model in MLX's format. Sizes in bytes, licences and quantisations
are read from the hub. `tools/check_families.py` checks that every repository exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MLX = "mlx"
LATEST = "latest"  # as Ollama calls the default size


@dataclass(frozen=True, slots=True)
class FamilyMember:
    """One size of a family: the repositories with GGUF files and with MLX's format."""

    gguf: str
    mlx: str | None = None


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Sizes, from small to large. The bare name of the family means `default`."""

    default: str
    members: Mapping[str, FamilyMember]
    kind: str = "chat"


@dataclass(frozen=True, slots=True)
class FamilyName:
    """What a short name means: a repository, and a quantisation if the name has one."""

    name: str  # with the size
    repo: str
    quant: str | None = None


def _community(name: str) -> str:
    return f"mlx-community/{name}"


def _qwen3(size: str) -> FamilyMember:
    return FamilyMember(f"unsloth/Qwen3-{size}-GGUF", _community(f"Qwen3-{size}-4bit"))


def _gemma3(size: str) -> FamilyMember:
    name = f"gemma-3-{size}-it"
    return FamilyMember(f"ggml-org/{name}-GGUF", _community(f"{name}-4bit"))


def _llama(name: str, quantised: str = "bartowski") -> FamilyMember:
    return FamilyMember(f"{quantised}/{name}-GGUF", _community(f"{name}-4bit"))


def _qwen3_vl(size: str) -> FamilyMember:
    return FamilyMember(f"unsloth/Qwen3-VL-{size}-Instruct-GGUF")


FAMILIES: Mapping[str, ModelFamily] = {
    "qwen3": ModelFamily(
        "8b",
        {
            "0.6b": _qwen3("0.6B"),
            "1.7b": _qwen3("1.7B"),
            "4b": _qwen3("4B"),
            "8b": _qwen3("8B"),
            "14b": _qwen3("14B"),
            "30b": _qwen3("30B-A3B"),
            "32b": _qwen3("32B"),
        },
    ),
    "gemma3": ModelFamily(
        "4b",
        {
            "1b": _gemma3("1b"),
            "4b": _gemma3("4b"),
            "12b": _gemma3("12b"),
            "27b": _gemma3("27b"),
        },
    ),
    "llama3.1": ModelFamily("8b", {"8b": _llama("Meta-Llama-3.1-8B-Instruct")}),
    "llama3.2": ModelFamily(
        "3b", {"1b": _llama("Llama-3.2-1B-Instruct"), "3b": _llama("Llama-3.2-3B-Instruct")}
    ),
    "llama3.3": ModelFamily("70b", {"70b": _llama("Llama-3.3-70B-Instruct")}),
    "mistral": ModelFamily("7b", {"7b": _llama("Mistral-7B-Instruct-v0.3")}),
    "mistral-nemo": ModelFamily("12b", {"12b": _llama("Mistral-Nemo-Instruct-2407")}),
    "mistral-small3.2": ModelFamily(
        "24b", {"24b": FamilyMember("unsloth/Mistral-Small-3.2-24B-Instruct-2506-GGUF")}
    ),
    "phi3.5": ModelFamily("3.8b", {"3.8b": _llama("Phi-3.5-mini-instruct")}),
    "phi4": ModelFamily("14b", {"14b": _llama("phi-4")}),
    "phi4-mini": ModelFamily("3.8b", {"3.8b": _llama("Phi-4-mini-instruct", "unsloth")}),
    "gpt-oss": ModelFamily(
        "20b",
        {
            "20b": FamilyMember("ggml-org/gpt-oss-20b-GGUF", _community("gpt-oss-20b-MXFP4-Q8")),
            "120b": FamilyMember("ggml-org/gpt-oss-120b-GGUF"),
        },
    ),
    "smollm3": ModelFamily(
        "3b", {"3b": FamilyMember("ggml-org/SmolLM3-3B-GGUF", _community("SmolLM3-3B-4bit"))}
    ),
    "qwen3-vl": ModelFamily(
        "4b",
        {
            "2b": _qwen3_vl("2B"),
            "4b": _qwen3_vl("4B"),
            "8b": _qwen3_vl("8B"),
            "30b": _qwen3_vl("30B-A3B"),
            "32b": _qwen3_vl("32B"),
        },
        "chat with images",
    ),
    "qwen3-embedding": ModelFamily(
        "0.6b",
        {
            "0.6b": FamilyMember("Qwen/Qwen3-Embedding-0.6B-GGUF"),
            "4b": FamilyMember("Qwen/Qwen3-Embedding-4B-GGUF"),
            "8b": FamilyMember("Qwen/Qwen3-Embedding-8B-GGUF"),
        },
        "embeddings",
    ),
    "nomic-embed-text": ModelFamily(
        "v1.5", {"v1.5": FamilyMember("nomic-ai/nomic-embed-text-v1.5-GGUF")}, "embeddings"
    ),
    "bge-m3": ModelFamily("567m", {"567m": FamilyMember("gpustack/bge-m3-GGUF")}, "embeddings"),
    "bge-reranker": ModelFamily(
        "v2-m3", {"v2-m3": FamilyMember("gpustack/bge-reranker-v2-m3-GGUF")}, "reranking"
    ),
}


def find_in_families(name: str) -> FamilyName | None:
    """Return what a short name means, or None if it is not a name of a family and size."""
    family_name, _, size = name.lower().partition(":")
    family = FAMILIES.get(family_name)
    if family is None or name.endswith((":", "-")):
        return None
    if size in ("", LATEST):
        size = family.default
    form = ""
    if size not in family.members:
        size, _, form = size.rpartition("-")
    member = family.members.get(size)
    if member is None:
        return None
    full = f"{family_name}:{size}"
    if form == MLX:
        return FamilyName(f"{full}-{MLX}", member.mlx) if member.mlx else None
    return FamilyName(full, member.gguf, form.upper() or None)


def repositories() -> Iterator[tuple[str, str]]:
    """Every short name with its repository, for the check of the whole catalogue."""
    for family_name, family in FAMILIES.items():
        for size, member in family.members.items():
            yield f"{family_name}:{size}", member.gguf
            if member.mlx:
                yield f"{family_name}:{size}-{MLX}", member.mlx


def name_of_repo(repo: str) -> str | None:
    """The short name of a repository, or None if no family has it."""
    return next((name for name, known in repositories() if known == repo), None)


def smaller_names(name: str) -> list[str]:
    """The names of the smaller sizes of the same family, from large to small."""
    family_name, _, size = name.partition(":")
    family = FAMILIES.get(family_name)
    sizes = list(family.members) if family else []
    smaller = sizes[: sizes.index(size)] if size in sizes else []
    return [f"{family_name}:{each}" for each in reversed(smaller)]
