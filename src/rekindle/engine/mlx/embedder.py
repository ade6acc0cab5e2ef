"""Computes embeddings and rerank scores with the models in folders.

Encoders come from `encoders.py`, decoders from mlx_lm without their head. Inputs of similar length
are padded to one length and computed together. Padding comes last, where no token sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
from mlx.nn.layers.base import Module

from rekindle.engine.base import EmbedderInfo, EngineOptions, Matrix, OnProgress
from rekindle.engine.mlx import memory
from rekindle.engine.mlx.encoders import DIALECTS, load_encoder
from rekindle.engine.mlx.model import (
    CONTEXT_LENGTHS,
    UNLIMITED_TOKENS,
    check_model,
    first_number,
    one_sentence,
    read_weights,
)
from rekindle.engine.mlx.tokenizer import FolderTokenizer, load_tokenizer
from rekindle.engine.rerank import QWEN3_PROMPT, RerankPrompt
from rekindle.errors import EngineBroken, ModelError
from rekindle.models.folder import CONFIG, check_folder, read_json
from rekindle.models.pooling import Pooling, read_modules

DECODERS = ("llama", "mistral", "qwen2", "qwen3")  # of mlx_lm; tests compare them with NumPy
CALL_TOKENS = {"cpu": 1024, "gpu": 8192}  # with padding, unless one input has more
CACHE_BYTES = 256 << 20  # freed buffers that MLX keeps
DEFAULT_CONTEXT = 8192  # not more by default: attention grows with it


@dataclass(frozen=True, slots=True)
class Padded:
    """Inputs of one call. `tokens` has zeros after the end of an input."""

    tokens: mx.array
    lengths: mx.array

    @classmethod
    def of(cls, inputs: Seq[Seq[int]]) -> Padded:
        tokens = np.zeros((len(inputs), max(map(len, inputs))), np.uint32)
        for row, each in zip(tokens, inputs, strict=True):
            row[: len(each)] = each
        return cls(mx.array(tokens), mx.array([len(each) for each in inputs]))

    @property
    def mask(self) -> mx.array:
        """False for padding."""
        return mx.arange(self.tokens.shape[1])[None] < self.lengths[:, None]


States = Callable[[Padded], mx.array]  # the last states of all tokens
Rows = Callable[[mx.array, Padded], mx.array]  # of the states: one row for each input


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A loaded model. Its arrays are lazy."""

    module: Module
    states: States
    rows: Rows
    dimensions: int
    context_tokens: int
    normalises: bool = True
    ranks: bool = False
    prompt: str | None = None  # around the pairs of a reranker


def load_text_model(folder: Path, tokenizer: FolderTokenizer, config: dict[str, Any]) -> TextModel:
    """Load an encoder or a decoder with what follows it. Raises ModelError."""
    kind = config["model_type"]
    if kind in DIALECTS:
        return _encoder(folder, tokenizer, config)
    if kind not in DECODERS:
        raise ModelError(
            f"{folder.name} is of the architecture {str(kind)[:60]!r}, whose embeddings MLX does "
            f"not compute here: serve a GGUF file of it, or a model of one of the architectures "
            f"{', '.join((*DIALECTS, *DECODERS))}"
        )
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise ModelError(
            f"{folder.name} is a decoder whose tokens see the whole text ({CONFIG}), which MLX "
            "does not compute here: serve a GGUF file of it"
        )
    return _decoder(folder, tokenizer, config)


def _encoder(folder: Path, tokenizer: FolderTokenizer, config: dict[str, Any]) -> TextModel:
    ranks = _has_score_head(config)
    model = load_encoder(folder, config, with_head=ranks)
    modules = read_modules(folder)
    _check_scores(folder, model.classes if ranks else 1)
    segment_end = tokenizer.second_segment_after if ranks and model.segments > 1 else None

    def states(inputs: Padded) -> mx.array:
        segments = None
        if segment_end is not None:
            ends = (inputs.tokens == segment_end).astype(mx.uint32)
            segments = mx.minimum(ends.cumsum(axis=1) - ends, 1)
        return model(inputs.tokens, inputs.mask, segments)

    def scores(states: mx.array, _inputs: Padded) -> mx.array:
        return mx.sigmoid(model.head(states[:, 0]).astype(mx.float32))

    return TextModel(
        module=model,
        states=states,
        rows=scores if ranks else partial(_pooled, modules.pooling or "mean"),
        dimensions=model.width,
        context_tokens=model.context_tokens,
        normalises=modules.normalises,
        ranks=ranks,
    )


