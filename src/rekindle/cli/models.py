"""Implements `rekindle ls`, `ps`, `rm` and `show`: the models on this machine and on a server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from rekindle.cli.cache_client import CacheClient
from rekindle.cli.cache_views import ago, pairs, plain
from rekindle.models.catalogue import (
    CATALOGUE,
    DEFAULT_EMBEDDING_MODEL,
    DEFAULT_MODEL,
    DEFAULT_VISION_MODEL,
)
from rekindle.models.families import FAMILIES
from rekindle.models.folder import CONFIG, read_json
from rekindle.models.gguf import check_gguf, summarise_gguf
from rekindle.models.gguf_files import best_projector
from rekindle.models.local import PulledModel

#: What the small models of the catalogue are for.
DEMOS = {
    DEFAULT_MODEL: "first steps",
    DEFAULT_VISION_MODEL: "first steps with images",
    DEFAULT_EMBEDDING_MODEL: "embeddings",
}
LOAD_TIMEOUT_S = 3600.0  # loading may download the model first
#: The quantisation in the name of a file.
QUANT = re.compile(r"(?<![a-z0-9])(i?q\d(_[a-z0-9]+)*|b?f16|f32|mxfp4)(?![a-z0-9_])", re.IGNORECASE)
#: Fields of a GGUF header that `show` prints under another name.
FIELDS = {"licence": "general.license", "made by": "general.organization"}


def models_table(models: Sequence[PulledModel]) -> RenderableType:
    """One line per pulled model."""
    if not models:
        return Text(
            "There are no models here yet. Try `rekindle run`, or `rekindle pull qwen3:0.6b`."
        )
    rows = ((model.name, decimal(model.size_bytes), ago(model.pulled_s)) for model in models)
    return _table(("name", "size", "pulled"), rows)


def catalogue_table() -> RenderableType:
    """One line per name that can be pulled."""
    rows = [(name, "", f"{DEMOS[name]}, from PyPI") for name in CATALOGUE]
    for name, family in FAMILIES.items():
        rows.append((name, ", ".join(family.members), family.kind))
    return _table(("name", "sizes", "for"), rows)


def running_table(models: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One line per model that a server has loaded."""
    rows = (
        (
            str(model["name"]).removesuffix(":latest"),
            model["details"]["parameter_size"] or "unknown",
            model["details"]["quantization_level"] or "unknown",
            decimal(model["size"]),
            f"{model['context_length']:,} tokens",
        )
        for model in models
    )
    return _table(("name", "parameters", "quantisation", "size", "context"), rows)


def change_model(
    verb: Literal["load", "unload"],
    name: str,
    base_url: str,
    api_key: str | None,
    transport: httpx.BaseTransport | None = None,
) -> str:
    """Load or unload a model of a server. Returns a sentence about it."""
    client = CacheClient(base_url, api_key, transport, timeout_s=LOAD_TIMEOUT_S)
    state = client.send("POST", f"/internal/model/{verb}", json={"model": name})
    if verb == "unload":
        return f"{state['name']} is {state['status']}."
    memory = f", {decimal(state['memory_bytes'])} of memory" if state["memory_bytes"] else ""
    return f"{state['name']} is {state['status']}{memory}."


def running_models(
    base_url: str, api_key: str | None, transport: httpx.BaseTransport | None = None
) -> list[dict[str, Any]]:
    """Ask a server which models it has loaded."""
    root = base_url.rstrip("/").removesuffix("/v1")
    found: list[dict[str, Any]] = CacheClient(root, api_key, transport).send("GET", "/api/ps")[
        "models"
    ]
    return found


def _table(titles: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        figure = title in ("size", "context")
        table.add_column(
            title, overflow="fold", no_wrap=figure, justify="right" if figure else "left"
        )
    for row in rows:
        table.add_row(*map(plain, row))
    return table


def model_table(model: PulledModel) -> RenderableType:
    """What the files of a model say about it."""
    details = _of_folder(model.path) if model.path.is_dir() else _of_files(model)
    return pairs(
        {
            "name": model.name,
            **details,
            "size": decimal(model.size_bytes),
            "pulled": ago(model.pulled_s),
            "path": str(model.path),
        }
    )


def _of_files(model: PulledModel) -> dict[str, str]:
    ggufs = [path for path in model.files if path.suffix == ".gguf"]
    for path in ggufs:
        check_gguf(path)
    summaries = [summarise_gguf(path) for path in ggufs]
    fields = summaries[0].fields
    architecture = str(fields.get("general.architecture", "unknown"))
    context = fields.get(f"{architecture}.context_length")
    projector = best_projector([path.name for path in model.shared])
    quant = QUANT.search(model.path.name)
    known = {
        "format": "GGUF",
        "architecture": architecture,
        "quantisation": quant[0].upper() if quant else None,
        "parameters": f"{sum(summary.parameters for summary in summaries):,}",
        "context": f"{context:,} tokens" if isinstance(context, int) else None,
        "projector": projector,
        **{title: fields.get(field) for title, field in FIELDS.items()},
    }
    return {title: str(value) for title, value in known.items() if value}


def _of_folder(folder: Path) -> dict[str, str]:
    config = read_json(folder / CONFIG)
    quantisation = config.get("quantization")
    bits = quantisation.get("bits") if isinstance(quantisation, dict) else None
    context = config.get("max_position_embeddings")
    known = {
        "format": "MLX",
        "architecture": config.get("model_type"),
        "quantisation": f"{bits} bits" if bits else None,
        "context": f"{context:,} tokens" if isinstance(context, int) else None,
    }
    return {title: str(value) for title, value in known.items() if value}
