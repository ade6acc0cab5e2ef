"""Compares embeddings per second with ONNX Runtime: same weights, threads and texts, in turns.

The peer is not a dependency, so run `pip install onnx onnxruntime tokenizers` first. It runs inside
this process, like Rekindle's engine in the first column. The second column is the real server over
HTTP, with all its costs. No text is sent twice, so nothing is reused.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import gguf
import httpx
import numpy as np
import typer
from onnx_bert import OnnxBert
from rich.console import Console
from rich.table import Table
from servers import Setup, rekindle

from rekindle.config import load_config
from rekindle.engine.base import EngineOptions
from rekindle.engine.registry import load_embedder
from rekindle.models.progress import progress_on
from rekindle.models.pull import pull

Embed = Callable[[Sequence[str]], Any]

REQUEST_INPUTS = 64  # texts per batched request
REQUESTS_AT_ONCE = 3
TARGET = 0.9


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    words: tuple[int, int]  # minimum and maximum tokens per text
    together: int  # texts per call


SCENARIOS = (
    Scenario("short texts, one at a time", (5, 15), 1),
    Scenario("short texts, large batch", (5, 15), 512),
    Scenario("128 tokens, one at a time", (126, 126), 1),
    Scenario("128 tokens, large batch", (126, 126), 128),
)


class Texts:
    """Texts of words with one token each, in an order that never repeats."""

    def __init__(self, path: Path) -> None:
        reader: Any = gguf.GGUFReader(path)
        tokens = reader.fields["tokenizer.ggml.tokens"].contents()
        whole = (token[1:] for token in tokens if token.startswith("\u2581"))
        self._words = [word for word in whole if word.isascii() and word.isalpha()]
        self._random = Random(0)

    def take(self, scenario: Scenario, count: int) -> list[str]:
        sizes = (self._random.randint(*scenario.words) for _ in range(count))
        return [" ".join(self._random.choices(self._words, k=size)) for size in sizes]


def over_http(url: str) -> Embed:
    client = httpx.Client(base_url=url, timeout=300, trust_env=False)
    threads = ThreadPoolExecutor(REQUESTS_AT_ONCE)

    def ask(texts: Sequence[str]) -> Any:
        body = {"input": list(texts), "encoding_format": "base64"}
        answer = client.post("/v1/embeddings", json=body)
        answer.raise_for_status()
        return len(answer.json()["data"])

    def embed(texts: Sequence[str]) -> Any:
        starts = range(0, len(texts), REQUEST_INPUTS)
        return list(threads.map(ask, [texts[at : at + REQUEST_INPUTS] for at in starts]))

    return embed


def rate(embed: Embed, scenario: Scenario, texts: Texts, seconds: float) -> float:
    """Texts per second, measured for about this long."""
    done, took_s = 0, 0.0
    while took_s < seconds:
        given = texts.take(scenario, scenario.together)
        started_s = time.perf_counter()
        embed(given)
        took_s += time.perf_counter() - started_s
        done += len(given)
    return done / took_s


def main(
    threads: Annotated[int, typer.Option(help="Threads per side")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds per scenario")] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds per measurement")] = 1.0,
) -> None:
    """Compare them; a missed target is shown."""
    console = Console()
    models_dir, progress = load_config({}).models_dir, progress_on(console)
    path, chat = (
        pull(name, models_dir=models_dir, progress=progress) for name in ("minilm", "smollm2")
    )
    embedder = load_embedder(EngineOptions(path=path, threads=threads))
    peer = OnnxBert(path, threads)
    texts = Texts(path)

    def engine(given: Sequence[str]) -> Any:
        return embedder.embed([embedder.encode(text) for text in given])

    sample = texts.take(SCENARIOS[1], 50)
    cosine = (np.asarray(engine(sample)) * peer.embed(sample)).sum(axis=1).min()
    setup = Setup(model=chat, slots=1, threads=threads, embedding_model=path)
    with (
        tempfile.TemporaryDirectory() as folder,
        rekindle(setup, Path(folder) / "log") as server,
    ):
        ways = {"engine": engine, "server": over_http(server.url), "ONNX Runtime": peer.embed}
        for embed in ways.values():
            embed(texts.take(SCENARIOS[0], 8))
        table = Table("texts a second", *ways, "engine / ONNX", "server / ONNX")
        for scenario in SCENARIOS:
            found: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, embed in ways.items():
                    found[name].append(rate(embed, scenario, texts, seconds))
            table.add_row(scenario.name, *_figures(found))
    console.print(table)
    console.print(f"{threads} threads, medians of {rounds} rounds; lowest cosine {cosine:.5f}")
    embedder.close()


def _figures(found: dict[str, list[float]]) -> list[str]:
    """Medians, and medians of the ratios per round. Disturbances in a round affect all sides."""
    medians = [f"{statistics.median(each):.0f}" for each in found.values()]
    peers = found["ONNX Runtime"]
    ratios = [
        statistics.median(own / peer for own, peer in zip(found[name], peers, strict=True))
        for name in ("engine", "server")
    ]
    return [*medians, *(f"{each:.2f}{'' if each >= TARGET else ' (missed)'}" for each in ratios)]


if __name__ == "__main__":
    typer.run(main)
