"""Computes the token states of text models in float64, one text at a time, from the tensors of
their folders. Nothing of an engine is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import erf
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray[Any, np.dtype[np.float64]]
_erf = np.vectorize(erf, otypes=[np.float64])


class Reference:
    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        read = load_file(folder / "model.safetensors")
        self.tensors: dict[str, Array] = {n: each.astype(np.float64) for n, each in read.items()}

    def linear(self, name: str, rows: Array) -> Array:
        made: Array = rows @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return made if bias is None else made + bias

    def layer_norm(self, name: str, rows: Array, epsilon: float) -> Array:
        centred = rows - rows.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
        made: Array = scaled * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]
        return made

    def rms_norm(self, name: str, rows: Array) -> Array:
        mean = (rows**2).mean(-1, keepdims=True)
        scaled = rows / np.sqrt(mean + self.config["rms_norm_eps"])
        made: Array = scaled * self.tensors[f"{name}.weight"]
        return made

    def _attend(self, query: Array, key: Array, value: Array, heads: int, causal: bool) -> Array:
        """Rows are tokens. Several heads of queries may share a head of keys and values."""
        tokens, head = len(query), query.shape[1] // heads
        seen = np.zeros_like(query)
        for each in range(heads):
            shared = each // (query.shape[1] // key.shape[1])
            mine = slice(each * head, (each + 1) * head)
            theirs = slice(shared * head, (shared + 1) * head)
            scores = query[:, mine] @ key[:, theirs].T / np.sqrt(head)
            if causal:
                scores[np.triu_indices(tokens, 1)] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            seen[:, mine] = shares / shares.sum(-1, keepdims=True) @ value[:, theirs]
        return seen


class ReferenceEncoder(Reference):
    """BERT and its relatives."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        kind = self.config["model_type"]
        self._distils = kind == "distilbert"
        prefix = {"bert": "bert.", "distilbert": "distilbert."}.get(kind, "roberta.")
        has_prefix = any(name.startswith(prefix) for name in self.tensors)
        self._at = prefix if has_prefix else ""
        self._first = self.config["pad_token_id"] + 1 if "roberta" in kind else 0

    def states(self, tokens: Sequence[int], segments: Sequence[int] | None = None) -> Array:
        at, tensors = f"{self._at}embeddings.", self.tensors
        rows = tensors[f"{at}word_embeddings.weight"][list(tokens)]
        places = range(self._first, self._first + len(tokens))
        rows = rows + tensors[f"{at}position_embeddings.weight"][list(places)]
        if not self._distils:
            kinds = tensors[f"{at}token_type_embeddings.weight"]
            rows = rows + kinds[list(segments or [0] * len(tokens))]
        epsilon = self.config.get("layer_norm_eps", 1e-12)
        rows = self.layer_norm(f"{at}LayerNorm", rows, epsilon)
        layers = self.config["n_layers" if self._distils else "num_hidden_layers"]
        step = self._distil_layer if self._distils else self._bert_layer
        for layer in range(layers):
            rows = step(layer, rows, epsilon)
        return rows

    def _bert_layer(self, layer: int, rows: Array, epsilon: float) -> Array:
        at = f"{self._at}encoder.layer.{layer}."
        query, key, value = (
            self.linear(f"{at}attention.self.{n}", rows) for n in ("query", "key", "value")
        )
        heads = self.config["num_attention_heads"]
        seen = self._attend(query, key, value, heads, causal=False)
        seen = self.linear(f"{at}attention.output.dense", seen)
        rows = self.layer_norm(f"{at}attention.output.LayerNorm", rows + seen, epsilon)
        inner = _gelu(self.linear(f"{at}intermediate.dense", rows))
        outer = self.linear(f"{at}output.dense", inner)
        return self.layer_norm(f"{at}output.LayerNorm", rows + outer, epsilon)

    def _distil_layer(self, layer: int, rows: Array, epsilon: float) -> Array:
        at = f"{self._at}transformer.layer.{layer}."
        query, key, value = (self.linear(f"{at}attention.{n}_lin", rows) for n in "qkv")
        seen = self._attend(query, key, value, self.config["n_heads"], causal=False)
        seen = self.linear(f"{at}attention.out_lin", seen)
        rows = self.layer_norm(f"{at}sa_layer_norm", rows + seen, epsilon)
        outer = self.linear(f"{at}ffn.lin2", _gelu(self.linear(f"{at}ffn.lin1", rows)))
        return self.layer_norm(f"{at}output_layer_norm", rows + outer, epsilon)

    def score(self, tokens: Sequence[int], segments: Sequence[int] | None = None) -> float:
        """The probability that a pair belongs together."""
        kind, first = self.config["model_type"], self.states(tokens, segments)[0]
        if kind == "bert":
            inner = np.tanh(self.linear("bert.pooler.dense", first))
            logit = self.linear("classifier", inner)
        elif kind == "distilbert":
            inner = np.maximum(self.linear("pre_classifier", first), 0)
            logit = self.linear("classifier", inner)
        else:
            inner = np.tanh(self.linear("classifier.dense", first))
            logit = self.linear("classifier.out_proj", inner)
        return float(1 / (1 + np.exp(-logit[0])))


