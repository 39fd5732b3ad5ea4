"""Settings: one pydantic tree = one TOML file. Imports no torch."""

from slipstream.config.load import LoadedConfig, check_config, load_config, load_tables
from slipstream.config.resume import check_resume, compare_for_resume
from slipstream.config.save import save_config, settings_hash, to_toml
from slipstream.config.settings import Config

__all__ = [
    "Config",
    "LoadedConfig",
    "check_config",
    "check_resume",
    "compare_for_resume",
    "load_config",
    "load_tables",
    "save_config",
    "settings_hash",
    "to_toml",
]
