"""Settings: one pydantic tree = one TOML file. Imports no torch."""

from slipstream.config.settings import Config

__all__ = ["Config"]