class ReferenceDecoder(Reference):
    """Llama, Mistral, Qwen2 and Qwen3."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._at = "model." if "model.norm.weight" in self.tensors else ""

    def states(self, tokens: Sequence[int]) -> Array:
        rows = self.tensors[f"{self._at}embed_tokens.weight"][list(tokens)]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"{self._at}layers.{layer}."
            normed = self.rms_norm(f"{at}input_layernorm", rows)
            rows = rows + self._attention(f"{at}self_attn.", normed)
            normed = self.rms_norm(f"{at}post_attention_layernorm", rows)
            gate = self.linear(f"{at}mlp.gate_proj", normed)
            inner = gate / (1 + np.exp(-gate)) * self.linear(f"{at}mlp.up_proj", normed)
            rows = rows + self.linear(f"{at}mlp.down_proj", inner)
        return self.rms_norm(f"{self._at}norm", rows)

    def _attention(self, at: str, rows: Array) -> Array:
        heads, kv_heads = (self.config[f"num_{n}_heads"] for n in ("attention", "key_value"))
        query = self._rotated(at, "q", rows, heads)
        key = self._rotated(at, "k", rows, kv_heads)
        seen = self._attend(query, key, self.linear(f"{at}v_proj", rows), heads, causal=True)
        return self.linear(f"{at}o_proj", seen)

    def _rotated(self, at: str, name: str, rows: Array, heads: int) -> Array:
        projected = self.linear(f"{at}{name}_proj", rows).reshape(len(rows), heads, -1)
        if f"{at}{name}_norm.weight" in self.tensors:
            projected = self.rms_norm(f"{at}{name}_norm", projected)
        half = projected.shape[-1] // 2
        speeds = self.config["rope_theta"] ** -(np.arange(half) / half)
        angles = np.outer(np.arange(len(rows)), speeds)[:, None]
        first, second = projected[..., :half], projected[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        made: Array = turned.reshape(len(rows), -1)
        return made

    def judged(self, tokens: Sequence[int], yes: int, no: int) -> float:
        """The probability of `yes` against `no` as the next token."""
        head = self.tensors.get(
            "lm_head.weight", self.tensors.get(f"{self._at}embed_tokens.weight")
        )
        assert head is not None
        one, other = head[[yes, no]] @ self.states(tokens)[-1]
        return float(1 / (1 + np.exp(other - one)))


POOLS: dict[str, Callable[[Array], Array]] = {
    "mean": lambda rows: rows.mean(axis=0),
    "cls": lambda rows: rows[0],
    "lasttoken": lambda rows: rows[-1],
}


def _gelu(rows: Array) -> Array:
    made: Array = rows * (1 + _erf(rows / np.sqrt(2))) / 2
    return made
