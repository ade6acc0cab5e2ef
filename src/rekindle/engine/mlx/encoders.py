"""Computes the token states of BERT, RoBERTa, XLM-RoBERTa and DistilBERT with MLX.

They are one architecture with other names: attention to all tokens, and a norm after each part.
Weights may be quantised as MLX writes them. Padding is masked, so it changes a state by rounding at
most.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu, gelu_approx, relu, silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm
from mlx.nn.layers.quantized import quantize

from rekindle.errors import ModelError
from rekindle.models.folder import weight_files

Activation = Callable[[mx.array], mx.array]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu,
    "gelu_new": gelu_approx,
    "gelu_pytorch_tanh": gelu_approx,
    "relu": relu,
    "silu": silu,
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names of a model type, in its configuration and its weights. Ours come second."""

    prefix: str  # of all weights in a model with a head
    layer: str  # before the number of a layer
    names: Mapping[str, str]  # of weights
    width: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    inner: str = "intermediate_size"
    activation: str = "hidden_act"
    head_activation: Activation = mx.tanh
    offset_by_padding: bool = False  # positions start after the id of the padding token


_EMBEDDINGS = {
    "embeddings.word_embeddings": "tokens",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "kinds",
    "embeddings.LayerNorm": "norm",
}
_LAYER = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm",
}
_DISTILBERT_LAYER = {
    "attention.q_lin": "query",
    "attention.k_lin": "key",
    "attention.v_lin": "value",
    "attention.out_lin": "output",
    "sa_layer_norm": "attention_norm",
    "ffn.lin1": "up",
    "ffn.lin2": "down",
    "output_layer_norm": "norm",
}
_BERT = Dialect(
    "bert.",
    "encoder.layer.",
    {**_EMBEDDINGS, **_LAYER, "pooler.dense": "head.dense", "classifier": "head.score"},
)
_ROBERTA = Dialect(
    "roberta.",
    "encoder.layer.",
    {
        **_EMBEDDINGS,
        **_LAYER,
        "classifier.dense": "head.dense",
        "classifier.out_proj": "head.score",
    },
    offset_by_padding=True,
)
_DISTILBERT = Dialect(
    "distilbert.",
    "transformer.layer.",
    {
        **_EMBEDDINGS,
        **_DISTILBERT_LAYER,
        "pre_classifier": "head.dense",
        "classifier": "head.score",
    },
    width="dim",
    layers="n_layers",
    heads="n_heads",
    inner="hidden_dim",
    activation="activation",
    head_activation=relu,
)
DIALECTS: dict[str, Dialect] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": _DISTILBERT,
}
#: Tensors of other heads, and constants.
UNUSED = re.compile(r"cls\.|lm_head\.|vocab_|pooler\.|qa_outputs\.|embeddings\.position_ids$")


