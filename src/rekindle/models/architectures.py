"""Describes the families of models that can be converted: their tensors, and what their
configuration means to llama.cpp.

What a family does not describe is refused, because it would silently change the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rekindle.errors import ModelError
from rekindle.models.folder import CONFIG, read_json
from rekindle.models.gguf_writer import Field

MAX_COUNT = 1 << 31
MAX_LAYERS = 1000
TEXT_ONLY = "Its picture encoder is left out: the converted model reads text only."

#: What the settings of quantised weights are called in config.json, or a file of their own.
QUANTISED = ("quantization", "quantization_config", "compression_config")
QUANTISED_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")

_Shapes = dict[str, tuple[str, ...]]  # names of sizes, by the name of a tensor
_ATTENTION: _Shapes = {
    "self_attn.q_proj.weight": ("query", "width"),
    "self_attn.k_proj.weight": ("key", "width"),
    "self_attn.v_proj.weight": ("key", "width"),
    "self_attn.o_proj.weight": ("width", "query"),
}
_BIASES: _Shapes = {
    "self_attn.q_proj.bias": ("query",),
    "self_attn.k_proj.bias": ("key",),
    "self_attn.v_proj.bias": ("key",),
}
_OTHER_BIASES: _Shapes = {
    "self_attn.o_proj.bias": ("width",),
    "mlp.gate_proj.bias": ("hidden",),
    "mlp.up_proj.bias": ("hidden",),
    "mlp.down_proj.bias": ("width",),
}
_HEAD_NORMS: _Shapes = {
    "self_attn.q_norm.weight": ("head",),
    "self_attn.k_norm.weight": ("head",),
}
_NORMS: _Shapes = {
    "input_layernorm.weight": ("width",),
    "post_attention_layernorm.weight": ("width",),
}
_HIDDEN: _Shapes = {
    "mlp.gate_proj.weight": ("hidden", "width"),
    "mlp.up_proj.weight": ("hidden", "width"),
    "mlp.down_proj.weight": ("width", "hidden"),
}
_EXPERT: _Shapes = {
    "gate_proj.weight": ("expert_hidden", "width"),
    "up_proj.weight": ("expert_hidden", "width"),
    "down_proj.weight": ("width", "expert_hidden"),
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family. `layer` has the tensors of each layer, `optional` those that a model may have."""

    name: str  # in GGUF files
    model_class: str  # in config.json
    layer: _Shapes
    optional: _Shapes = field(default_factory=dict)
    experts: _Shapes = field(default_factory=dict)  # tensors of each expert
    activation: str = "silu"
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of config.json
    pairs_rows: bool = False  # llama.cpp rotates neighbouring rows of a head
    norm_offset: float = 0.0  # what the model adds to the weights of norms
    has_square_attention: bool = False  # llama.cpp wants heads that are as wide as the model
    text_of: bool = False  # config.json describes the language model in `text_config`


_LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    _ATTENTION | _NORMS | _HIDDEN,
    _BIASES | _OTHER_BIASES,
    pairs_rows=True,
)
_GEMMA3 = Architecture(
    "gemma3",
    "Gemma3ForCausalLM",
    {
        **(_ATTENTION | _NORMS | _HIDDEN | _HEAD_NORMS),
        "pre_feedforward_layernorm.weight": ("width",),
        "post_feedforward_layernorm.weight": ("width",),
    },
    activation="gelu_pytorch_tanh",
    ropes=("default", "linear"),
    defaults={
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
    norm_offset=1.0,
)
_NO_WINDOW = {"use_sliding_window": False}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, model_class="MistralForCausalLM"),
    "smollm3": Architecture(
        "smollm3",
        "SmolLM3ForCausalLM",
        _LLAMA.layer,
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6},
        pairs_rows=True,
    ),
    "qwen2": Architecture(
        "qwen2",
        "Qwen2ForCausalLM",
        _ATTENTION | _NORMS | _HIDDEN | _BIASES,
        defaults=_NO_WINDOW,
        has_square_attention=True,
    ),
    "qwen3": Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        _ATTENTION | _NORMS | _HIDDEN | _HEAD_NORMS,
        _BIASES,
        defaults=_NO_WINDOW,
    ),
    "qwen3_moe": Architecture(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        _ATTENTION | _NORMS | _HEAD_NORMS | {"mlp.gate.weight": ("experts", "width")},
        _BIASES,
        _EXPERT,
        defaults=_NO_WINDOW,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            **_NORMS,
            "self_attn.qkv_proj.weight": ("query_key_value", "width"),
            "self_attn.o_proj.weight": ("width", "query"),
            "mlp.gate_up_proj.weight": ("two_hidden", "width"),
            "mlp.down_proj.weight": ("width", "hidden"),
        },
        ropes=("default", "longrope", "su"),
        has_square_attention=True,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": replace(_GEMMA3, model_class="Gemma3ForConditionalGeneration", text_of=True),
}


