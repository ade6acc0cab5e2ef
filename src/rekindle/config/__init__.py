"""Settings: `rekindle.yaml`, `MAX_KV_SIZE_GB`, `REKINDLE_*`, then flags. The later one wins."""

from rekindle.config.presets import Preset
from rekindle.config.settings import SETTINGS, Config, Declaration
from rekindle.config.sources import load_config

__all__ = ["SETTINGS", "Config", "Declaration", "Preset", "load_config"]
