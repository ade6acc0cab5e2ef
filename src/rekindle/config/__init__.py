"""Reads settings from `rekindle.yaml`, `MAX_KV_SIZE_GB`, `REKINDLE_*` and flags. The last wins."""

from rekindle.config.presets import Preset
from rekindle.config.settings import SETTINGS, Config, Declaration
from rekindle.config.sources import HIDDEN, default_files, load_config, origin, values_in_force

__all__ = [
    "HIDDEN",
    "SETTINGS",
    "Config",
    "Declaration",
    "Preset",
    "default_files",
    "load_config",
    "origin",
    "values_in_force",
]
