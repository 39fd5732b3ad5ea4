"""Writes `docs/settings.md` from the settings tree: `python -m slipstream.config.document > docs/settings.md`.

With `--keys` it writes every key with its default, one per line: the list that a test freezes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from slipstream.config.keys import all_keys, describe, table_of, table_of_list
from slipstream.config.settings import Config, Settings

HEAD = """# Settings

Every key of a run file, with what it allows and its default. Made from the settings classes by `python -m slipstream.config.document`.

A run is one TOML file; `slipstream train RUN.toml OVERLAY.toml ... --section.key value` merges overlays and then options over it, key by
key (lists are replaced). Options take hyphens or underscores, `--section.key=value`, `--section.flag` and `--no-section.flag`; a table
of a list is named by its index (`--reward.0.weight 2`), and `none` clears a key that may be empty. Files named in a run file are relative
to that file, files named in an option to the working directory. `slipstream validate RUN.toml` checks it all and prints what it amounts to.

`[[experiment]]` tables make several runs of one file: `name`, and any of the settings below that differ (`run.seed = 1`,
`[[experiment.reward]]`); see [LoRA](lora.md#several-experiments-in-one-run).
"""


def document() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_sections()])


def key_list() -> str:
    """`key = default` for every key, in the order of the file."""
    return "".join(f"{key.path} = {default_text(key.field)}\n" for key in all_keys())


def default_text(field: FieldInfo) -> str:
    """A field's default as TOML would have it; `none` and `(required)` for the two that TOML has no word for."""
    default: Any = field.default
    if default is PydanticUndefined:
        return "(required)"
    if default is None:
        return "none"
    return json.dumps(default)


def _sections() -> Iterator[str]:
    top = {name: field for name, field in Config.model_fields.items() if not _table(field)}
    yield _section("Top level", top)
    for name, field in Config.model_fields.items():
        if table := _table(field):
            heading = f"`[[{name}]]`" if table_of_list(field.annotation) else f"`[{name}]`"
            yield _section(heading, table.model_fields)


def _table(field: FieldInfo) -> type[Settings] | None:
    return table_of(field.annotation) or table_of_list(field.annotation)


def _section(heading: str, fields: dict[str, FieldInfo]) -> str:
    rows = [
        f"| `{name}` | {_cell(describe(f))} | `{_cell(default_text(f))}` | {_cell(f.description or '')} |" for name, f in fields.items()
    ]
    return f"## {heading}\n\n| key | allowed | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(key_list() if sys.argv[1:] == ["--keys"] else document())
