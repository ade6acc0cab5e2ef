"""The settings that a runtime needs, and what every declaration of a setting says.

A setting is one field: its name is its key in `rekindle.yaml` and, respelled, its flag and its
variable; its type and bounds validate it; its `Setting` is what `--help` shows. `config.Config`
adds the settings of the front to those declared here, so a field of `RuntimeSettings` reaches the
runtime without being named anywhere else.

Bounds come from annotated-types, which pydantic reads: the runtime validates nothing and would
import pydantic for their sake alone.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Gt, Interval, MinLen

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

# ----------------------------------------------------------------------
# The normalisers of prompts, by the names that requests, settings and reports have for them.

Normaliser = Literal[
    "claude-code-billing-header",
    "home-assistant-seconds",
    "goose-minutes",
    "tools",
    "session-paths",
    "dates",
]
#: What a request has done to its prompt: those the server is set to, nothing, or just these.
Normalise = bool | list[Normaliser]

#: Those that take nothing from a prompt that means anything to its model.
DEFAULT_NORMALISERS: tuple[Normaliser, ...] = (
    "claude-code-billing-header",
    "home-assistant-seconds",
    "goose-minutes",
    "tools",
)


log = logging.getLogger("rekindle.config")

Group = Literal["Server", "Access", "Engine", "Cache", "Replies"]  # headings of `--help`, in order
WritePolicy = Literal["always", "named", "likely", "on-evict"]
EvictionPolicy = Literal["hit-density", "lru"]

AUTO = "auto"  # a format that the model's template decides
COUNT_LIMIT = 10_000_000  # of anything countable: a larger number is a typing mistake
SIZE_LIMIT = 1 << 60
THREADS_LIMIT = 16  # more threads stop helping
GB, GIB = 10**9, 1 << 30
KV_TYPES = {4: "q4_0", 8: "q8_0"}  # of quantised KV cells, by their bits

_UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*((?:[kmgt]i?)?)b?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a person reads about a setting."""

    help: str
    group: Group
    default: str | None = None  # in words, where the value alone says too little
    flag: bool = True  # False: from the file or the environment only
    secret: bool = False  # its value is never shown


def parse_size(value: object) -> object:
    """`2GB`, `512MiB`, `1.5g` or a number of bytes, as bytes."""
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError("takes a size such as 2GB, 512MiB or a number of bytes")
    number, unit = found.groups()
    return int(Fraction(number) * _UNITS[unit.lower()])


def format_size(size_bytes: int) -> str:
    """The shortest text that `parse_size` reads as the same number."""
    fitting = [unit for unit, factor in _UNITS.items() if size_bytes % factor == 0]
    unit = max(fitting, key=_UNITS.__getitem__) if size_bytes else ""
    return f"{size_bytes // _UNITS[unit]}{unit[:1].upper()}{unit[1:]}B"


class SizeText:
    """Lets pydantic take a size as people write it."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        from pydantic_core import core_schema  # by the front alone

        return core_schema.no_info_before_validator_function(parse_size, handler(source))


@dataclass(frozen=True, slots=True)
class Among:
    """Lets pydantic take some numbers alone."""

    numbers: tuple[int, ...]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        from pydantic_core import core_schema  # by the front alone

        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, number: int | None) -> int | None:
        if number is not None and number not in self.numbers:
            raise ValueError(f"takes {' or '.join(map(str, self.numbers))}")
        return number


@dataclass(frozen=True, slots=True)
class FormerValues:
    """Lets pydantic accept values that a setting used to have, with a warning in the log."""

    values: tuple[str, ...]
    replacement: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        from pydantic_core import core_schema  # only the front needs pydantic

        return core_schema.no_info_before_validator_function(self._replace, handler(source))

    def _replace(self, value: object) -> object:
        if value not in self.values:
            return value
        log.warning("The setting %r no longer exists. Using %r.", value, self.replacement)
        return self.replacement


class CommaSeparated:
    """Lets pydantic take several values as one text."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        from pydantic_core import core_schema  # by the front alone

        return core_schema.no_info_before_validator_function(split_commas, handler(source))


