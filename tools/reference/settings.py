"""Writes docs/settings.md from the declarations of the settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Gt, Interval
from pydantic import BaseModel

from rekindle.cli.flags import shown_default, spelling
from rekindle.config import SETTINGS, Declaration, Preset
from rekindle.config.presets import PresetCache
from rekindle.config.sources import DISK_VARIABLE, ENV_PREFIX, OTHER_VARIABLES
from rekindle.protocol.settings import COUNT_LIMIT, SIZE_TEXT, Group
from tools.reference.markdown import code, fill, sentence, table

#: A value of each setting that is not a switch, a choice or a number with a default.
EXAMPLES = {
    "model": "smollm2",
    "embedding_model": "minilm",
    "mmproj": "./mmproj-F16.gguf",
    "adapter": "poet=./poet.gguf",
    "host": "0.0.0.0",
    "port": "9000",
    "ollama_port": "11434",
    "uds": "/run/rekindle/rekindle.sock",
    "tls_cert": "fullchain.pem",
    "tls_key": "privkey.pem",
    "drain_timeout": "60",
    "queue": "64",
    "step_timeout": "600",
    "log_file": "/var/log/rekindle.log",
    "log_file_size": "10MB",
    "otlp_endpoint": "http://127.0.0.1:4318",
    "models_dir": "/data/models",
    "api_key": "sk-alice",
    "admin_key": "sk-operator",
    "models": '{"coder": {"model": "qwen3:8b", "idle_unload": "1h"}}',
    "max_memory": "24GB",
    "idle_unload": "15m",
    "aliases": '{"gpt-*": "smollm2"}',
    "seed": "42",
    "api_keys_file": "keys.txt",
    "cors_origin": "https://chat.example.org",
    "allowed_host": "models.example.org",
    "media_allow": "10.0.0.0/8",
    "media_folder": "/data/images",
    "max_tokens": "2000",
    "completion_max_tokens": "500",
    "temperature": "0.2",
    "top_p": "0.95",
    "repetition_penalty": "1.1",
    "repetition_context_size": "64",
    "engine": "mlx",
    "llama_lib": "/opt/llama/bin/libmtmd.so",
    "gpu": "1",
    "tensor_split": "3,1",
    "parallel": "4",
    "max_model_len": "65536",
    "kv_fraction": "0.5",
    "park_fraction": "0.2",
    "kv_bits": "8",
    "kv_quantization_start": "10000",
    "threads": "4",
    "gpu_layers": "20",
    "tool_format": "hermes",
    "reasoning_format": "none",
    "chat_template_kwargs": """'{"enable_thinking": false}'""",
    "ram_cache": "4GiB",
    "disk_cache": "50GB",
    "disk_floor": "10GB",
    "cache_dir": "/data/kv",
    "cache_secret_file": "/etc/rekindle/secret",
    "normaliser": "tools",
    "key_ttl": "86400",
}
PRESET_TEXTS = {
    "model": "The model that computes the prompt",
    "provider": "Ignored; other programs that share the file read it",
    "system_prompt": "The system prompt",
    "tools": "Tools in OpenAI's format, or only their names",
    "shared": "Let all API keys reuse the state",
    "cache": "When to compute the prompt, and how long to keep it",
    "cache.warm_on_startup": "Compute the prompt when the server starts",
    "cache.pinned": "Keep the state until it is unpinned or deleted",
    "cache.ttl": "Seconds after its last use until the state expires; no limit if it is pinned",
}
VARIABLE_TEXTS = {
    DISK_VARIABLE: "The same as `REKINDLE_DISK_CACHE`, as a number of GB without a unit. "
    "`REKINDLE_DISK_CACHE` wins.",
    "REKINDLE_CONFIG": "The settings file, if `--config` does not name one.",
    "REKINDLE_ENGINE_MODULE": "A Python module that adds an engine, for its developers.",
}


def render() -> str:
    """Return the whole page."""
    groups = []
    for group in get_args(Group):
        declared = [each for each in SETTINGS.values() if each.setting.group == group]
        rows = table(("setting", "default", "meaning", "example"), _rows(declared))
        groups.append(f"## {group}\n\n{rows}")
    names = [DISK_VARIABLE, *sorted(f"{ENV_PREFIX}{name.upper()}" for name in OTHER_VARIABLES)]
    variables = ((code(name), VARIABLE_TEXTS[name]) for name in names)
    return fill(
        "settings.md",
        settings="\n\n".join(groups),
        projects=table(("key", "default", "meaning"), _preset_rows(Preset)),
        variables=table(("variable", "meaning"), variables),
    )


def _rows(declared: list[Declaration]) -> Iterator[tuple[str, str, str, str]]:
    for each in declared:
        names = [each.name, f"{ENV_PREFIX}{each.name.upper()}"]
        if each.setting.flag:
            names.insert(1, spelling(each).replace("/", "` `"))
        values = "; ".join(_values(each))
        meaning = f"{each.setting.help}; {values}" if values else each.setting.help
        yield "<br>".join(map(code, names)), _default(each), sentence(meaning), example(each)


def _default(declared: Declaration) -> str:
    if isinstance(declared.default, float):
        return f"{declared.default:g}"
    if declared.default is MISSING:  # made anew for each config, and empty
        return "none"
    return shown_default(declared) or ("off" if declared.default is False else "none")


def example(declared: Declaration) -> str:
    """An example of the setting as a flag, or as a line of the file if it has no flag."""
    name = declared.name
    if name == "projects":
        return "[below](#projects)"
    if not declared.setting.flag:
        return code(f"{name}: {example_value(declared)}")
    switch = spelling(declared).split("/")
    if isinstance(declared.default, bool) or name == "vlm":
        return code(switch[-1] if declared.default is True else switch[0])
    return code(f"{switch[0]} {example_value(declared)}")


def example_value(declared: Declaration) -> str:
    """A valid value. Of a choice, one that is not the default."""
    if declared.name in EXAMPLES:
        return EXAMPLES[declared.name]
    others = [choice for choice in _choices(declared.type) if choice != declared.default]
    if not others:
        raise SystemExit(f"tools/reference/settings.py needs an example of `{declared.name}`")
    return others[0]


def _values(declared: Declaration) -> Iterator[str]:
    """Say which values the setting takes, unless its text says so."""
    choices = _choices(declared.type)
    if choices and not all(choice in declared.setting.help for choice in choices):
        yield f"one of {', '.join(map(code, choices))}"
    if SIZE_TEXT in get_args(declared.type):
        return
    for bound in get_args(declared.type)[1:]:
        match bound:
            case Gt(gt=low):
                yield f"more than {low}"
            case Interval(le=high) if high == COUNT_LIMIT:  # a bound against typing mistakes
                pass
            case Interval(ge=None, gt=low, lt=None, le=high):
                yield f"more than {low}, up to {high:,}"
            case Interval(ge=None, gt=low, lt=high):
                yield f"between {low} and {high}"
            case Interval(ge=low, lt=None, le=high):
                yield f"from {low} to {high:,}"
            case Interval(ge=low, lt=high):
                yield f"from {low}, less than {high}"


def _choices(kind: Any) -> tuple[str, ...]:
    """The values of the literal type within a type, if there is one."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    inner = get_args(kind) if isinstance(kind, UnionType) else get_args(kind)[:1]
    return next(filter(None, map(_choices, inner)), ())


def _preset_rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    fields: Mapping[str, Any] = model.model_fields
    for name, field in fields.items():
        default = "required" if field.is_required() else _preset_default(field.default)
        yield code(f"{prefix}{name}"), default, sentence(PRESET_TEXTS[f"{prefix}{name}"])
        if field.annotation is PresetCache:
            yield from _preset_rows(PresetCache, f"{name}.")


def _preset_default(value: Any) -> str:
    if value is None or isinstance(value, BaseModel):
        return "none" if value is None else "see below"
    return code(str(value).lower())