def _pooled(pooling: Pooling, states: mx.array, inputs: Padded) -> mx.array:
    if pooling == "cls":
        return states[:, 0]
    if pooling == "last":
        return states[mx.arange(len(states)), inputs.lengths - 1]
    kept = mx.where(inputs.mask[..., None], states.astype(mx.float32), 0)
    return kept.sum(axis=1) / inputs.lengths[:, None]


def _has_score_head(config: dict[str, Any]) -> bool:
    named = config.get("architectures")
    return isinstance(named, list) and "ForSequenceClassification" in str(named[:1])


def _check_scores(folder: Path, classes: int) -> None:
    if classes != 1:
        raise ModelError(
            f"{folder.name} sorts texts into {classes} classes: only models with one score or with "
            "embeddings are supported"
        )


def _decoder(folder: Path, tokenizer: FolderTokenizer, config: dict[str, Any]) -> TextModel:
    modules = read_modules(folder)
    has_head = _has_score_head(config)
    judges = not has_head and (modules.score_tokens is not None or _is_judge(folder, config))
    if (has_head or judges) and config["model_type"] != "qwen3":
        raise ModelError(
            f"{folder.name} ranks documents with a prompt that is not known here. Of decoders, "
            "only Qwen3-Reranker is supported"
        )
    loading = _DecoderLoading(keeps_head=judges)
    model, _ = mlx_lm.utils.load_model(folder, lazy=True, get_model_classes=loading.classes)
    rows: Rows = partial(_pooled, modules.pooling or "last")
    if has_head:
        _check_scores(folder, len(loading.score))
        rows = partial(_scored, loading.score)
    elif judges:
        rows = partial(_judged, model, modules.score_tokens or _answers(folder, tokenizer))
    return TextModel(
        module=model,
        states=lambda inputs: model.model(inputs.tokens),
        rows=rows,
        dimensions=config["hidden_size"],
        context_tokens=first_number(config, CONTEXT_LENGTHS) or UNLIMITED_TOKENS,
        normalises=modules.normalises,
        ranks=has_head or judges,
        prompt=QWEN3_PROMPT if has_head or judges else None,
    )


