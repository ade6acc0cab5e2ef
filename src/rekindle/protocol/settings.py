"""Declares the settings that a runtime needs, and the types that every setting is declared with.

A setting is one field. Its name is the key in `rekindle.yaml` and, respelled, the flag and the
environment variable. Its type and bounds validate it, and its `Setting` is the text of `--help`.
`config.Config` inherits these settings and adds those of the front, so a new field of
`RuntimeSettings` reaches the runtime without being named anywhere else.

Bounds come from annotated-types, which pydantic understands. The runtime validates nothing, so it
does not have to import pydantic.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Gt, Interval, MinLen

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

log = logging.getLogger("rekindle.config")

Group = Literal[
    "Server", "Access", "Engine", "Cache", "Responses"
]  # headings of `--help`, in order
WritePolicy = Literal["always", "named", "likely", "on-evict"]
EvictionPolicy = Literal["hit-density", "lru"]
Normaliser = Literal[
    "claude-code-billing-header",
    "home-assistant-seconds",
    "goose-minutes",
    "tools",
    "session-paths",
    "dates",
]
#: The normalisers a request asks for: True for the server's, False for none, or a list.
Normalise = bool | list[Normaliser]

#: The normalisers that remove nothing which has a meaning for the model.
DEFAULT_NORMALISERS: tuple[Normaliser, ...] = (
    "claude-code-billing-header",
    "home-assistant-seconds",
    "goose-minutes",
    "tools",
)

LIBRARY_VARIABLE = "REKINDLE_LLAMA_LIB"  # passes `llama_lib` to the process of a runtime
AUTO = "auto"  # the model's chat template decides the format
COUNT_LIMIT = 10_000_000  # no setting counts this far, so a larger number is a typing mistake
THREADS_LIMIT = 16  # more threads do not make the engine faster
MB, GB, GIB = 10**6, 10**9, 1 << 30
KV_TYPES = {4: "q4_0", 8: "q8_0"}  # quantised KV types by their number of bits

_UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40,
}  # fmt: skip
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION_PART = r"(\d{1,12}(?:\.\d{1,9})?)(ms|s|m|h|d)"
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*((?:[kmgt]i?)?)b?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting:
    """The text that a person reads about a setting."""

    group: Group
    help: str
    default: str | None = None  # shown instead of the value, when the value alone says too little
    flag: bool = True  # False: only the file and the environment can set it
    secret: bool = False  # its value is never shown


@dataclass(frozen=True, slots=True)
class ParsedBy:
    """Makes pydantic run a parser before it validates the value."""

    parse: Callable[[object], object]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        from pydantic_core import core_schema  # the runtime never gets here

        return core_schema.no_info_before_validator_function(self.parse, handler(source))


def parse_size(value: object) -> object:
    """Parse `2GB`, `512MiB`, `1.5g` or a number of bytes into bytes."""
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError("takes a size such as 2GB, 512MiB or a number of bytes")
    number, unit = found.groups()
    return int(Fraction(number) * _UNITS[unit.lower()])


def parse_duration(value: object) -> object:
    """Parse `15m`, `1h30m`, `90s`, `300ms` or a number of seconds into seconds."""
    if not isinstance(value, str):
        return value
    written = value.strip().lower()
    sign = -1 if written.startswith("-") else 1
    written = written.lstrip("+-")
    if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", written):
        return sign * float(written)
    if not re.fullmatch(f"({_DURATION_PART})+", written):
        raise ValueError("takes a duration such as 15m, 1h30m or a number of seconds")
    parts = re.findall(_DURATION_PART, written)
    return sign * sum(float(number) * _SECONDS[unit] for number, unit in parts)


def format_size(size_bytes: int) -> str:
    """The shortest text that `parse_size` reads as the same number."""
    fitting = [unit for unit, factor in _UNITS.items() if size_bytes % factor == 0]
    unit = max(fitting, key=_UNITS.__getitem__) if size_bytes else ""
    return f"{size_bytes // _UNITS[unit]}{unit[:1].upper()}{unit[1:]}B"


def split_commas(value: object) -> object:
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def replace_former_policy(value: object) -> object:
    """Replace eviction policies of earlier versions, with a warning in the log."""
    if value not in ("adaptive", "frequency"):
        return value
    log.warning("`cache_eviction` no longer has the value %r; using 'hit-density'.", value)
    return "hit-density"


def split_numbers(value: object) -> object:
    """Split `0,1`, also inside of a list, and take a single number."""
    parts = value if isinstance(value, list | tuple) else [value]
    return [each for part in parts for each in str(part).split(",") if each.strip()]


def parse_kv_bits(value: object) -> object:
    """Parse a number of bits in any spelling, such as 8, 8.0 or "8"."""
    if value is None:
        return None
    with suppress(ValueError):
        if (bits := float(str(value))) in KV_TYPES:
            return int(bits)
    raise ValueError(f"takes {' or '.join(map(str, KV_TYPES))}")


def parse_object(value: object) -> object:
    """Parse the JSON text of an object."""
    if not isinstance(value, str):
        return value
    with suppress(ValueError):
        if isinstance(found := json.loads(value), dict):
            return found
    raise ValueError("takes a JSON object")


SIZE_TEXT = ParsedBy(parse_size)
DURATION_TEXT = ParsedBy(parse_duration)
_SIZE_BOUNDS = Interval(ge=0, lt=1 << 60)

Name = Annotated[str, MinLen(1)]
Count = Annotated[int, Interval(ge=0, le=COUNT_LIMIT)]
OptionalCount = Annotated[int | None, Interval(ge=0, le=COUNT_LIMIT)]
OptionalContext = Annotated[int | None, Interval(ge=16, le=COUNT_LIMIT)]
Share = Annotated[float, Interval(gt=0, lt=1)]
OptionalShare = Annotated[float | None, Interval(ge=0, lt=1)]
OptionalThreads = Annotated[int | None, Interval(ge=1, le=1024)]
Parallel = Annotated[int, Interval(ge=1, le=128)]
Size = Annotated[int, _SIZE_BOUNDS, SIZE_TEXT]
OptionalSize = Annotated[int | None, _SIZE_BOUNDS, SIZE_TEXT]
OptionalDuration = Annotated[float | None, Gt(0), DURATION_TEXT]
OptionalKvBits = Annotated[int | None, ParsedBy(parse_kv_bits)]
OptionalSeconds = Annotated[float | None, Gt(0)]
Normalisers = Annotated[tuple[Normaliser, ...], ParsedBy(split_commas)]
Gpus = Annotated[tuple[Annotated[int, Interval(ge=0, le=15)], ...], ParsedBy(split_numbers)]
GpuShares = Annotated[tuple[Annotated[float, Interval(ge=0, le=1e6)], ...], ParsedBy(split_numbers)]
JsonObject = Annotated[dict[str, Any], ParsedBy(parse_object)]
Eviction = Annotated[EvictionPolicy, ParsedBy(replace_former_policy)]

_engine = partial(Setting, "Engine")
_cache = partial(Setting, "Cache")


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """The settings that travel to the runtime with the model to load."""

    engine: Annotated[
        Name | None, _engine("Engine: llama.cpp or mlx", "chosen by the model's format")
    ] = None
    llama_lib: Annotated[
        Path | None,
        _engine(
            "Shared library of another build of llama.cpp, which `rekindle build-gpu` sets",
            "the one that is installed",
            flag=False,
        ),
    ] = None
    parallel: Annotated[Parallel, _engine("Maximum number of turns in one batch")] = 16
    max_model_len: Annotated[
        OptionalContext, _engine("Context length in tokens", "the model's, if it fits into memory")
    ] = None
    kv_fraction: Annotated[Share, _engine("Fraction of free memory for the KV pool")] = 0.3
    park_fraction: Annotated[
        OptionalShare,
        _engine("Fraction of free device memory for idle conversations", "0.3 on a GPU, else 0"),
    ] = None
    fp8_kvcache: Annotated[bool, _engine("Store the KV cache in 8 bits")] = False
    kv_bits: Annotated[
        OptionalKvBits, _engine("Quantise long conversations to 4 or 8 bits", "not quantised")
    ] = None
    kv_quantization_start: Annotated[
        Count, _engine("Length in tokens above which the KV cache is quantised")
    ] = 5000
    threads: Annotated[
        OptionalThreads,
        _engine(
            "CPU threads at most; turns that are not exact leave cores to other programs",
            f"one per core, at most {THREADS_LIMIT}",
        ),
    ] = None
    gpu_layers: Annotated[
        OptionalCount, _engine("Number of layers on the GPU", "all, if there is a GPU")
    ] = None
    gpu: Annotated[
        Gpus, _engine("Use this GPU, counted from 0; repeatable, or as in 0,1", "all")
    ] = ()
    tensor_split: Annotated[
        GpuShares,
        _engine("Shares of the layers for the GPUs, such as 3,1", "by their free memory"),
    ] = ()
    tool_format: Annotated[
        Name, _engine("Format of the model's tool calls", "auto: by its chat template")
    ] = AUTO
    reasoning_format: Annotated[
        Name, _engine("Format of the model's reasoning", "auto: by its chat template")
    ] = AUTO
    chat_template_kwargs: Annotated[
        JsonObject,
        _engine(
            "Default of the request field of this name: a JSON object, such as "
            """'{"enable_thinking": false}'""",
            "none",
        ),
    ] = field(default_factory=dict)
    ram_cache: Annotated[
        OptionalSize,
        _cache("RAM for cached state, such as 4GB", "a quarter of the free RAM, at least 2GiB"),
    ] = None
    disk_cache: Annotated[
        OptionalSize,
        _cache("Disk space for cached state; 0: none", "a tenth of the free space, at least 10GB"),
    ] = None
    disk_floor: Annotated[Size, _cache("Disk space that the cache always leaves free")] = 1 * GIB
    cache_dir: Annotated[Path, _cache("Folder for cached state")] = Path("~/.cache/rekindle/kv")
    cache_secret_file: Annotated[
        Path | None,
        _cache(
            "File with the secret of stored blocks; lets servers share them", "in the cache folder"
        ),
    ] = None
    normaliser: Annotated[
        Normalisers, _cache("Apply this normaliser; repeatable", ", ".join(DEFAULT_NORMALISERS))
    ] = DEFAULT_NORMALISERS
    cache_write: Annotated[
        WritePolicy, _cache("Which state to write to disk: always, named, likely or on-evict")
    ] = "always"
    cache_eviction: Annotated[
        Eviction, _cache("Eviction policy: hit-density or lru (least recently used)")
    ] = "hit-density"
    key_ttl: Annotated[
        OptionalSeconds, _cache("Seconds to keep an unused cache key; null: for ever", flag=False)
    ] = 1800.0

    @property
    def kv_type(self) -> str:
        if self.kv_bits and not self.kv_quantization_start:
            return KV_TYPES[self.kv_bits]
        return "q8_0" if self.fp8_kvcache else "f16"

    @property
    def thread_count(self) -> int:
        return self.threads or min(usable_cores(), THREADS_LIMIT)


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Number of cores that the CPU affinity and the container's quota allow this process."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    usable = usable or 4
    try:
        quota_us, period_us = map(int, quota.read_text().split())
    except (OSError, ValueError):  # there is no cgroup, or its quota is "max"
        return usable
    return max(min(usable, quota_us // period_us), 1)