def split_commas(value: object) -> object:
    """One value, or several separated by commas, as a list."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


Name = Annotated[str, MinLen(1)]
Normalisers = Annotated[tuple[Normaliser, ...], CommaSeparated()]
SIZE_BOUNDS = Interval(ge=0, lt=SIZE_LIMIT)
Size = Annotated[int, SIZE_BOUNDS, SizeText()]


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """The settings that travel to the runtime with the model to load."""

    engine: Annotated[
        Name | None,
        Setting("What computes: llama.cpp or mlx", "Engine", "by the model's format"),
    ] = None
    parallel: Annotated[
        int, Interval(ge=1, le=128), Setting("Turns computed at once", "Engine")
    ] = 16
    max_model_len: Annotated[
        int | None,
        Interval(ge=16, le=COUNT_LIMIT),
        Setting("Context in tokens", "Engine", "the model's, if memory allows"),
    ] = None
    kv_fraction: Annotated[
        float, Interval(gt=0, lt=1), Setting("Share of free memory for the KV pool", "Engine")
    ] = 0.3
    park_fraction: Annotated[
        float | None,
        Interval(ge=0, lt=1),
        Setting(
            "Share of free memory for idle conversations on the device, outside the pool",
            "Engine",
            "0.3 on a GPU, else 0",
        ),
    ] = None
    fp8_kvcache: Annotated[bool, Setting("8-bit KV cells", "Engine")] = False
    kv_bits: Annotated[
        int | None,
        Among(tuple(KV_TYPES)),
        Setting("Bits of KV cells beyond the start: 4 or 8", "Engine", "not quantised"),
    ] = None
    kv_quantization_start: Annotated[
        int,
        Interval(ge=0, le=COUNT_LIMIT),
        Setting("Tokens after which KV cells have so few bits", "Engine"),
    ] = 5000
    threads: Annotated[
        int | None,
        Interval(ge=1, le=1024),
        Setting("CPU threads", "Engine", f"all cores, to {THREADS_LIMIT}"),
    ] = None
    gpu_layers: Annotated[
        int | None,
        Interval(ge=0, le=COUNT_LIMIT),
        Setting("Layers on the GPU", "Engine", "all when the library has one"),
    ] = None
    tool_format: Annotated[
        Name, Setting("How the model writes tool calls", "Engine", "auto: by its template")
    ] = AUTO
    reasoning_format: Annotated[
        Name, Setting("How it writes its reasoning", "Engine", "auto: by its template")
    ] = AUTO
    ram_cache: Annotated[
        int | None,
        SIZE_BOUNDS,
        SizeText(),
        Setting(
            "RAM for cached state: 512MiB, 4GB …", "Cache", "a quarter of the free, 2GiB or more"
        ),
    ] = None
    disk_cache: Annotated[
        int | None,
        SIZE_BOUNDS,
        SizeText(),
        Setting("Disk for cached state; 0 for none", "Cache", "a tenth of the free, 10GB or more"),
    ] = None
    disk_floor: Annotated[Size, Setting("Free disk space left to others", "Cache")] = 1 * GIB
    cache_dir: Annotated[Path, Setting("Folder for cached state", "Cache")] = Path(
        "~/.cache/rekindle/kv"
    )
    cache_secret_file: Annotated[
        Path | None,
        Setting(
            "File with the secret that authenticates stored blocks; lets servers share them",
            "Cache",
            "a random one in the cache folder",
        ),
    ] = None
    normaliser: Annotated[
        Normalisers,
        Setting("Normalise this in prompts; repeatable", "Cache", ", ".join(DEFAULT_NORMALISERS)),
    ] = DEFAULT_NORMALISERS
    cache_write: Annotated[
        WritePolicy,
        Setting("Write to disk always, named (only), if likely (used again), on-evict", "Cache"),
    ] = "always"
    cache_eviction: Annotated[
        EvictionPolicy,
        FormerValues(("adaptive", "frequency"), "hit-density"),
        Setting("Evict by learned hit-density, or (lru) the least recently used", "Cache"),
    ] = "hit-density"
    key_ttl: Annotated[
        float | None,
        Gt(0),
        Setting("Seconds that an unused cache key is kept; null for ever", "Cache", flag=False),
    ] = 1800.0

    @property
    def kv_type(self) -> str:
        """The usual type of the engine's KV cells."""
        if self.kv_bits and not self.kv_quantization_start:
            return KV_TYPES[self.kv_bits]
        return "q8_0" if self.fp8_kvcache else "f16"

    @property
    def thread_count(self) -> int:
        """`threads`, or the cores this process may use up to where more stop helping."""
        return self.threads or min(usable_cores(), THREADS_LIMIT)


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """That this process may use, by its affinity and by the quota of its container."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    usable = usable or 4
    try:
        quota_us, period_us = map(int, quota.read_text().split())
    except (OSError, ValueError):  # there is no cgroup, or it says "max"
        return usable
    return max(min(usable, quota_us // period_us), 1)
