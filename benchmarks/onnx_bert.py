"""Runs a BERT model in ONNX Runtime with the weights of a GGUF file, for comparison.

The graph has the fused operators that ONNX Runtime's optimiser would create. Texts are tokenised by
Hugging Face's tokenizers, sorted by length and padded in batches of 32, as in sentence-
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from tokenizers import BertWordPieceTokenizer

BATCH = 32
FUSED = "com.microsoft"
WORD_START = "\u2581"


class OnnxBert:
    def __init__(self, path: Path, threads: int) -> None:
        reader: Any = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        weights = {each.name: np.asarray(each.data, np.float32) for each in reader.tensors}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        graph = _Graph(weights, fields).build()
        self._session = onnxruntime.InferenceSession(graph, options)
        self._tokenizer = BertWordPieceTokenizer(_vocabulary(fields), lowercase=True)

    def embed(self, texts: Sequence[str]) -> Any:
        encoded = [each.ids for each in self._tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(encoded)), key=lambda place: -len(encoded[place]))
        parts = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        found = np.concatenate([self._run([encoded[place] for place in part]) for part in parts])
        vectors = np.empty_like(found)
        vectors[order] = found
        return vectors

    def _run(self, inputs: list[list[int]]) -> Any:
        ids = np.zeros((len(inputs), len(inputs[0])), np.int64)
        mask = np.zeros_like(ids, np.int32)
        for row, tokens in enumerate(inputs):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        return self._session.run(None, {"ids": ids, "mask": mask})[0]


def _vocabulary(fields: dict[str, Any]) -> dict[str, int]:
    kinds = fields["tokenizer.ggml.token_type"]
    words = {}
    for token, (word, kind) in enumerate(zip(fields["tokenizer.ggml.tokens"], kinds, strict=True)):
        if kind != gguf.TokenType.NORMAL:
            words[word] = token
        elif word.startswith(WORD_START):
            words[word[1:]] = token
        else:
            words[f"##{word}"] = token
    return words


class _Graph:
    def __init__(self, weights: dict[str, Any], fields: dict[str, Any]) -> None:
        self._weights = weights
        self._fields = fields
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def build(self) -> bytes:
        weights = self._weights
        rows = self._add("Gather", self._constant(weights["token_embd.weight"]), "ids")
        length = self._add("Gather", self._add("Shape", "ids"), self._constant(np.array([1])))
        first = self._constant(np.array([0]))
        places = self._constant(weights["position_embd.weight"] + weights["token_types.weight"][0])
        places = self._add("Slice", places, first, length, first)
        rows = self._norm(self._add("Add", rows, places), "token_embd_norm")
        for layer in range(self._fields["bert.block_count"]):
            rows = self._layer(rows, f"blk.{layer}.")
        mask = self._add("Cast", "mask", to=TensorProto.FLOAT)
        axis = self._constant(np.array([1]))
        masked = self._add("Mul", rows, self._add("Unsqueeze", mask, self._constant(np.array([2]))))
        total = self._add("ReduceSum", masked, axis, keepdims=0)
        mean = self._add("Div", total, self._add("ReduceSum", mask, axis, keepdims=1))
        self._nodes.append(helper.make_node("LpNormalization", [mean], ["out"], axis=1, p=2))
        return self._model()

    def _layer(self, rows: str, block: str) -> str:
        names = [f"{block}attn_{each}" for each in "qkv"]
        weight = np.concatenate([self._weights[f"{name}.weight"].T for name in names], axis=1)
        bias = np.concatenate([self._weights[f"{name}.bias"] for name in names])
        inputs = (rows, self._constant(weight), self._constant(bias), "mask")
        heads = self._fields["bert.attention.head_count"]
        seen = self._add("Attention", *inputs, domain=FUSED, num_heads=heads)
        attended = self._add("Add", self._linear(seen, f"{block}attn_output"), rows)
        rows = self._norm(attended, f"{block}attn_output_norm")
        inner = self._add("Gelu", self._linear(rows, f"{block}ffn_up"), domain=FUSED)
        outer = self._add("Add", self._linear(inner, f"{block}ffn_down"), rows)
        return self._norm(outer, f"{block}layer_output_norm")

    def _linear(self, rows: str, name: str) -> str:
        weight = np.ascontiguousarray(self._weights[f"{name}.weight"].T)
        product = self._add("MatMul", rows, self._constant(weight))
        return self._add("Add", product, self._constant(self._weights[f"{name}.bias"]))

    def _norm(self, rows: str, name: str) -> str:
        parts = (self._constant(self._weights[f"{name}.{part}"]) for part in ("weight", "bias"))
        return self._add("LayerNormalization", rows, *parts, axis=-1, epsilon=1e-12)

    def _add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"n{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def _constant(self, values: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def _model(self) -> bytes:
        shape = ["batch", "length"]
        graph = helper.make_graph(
            self._nodes,
            "bert",
            [
                helper.make_tensor_value_info("ids", TensorProto.INT64, shape),
                helper.make_tensor_value_info("mask", TensorProto.INT32, shape),
            ],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", "width"])],
            self._constants,
        )
        versions = [helper.make_opsetid("", 18), helper.make_opsetid(FUSED, 1)]
        model: Any = helper.make_model(graph, opset_imports=versions, ir_version=9)
        onnx.checker.check_model(model)
        content: bytes = model.SerializeToString()
        return content
