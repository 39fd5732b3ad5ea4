"""Which settings name files, and what they are relative to.

A file named in a run file lies beside that run file; one named on the command line or in Python is relative to the working directory.
`load.py` makes them absolute at once, so that the resolved settings mean the same from anywhere, the run folder included.
"""

from __future__ import annotations

import re
from pathlib import Path

DATA_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")

# Keys whose value may name a file, with "N" for an index.
FILE_KEYS = (
    "model.name",
    "model.chat_template",
    "data.train",
    "data.eval",
    "reward.N.function",
    "rollout.tools.N",
    "loss.policy",
    "loss.reference",
    "loss.teacher",
    "weight_sync.directory",
)


def resolve_path(value: str, base_folder: Path) -> Path:
    """The file that a setting names: absolute ones as they are, `~` expanded, others below `base_folder`."""
    path = Path(value).expanduser()
    return path if path.is_absolute() else (base_folder / path).absolute()


def absolute_setting(key: str, value: str, base_folder: Path) -> str:
    """The value of one of FILE_KEYS with its file part made absolute; values that name no file come back unchanged.

    `rewards.py:score` -> `/base/rewards.py:score`; `train.jsonl` -> `/base/train.jsonl`; `exact`, `builtin:tiny`, a Hugging Face id stay.
    """
    if key in ("reward.N.function", "rollout.tools.N", "loss.policy"):
        file, colon, function = value.rpartition(":")
        return f"{resolve_path(file, base_folder)}{colon}{function}" if file.endswith(".py") else value
    if key == "weight_sync.directory":
        return str(resolve_path(value, base_folder))
    if key == "model.chat_template" and is_inline_template(value):
        return value
    head, tail = split_source(value) if key.startswith("data.") else (value, "")
    if _names_file(key, head, base_folder):
        return f"{resolve_path(head, base_folder)}{tail}"
    return value


def _names_file(key: str, head: str, base_folder: Path) -> bool:
    if head.startswith(("builtin:", "reasoning_gym:")):
        return False
    if key == "model.chat_template" or head.endswith((*DATA_SUFFIXES, ".gguf")) or head.startswith((".", "/", "~")):
        return True
    return resolve_path(head, base_folder).exists()


def split_source(source: str) -> tuple[str, str]:
    """A data source's place and what follows it: `folder:main:train` -> (`folder`, `:main:train`); schemes stay whole."""
    if source.startswith(("builtin:", "reasoning_gym:")):
        return source, ""
    head, colon, rest = source.partition(":")
    return head, colon + rest


def is_inline_template(value: str) -> bool:
    """A chat template given as text: Jinja or several lines, not the name of a file."""
    return bool(re.search(r"\{[{%#]|\n", value))