def read_model(folder: Path) -> ConvertibleModel:
    """Read config.json; raises ModelError if the model cannot be converted."""
    values = read_json(folder / CONFIG)
    _refuse_quantised(folder, values)
    kind = values.get("model_type")
    architecture = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        needs_code = " It needs code of its own, which is never run." if _auto_class(values) else ""
        raise ModelError(
            f"{folder} is a model of the type {str(kind)[:60]!r}, which is not converted to GGUF."
            f"{needs_code} Converted are: {known}. Give a GGUF file of this model, or serve the "
            "folder with MLX (pip install 'rekindle[mlx]')."
        )
    classes = values.get("architectures") or [architecture.model_class]
    for name in (*classes, *_auto_class(values)):
        if name != architecture.model_class:
            raise ModelError(
                f"{folder} is a {str(name)[:60]}, and of this type only "
                f"{architecture.model_class} is converted. Code of a model is never run. Give a "
                "GGUF file instead."
            )
    if architecture.text_of:
        texts = values.get("text_config")
        values = values | (texts if isinstance(texts, dict) else {})
    return ConvertibleModel(architecture, Configuration(folder, architecture.defaults, values))


def _auto_class(values: dict[str, Any]) -> list[str]:
    """Return the class that the model's own code would replace ours with, if any."""
    own = values.get("auto_map")
    name = own.get("AutoModelForCausalLM") if isinstance(own, dict) else None
    return [name.rpartition(".")[2]] if isinstance(name, str) else []


def _refuse_quantised(folder: Path, values: dict[str, Any]) -> None:
    texts = values.get("text_config")
    places = [values, texts] if isinstance(texts, dict) else [values]
    given = next((place[name] for name in QUANTISED for place in places if place.get(name)), None)
    files = [name for name in QUANTISED_FILES if (folder / name).is_file()]
    if given is None and not files:
        return
    method = given.get("quant_method") if isinstance(given, dict) else None
    if not method and isinstance(given, dict) and "bits" in given and not files:
        raise ModelError(
            f"{folder} was quantised for MLX ({given['bits']} bits), and only MLX loads it: "
            "pip install 'rekindle[mlx]' and omit --engine. To convert the model, give its "
            "original weights."
        )
    raise ModelError(
        f"{folder} is already quantised ({str(method or files or given)[:60]}), and only original "
        "weights are converted. Give the original model, or a GGUF file of it."
    )