class _DecoderLoading:
    """Lets mlx_lm load a decoder that sentence-transformers saved: names of weights lack a prefix,
    and a head may be missing."""

    def __init__(self, *, keeps_head: bool) -> None:
        self._keeps_head = keeps_head
        self.score = mx.zeros((0, 0))  # the weights of a head for scores: one row for each

    def classes(self, config: dict[str, Any]) -> tuple[Any, Any]:
        """Return what builds the model, and the class of its configuration."""
        model_class, arguments = mlx_lm.utils._get_classes(config)
        return partial(self._build, model_class), arguments

    def _build(self, model_class: Any, arguments: Any) -> Any:
        model = model_class(arguments)
        if not self._keeps_head:
            model.pop("lm_head", None)
        model.sanitize = partial(self._sanitize, getattr(model, "sanitize", dict))
        return model

    def _sanitize(self, own: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        heads = ("lm_head.", "score.")
        self.score = weights.pop("score.weight", self.score)
        named = {
            name if name.startswith(("model.", *heads)) else f"model.{name}": each
            for name, each in weights.items()
        }
        found: dict[str, mx.array] = own(named)
        return {
            name: each
            for name, each in found.items()
            if self._keeps_head or not name.startswith(heads)
        }


def _is_judge(folder: Path, config: dict[str, Any]) -> bool:
    """Older conversions of Qwen3-Reranker differ from a chat model only in their name."""
    names = f"{folder.resolve().name} {config.get('_name_or_path')}".lower()
    return config["model_type"] == "qwen3" and "qwen3-reranker" in names


def _answers(folder: Path, tokenizer: FolderTokenizer) -> tuple[int, int]:
    """The tokens whose probabilities are compared."""
    yes, no = (tokenizer.encode(text, special=False) for text in ("yes", "no"))
    if len(yes) != 1 or len(no) != 1:
        raise ModelError(f"{folder.name} has no tokens for yes and no, so it cannot rank")
    return yes[0], no[0]


def _scored(weights: mx.array, states: mx.array, inputs: Padded) -> mx.array:
    last = _pooled("last", states, inputs)
    return mx.sigmoid((last @ weights.T).astype(mx.float32))


def _judged(model: Any, answers: tuple[int, int], states: mx.array, inputs: Padded) -> mx.array:
    """The probability of the first answer, if only these two are possible."""
    last = _pooled("last", states, inputs)
    tied = model.model.embed_tokens.as_linear
    logits = (model.lm_head if "lm_head" in model else tied)(last)
    return mx.softmax(logits[:, mx.array(answers)].astype(mx.float32), axis=-1)[:, :1]


class MlxEmbedder:
    """Implements `engine.base.Embedder`."""

    def __init__(
        self, options: EngineOptions, on_progress: OnProgress = lambda _done: None
    ) -> None:
        memory.check_gpus(options)
        device = memory.choose_device(options.gpu_layers)
        mx.set_cache_limit(CACHE_BYTES)
        self.tokenizer, self._model = _load(options.path, on_progress)
        memory.wire(device)
        self._call_tokens = CALL_TOKENS[device]
        self.info = EmbedderInfo(
            context_tokens=min(
                options.context_tokens or DEFAULT_CONTEXT, self._model.context_tokens
            ),
            batch_tokens=4 * self._call_tokens,  # several calls, sorted by length
            dimensions=self._model.dimensions,
            ranks=self._model.ranks,
            normalises=self._model.normalises,
        )
        prompt = self._model.prompt
        self._prompt = RerankPrompt(self.tokenizer, prompt) if prompt else None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self.tokenizer.encode_input(text, special=special)

    def pair(self, query: str, document: str) -> list[int]:
        if self._prompt is not None:
            return self._prompt.encode(query, document)
        return self.tokenizer.encode_input(query, document)

    def embed(self, inputs: Seq[Seq[int]]) -> Matrix:
        rows = self._computed(inputs, self.info.dimensions)
        if self.info.normalises:
            lengths = np.linalg.norm(rows, axis=1, keepdims=True)
            rows /= np.maximum(lengths, np.finfo(np.float32).tiny)
        return rows

    def rank(self, pairs: Seq[Seq[int]]) -> list[float]:
        scores: list[float] = self._computed(pairs, 1)[:, 0].tolist()
        return scores

    def _computed(self, inputs: Seq[Seq[int]], width: int) -> Matrix:
        rows = np.empty((len(inputs), width), np.float32)
        for places in padded_calls([len(tokens) for tokens in inputs], self._call_tokens):
            padded = Padded.of([inputs[place] for place in places])
            try:
                found = self._model.rows(self._model.states(padded), padded).astype(mx.float32)
                mx.eval(found)
            except RuntimeError as error:  # no memory, or a fault of the device
                raise EngineBroken(f"MLX failed to compute: {one_sentence(error)}") from error
            rows[places] = np.array(found)
        return rows

    def close(self) -> None:
        mx.clear_cache()


def _load(folder: Path, on_progress: OnProgress) -> tuple[FolderTokenizer, TextModel]:
    check_model(folder, check_folder(folder))
    config = read_json(folder / CONFIG)
    try:
        tokenizer = load_tokenizer(folder, int(config["vocab_size"]))
        model = load_text_model(folder, tokenizer, config)
        model.module.eval()
        probe = Padded.of([[0]])
        width = model.rows(model.states(probe), probe).shape[1]  # lazy: only checks the shapes
        read_weights(model.module, on_progress)
    except ModelError:
        raise
    except Exception as error:  # an inconsistent folder may fail anywhere in MLX
        raise ModelError(
            f"MLX cannot load {folder.name}: {one_sentence(error)}. Its files are damaged or do "
            "not belong together"
        ) from error
    if width != (1 if model.ranks else model.dimensions):
        raise ModelError(f"{folder / CONFIG} names another width than the {width} of the vectors")
    return tokenizer, model


def padded_calls(lengths: Seq[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the places of inputs to compute together, longest first. A call has at most
    `max_tokens` with its padding, or one input."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    start = 0
    while start < len(order):
        inputs = max(max_tokens // lengths[order[start]], 1)
        yield order[start : start + inputs]
        start += inputs