class EncoderLayer(Module):
    def __init__(self, width: int, inner: int, heads: int, epsilon: float, act: Activation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is typed in part
        self._heads = heads
        self._activation = act
        for name in ("query", "key", "value", "output"):
            self[name] = Linear(width, width)
        self.attention_norm = LayerNorm(width, epsilon)
        self.up, self.down = Linear(width, inner), Linear(inner, width)
        self.norm = LayerNorm(width, epsilon)

    def __call__(self, states: mx.array, mask: mx.array) -> mx.array:
        inputs, tokens, width = states.shape
        query, key, value = (
            self[name](states).reshape(inputs, tokens, self._heads, -1).transpose(0, 2, 1, 3)
            for name in ("query", "key", "value")
        )
        scale = (width // self._heads) ** -0.5
        seen = mx.fast.scaled_dot_product_attention(query, key, value, scale=scale, mask=mask)
        seen = seen.transpose(0, 2, 1, 3).reshape(inputs, tokens, width)
        states = self.attention_norm(states + self["output"](seen))
        inner = self._activation(self.up(states))
        result: mx.array = self.norm(states + self.down(inner))
        return result


class ScoreHead(Module):
    """Makes a score of the state of the first token."""

    def __init__(self, width: int, classes: int, act: Activation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is typed in part
        self._activation = act
        self.dense, self.score = Linear(width, width), Linear(width, classes)

    def __call__(self, states: mx.array) -> mx.array:
        result: mx.array = self.score(self._activation(self.dense(states)))
        return result


class TextEncoder(Module):
    """`classes` are the outputs of its head, or 0 if it has none."""

    def __init__(self, config: Mapping[str, Any], dialect: Dialect, classes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is typed in part
        width, inner = config[dialect.width], config[dialect.inner]
        epsilon = config.get("layer_norm_eps", 1e-12)
        act = _activation(str(config.get(dialect.activation, "gelu")))
        padding = config.get("pad_token_id", 1)
        self._first_position = padding + 1 if dialect.offset_by_padding else 0
        self.context_tokens: int = config["max_position_embeddings"] - self._first_position
        self.width: int = width
        self.classes = classes
        self.tokens = Embedding(config["vocab_size"], width)
        self.positions = Embedding(config["max_position_embeddings"], width)
        self.segments: int = config.get("type_vocab_size", 0)  # kinds of tokens
        if self.segments:
            self.kinds = Embedding(self.segments, width)
        self.norm = LayerNorm(width, epsilon)
        self.layers = [
            EncoderLayer(width, inner, config[dialect.heads], epsilon, act)
            for _ in range(config[dialect.layers])
        ]
        if classes:
            self.head = ScoreHead(width, classes, dialect.head_activation)

    def __call__(self, tokens: mx.array, mask: mx.array, kinds: mx.array | None) -> mx.array:
        """Return the states of padded inputs. `mask` is false for padding. `kinds` are the segments
        of the tokens; None: all belong to the first one."""
        first = self._first_position
        states = self.tokens(tokens) + self.positions(mx.arange(first, first + tokens.shape[1]))
        if self.segments:
            states = states + self.kinds(mx.zeros_like(tokens) if kinds is None else kinds)
        states = self.norm(states)
        for layer in self.layers:
            states = layer(states, mask[:, None, None, :])
        result: mx.array = states
        return result


def _activation(name: str) -> Activation:
    found = ACTIVATIONS.get(name)
    if found is None:
        raise ModelError(f"the activation {name[:60]!r} is not one of {', '.join(ACTIVATIONS)}")
    return found


def load_encoder(folder: Path, config: Mapping[str, Any], *, with_head: bool) -> TextEncoder:
    """Load an encoder whose arrays are lazy. Raises ModelError for a variant that differs."""
    dialect = DIALECTS[config["model_type"]]
    positions = config.get("position_embedding_type") or "absolute"
    if positions != "absolute" or config.get("is_decoder"):
        raise ModelError(
            f"{folder.name} has {str(positions)[:60]} positions or is a decoder, which is not "
            "supported: give a model with absolute positions that sees the whole text"
        )
    read: dict[str, mx.array] = {}
    for path in weight_files(folder):
        read |= mx.load(str(path))  # type: ignore[arg-type]  # a dict for this format
    renamed = ((_our_name(name, dialect), array) for name, array in read.items())
    weights = {name: array for name, array in renamed if with_head or not _is_unused(name)}
    bias = weights.get("head.score.bias")
    model = TextEncoder(config, dialect, 0 if bias is None or not with_head else bias.size)
    if quantised := config.get("quantization"):
        quantize(
            model,
            quantised["group_size"],
            quantised["bits"],
            mode=quantised.get("mode", "affine"),
            class_predicate=partial(_is_quantised, weights),
        )
    model.load_weights([each for each in weights.items() if not UNUSED.match(each[0])])
    model.eval()
    return model


def _is_quantised(weights: Mapping[str, mx.array], path: str, _module: Module) -> bool:
    return f"{path}.scales" in weights


def _is_unused(name: str) -> bool:
    return name.startswith(("head.", "classifier", "pre_classifier")) or bool(UNUSED.match(name))


def _our_name(name: str, dialect: Dialect) -> str:
    """Translate the name of a tensor. One that is not known stays as it is, and is refused."""
    name = name.removeprefix(dialect.prefix)
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        name = name.removesuffix(old) + new if name.endswith(old) else name
    before = ""
    rest, _, part = name.rpartition(".")
    if rest.startswith(dialect.layer):
        number, _, rest = rest.removeprefix(dialect.layer).partition(".")
        before = f"layers.{number}."
    ours = dialect.names.get(rest)
    return name if ours is None else f"{before}{ours}.{part}"