class Configuration:
    """The values of config.json. Each is checked when it is read; raises ModelError."""

    def __init__(self, folder: Path, defaults: Mapping[str, Any], values: dict[str, Any]) -> None:
        self._folder = folder
        given = {name: value for name, value in values.items() if value is not None}
        self._values = {**defaults, **given}

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def count(self, name: str, default: int | None = None) -> int:
        found = self._values.get(name, default)
        if type(found) is not int or not 0 < found < MAX_COUNT:
            raise self.wrong(name)
        return found

    def real(self, name: str, default: float | None = None) -> float:
        return self.number(self._values.get(name, default), name)

    def number(self, value: Any, name: str) -> float:
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(name)
        return float(value)

    def wrong(self, name: str) -> ModelError:
        state = "lacks" if self.get(name) is None else "has an unusable"
        return ModelError(
            f"{self._folder / CONFIG} {state} {name}, so the model cannot be converted. Fetch the "
            "model again, into an empty folder."
        )

    def unsupported(self, what: str) -> ModelError:
        return ModelError(
            f"{self._folder} has {what}, which llama.cpp does not compute for this architecture. "
            "Give a GGUF file of this model, or serve the folder with MLX "
            "(pip install 'rekindle[mlx]')."
        )


class ConvertibleModel:
    """What a model of a known family needs: fields of the GGUF file, tensors and their shapes."""

    def __init__(self, architecture: Architecture, config: Configuration) -> None:
        self.architecture = architecture
        self.config = config
        self.layers = config.count("num_hidden_layers")
        if self.layers > MAX_LAYERS:
            raise config.wrong("num_hidden_layers")
        heads = config.count("num_attention_heads")
        width = config.count("hidden_size")
        head = config.count("head_dim", width // heads)
        kv_heads = config.count("num_key_value_heads", heads)
        hidden = config.count("intermediate_size")
        self.heads, self.kv_heads = heads, kv_heads
        self.sizes = {
            "width": width,
            "head": head,
            "query": heads * head,
            "key": kv_heads * head,
            "query_key_value": (heads + 2 * kv_heads) * head,
            "hidden": hidden,
            "two_hidden": 2 * hidden,
            "vocabulary": config.count("vocab_size"),
        }
        self.experts = 0
        if architecture.experts:
            self.experts = self.sizes["experts"] = config.count("num_experts")
            self.sizes["expert_hidden"] = config.count("moe_intermediate_size")
        self.ties_embeddings = bool(config.get("tie_word_embeddings"))
        self.rope_factors: dict[str, list[float]] = {}  # tensors, by name
        self._check()
        self.fields: dict[str, Field] = self._fields() | self._rope_fields()

    def _check(self) -> None:
        """Refuse what the weights alone would not show."""
        config, architecture = self.config, self.architecture
        activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
        if activation != architecture.activation:
            raise config.unsupported(f"the activation {str(activation)[:40]}")
        if architecture.has_square_attention and self.sizes["query"] != self.sizes["width"]:
            raise config.unsupported(f"heads of {self.sizes['head']} values")
        if self.heads % self.kv_heads:
            raise config.wrong("num_key_value_heads")
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.get(name):
                raise config.unsupported(name)
        if architecture.name != "phi3" and config.get("partial_rotary_factor") not in (None, 1):
            raise config.unsupported("a partial_rotary_factor")
        if self.experts:
            self._check_experts()
        if architecture.name == "smollm3":
            self._check_no_rope()
        if architecture.name == "gemma3":
            self._check_scale()

    def _check_experts(self) -> None:
        config = self.config
        if config.get("decoder_sparse_step") not in (None, 1) or config.get("mlp_only_layers"):
            raise config.unsupported("layers without experts between layers with experts")
        if not config.get("norm_topk_prob"):
            raise config.unsupported("experts whose weights are not normalised (norm_topk_prob)")
        if config.count("num_experts_per_tok") > self.experts:
            raise config.wrong("num_experts_per_tok")

    def _check_no_rope(self) -> None:
        step = self.config.count("no_rope_layer_interval", 4)
        rotated = [int((layer + 1) % step != 0) for layer in range(self.layers)]
        given = self.config.get("no_rope_layers") or rotated
        if given != [int((layer + 1) % 4 != 0) for layer in range(self.layers)]:
            raise self.config.unsupported("other layers without rotation than every fourth")

    def _check_scale(self) -> None:
        # llama.cpp knows Gemma 3 27B, which scales otherwise, by its number of layers.
        is_27b = self.layers == 62
        scaled_by = self.sizes["width"] // self.heads if is_27b else self.sizes["head"]
        if self.config.real("query_pre_attn_scalar") != scaled_by:
            raise self.config.unsupported("another query_pre_attn_scalar than its heads have")

    def _fields(self) -> dict[str, Field]:
        config, sizes = self.config, self.sizes
        found: dict[str, Field] = {
            "vocab_size": sizes["vocabulary"],
            "context_length": self._context_tokens(),
            "embedding_length": sizes["width"],
            "block_count": self.layers,
            "feed_forward_length": sizes["hidden"],
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": sizes["head"],
            "attention.value_length": sizes["head"],
            "attention.layer_norm_rms_epsilon": config.real("rms_norm_eps", 1e-6),
        }
        if self.experts:
            found["expert_count"] = self.experts
            found["expert_used_count"] = config.count("num_experts_per_tok")
            found["expert_feed_forward_length"] = sizes["expert_hidden"]
        if self.architecture.name == "gemma3":
            found["attention.sliding_window"] = config.count("sliding_window")
            found["attention.sliding_window_pattern"] = self._sliding_layers()
        return self._named(found)

    def _named(self, fields: dict[str, Field]) -> dict[str, Field]:
        return {f"{self.architecture.name}.{name}": value for name, value in fields.items()}

    def _sliding_layers(self) -> list[bool]:
        given = self.config.get("layer_types")
        if given is None:
            step = self.config.count("sliding_window_pattern", 6)
            return [(layer + 1) % step != 0 for layer in range(self.layers)]
        known = ("sliding_attention", "full_attention")
        if not isinstance(given, list) or len(given) != self.layers or not set(given) <= {*known}:
            raise self.config.wrong("layer_types")
        return [each == known[0] for each in given]

    def _context_tokens(self) -> int:
        """Return the longest context in which llama.cpp computes what the model was trained for.

        Except for Gemma it has no sliding windows, so the context ends at the window.
        """
        config = self.config
        longest = config.count("max_position_embeddings")
        if self.architecture.name == "gemma3":
            return longest
        layers = config.get("layer_types")
        slides = not isinstance(layers, list) or "sliding_attention" in layers
        if config.get("use_sliding_window") is False or config.get("sliding_window") is None:
            slides = False
        return min(longest, config.count("sliding_window")) if slides else longest

    def _rope(self) -> tuple[str, dict[str, Any]]:
        """Return the kind of position encoding and its settings, in the spelling of any version."""
        config = self.config
        found = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if isinstance(found, dict) and isinstance(found.get("full_attention"), dict):
            found = found["full_attention"]
        if not isinstance(found, dict):
            raise config.wrong("rope_scaling")
        kind = found.get("rope_type") or found.get("type") or "default"
        if kind not in self.architecture.ropes:
            raise config.unsupported(f"the rotary position encoding {str(kind)[:40]!r}")
        return kind, found

    def _rope_fields(self) -> dict[str, Field]:
        config = self.config
        kind, rope = self._rope()
        base = rope.get("rope_theta") or config.real("rope_theta", 10_000.0)
        rotated = self.sizes["head"]
        if self.architecture.name == "phi3":
            share = rope.get("partial_rotary_factor") or config.real("partial_rotary_factor", 1)
            rotated = int(rotated * config.number(share, "partial_rotary_factor"))
        found: dict[str, Field] = {
            "rope.freq_base": config.number(base, "rope_theta"),
            "rope.dimension_count": rotated,
        }
        if self.architecture.name == "gemma3":
            found["rope.freq_base_swa"] = self._local_base()
        if kind == "linear":
            found["rope.scaling.type"] = "linear"
            found["rope.scaling.factor"] = config.number(rope.get("factor"), "factor")
        elif kind == "llama3":
            self.rope_factors["rope_freqs.weight"] = self._llama3_factors(
                rope, config.number(base, "rope_theta")
            )
        elif kind == "yarn":
            found |= self._yarn_fields(rope)
        elif kind in ("longrope", "su"):
            found |= self._longrope_fields(rope, rotated)
        return self._named(found)

    def _local_base(self) -> float:
        rope = self.config.get("rope_parameters")
        local = rope.get("sliding_attention") if isinstance(rope, dict) else None
        if not isinstance(local, dict):
            return self.config.real("rope_local_base_freq", 10_000.0)
        if (local.get("rope_type") or "default") != "default":
            raise self.config.unsupported("scaled positions in its sliding windows")
        return self.config.number(local.get("rope_theta", 10_000.0), "rope_theta")

    def _llama3_factors(self, rope: dict[str, Any], base: float) -> list[float]:
        """Divide slow rotations by the factor, keep fast ones, and blend those in between."""
        number, names = self.config.number, ("factor", "low_freq_factor", "high_freq_factor")
        factor, low, high = (number(rope.get(name), name) for name in names)
        original = self._original_tokens(rope)
        if high <= low:
            raise self.config.wrong("high_freq_factor")
        found = []
        head = self.sizes["head"]
        for index in range(0, head, 2):
            turns = original / (2 * math.pi * base ** (index / head))  # within the original context
            blend = min(max((turns - low) / (high - low), 0.0), 1.0)
            found.append(1 / ((1 - blend) / factor + blend))
        return found

    def _original_tokens(self, rope: dict[str, Any]) -> int:
        name = "original_max_position_embeddings"
        given = rope.get(name) or self.config.get(name)
        return int(self.config.number(given, name))

    def _yarn_fields(self, rope: dict[str, Any]) -> dict[str, Field]:
        config = self.config
        factor = config.number(rope.get("factor"), "factor")
        if rope.get("mscale") or rope.get("mscale_all_dim") or rope.get("truncate") is False:
            raise config.unsupported("YaRN with mscale or without rounding")
        default = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        attention = config.number(rope.get("attention_factor") or default, "attention_factor")
        found: dict[str, Field] = {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": factor,
            "rope.scaling.original_context_length": self._original_tokens(rope),
            "rope.scaling.attn_factor": attention / default,
        }
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name) is not None:
                found[f"rope.scaling.yarn_{name}"] = config.number(rope[name], name)
        return found

    def _longrope_fields(self, rope: dict[str, Any], rotated: int) -> dict[str, Field]:
        config = self.config
        for name in ("long", "short"):
            factors = rope.get(f"{name}_factor")
            if not isinstance(factors, list) or len(factors) != rotated // 2:
                raise config.wrong("rope_scaling")
            numbers = [config.number(each, "rope_scaling") for each in factors]
            self.rope_factors[f"rope_factors_{name}.weight"] = numbers
        original = self._original_tokens(rope)
        scale = config.count("max_position_embeddings") / original
        computed = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        attention = config.number(rope.get("attention_factor") or computed, "attention_factor")
        return {
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": attention,
        }

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that the model must have, and of those of `names` that
        it may have."""
        own, given = self.architecture, set(names)
        found = {
            "model.embed_tokens.weight": self._shape(("vocabulary", "width")),
            "model.norm.weight": self._shape(("width",)),
        }
        if not self.ties_embeddings:
            found["lm_head.weight"] = self._shape(("vocabulary", "width"))
        for layer in range(self.layers):
            start = f"model.layers.{layer}."
            for name, shape in own.layer.items():
                found[start + name] = self._shape(shape)
            for name, shape in own.optional.items():
                if start + name in given:
                    found[start + name] = self._shape(shape)
            for expert in range(self.experts):
                for name, shape in own.experts.items():
                    found[f"{start}mlp.experts.{expert}.{name}"] = self._shape(shape)
        return found

    def _shape(self, names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.sizes[name] for name in names)
