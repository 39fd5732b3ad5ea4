"""The data of a run: training rows, evaluation rows, and the fingerprint that a resume compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from slipstream.config.settings import Config, DataSettings
from slipstream.data.prompts import prompt_key, render_messages
from slipstream.data.rows import Row, fingerprint, load_rows, prepare_rows
from slipstream.errors import DataError


@dataclass(frozen=True, slots=True)
class Data:
    """What a run trains and is evaluated on."""

    train: list[Row]
    eval: list[Row]  # empty: no evaluation
    fingerprint: str  # of `train`, xxh3-128 hex
    eval_fingerprint: str | None  # of `eval` before `evaluation.limit`; None without evaluation
    num_prompts: int  # distinct prompts in `train`
    num_shared_prompts: int  # distinct evaluation prompts that are also trained on; 0 after a hold-out

    def notes(self) -> list[str]:
        """What a person should know about this data, one sentence each."""
        out = []
        if self.num_prompts < len(self.train):
            out.append(f"{len(self.train):,} training rows hold {self.num_prompts:,} distinct prompts")
        if self.num_shared_prompts:
            out.append(f"{self.num_shared_prompts:,} evaluation prompts are also trained on; data.eval = N would hold out N prompts")
        return out


def load_data(config: Config, base_folder: Path, rows: Sequence[Mapping[str, Any]] | None = None) -> Data:
    """Read, check and split the data of a run. Raises DataError.

    Every row is rendered once, so a row without its column, an empty prompt or one that ends with the assistant is found here, not in
    the middle of a run. `data.eval` is a source, or the number of distinct prompts to hold out (see `hold_out`), or nothing. `rows`
    are training rows from Python, used instead of `data.train`.
    """
    settings = config.data
    source = settings.train if rows is None else "data"
    train = load_rows(source, settings, base_folder) if rows is None else prepare_rows(rows, settings, source)
    keys = _prompt_keys(train, settings, source)
    if isinstance(settings.eval, int):
        train, held = hold_out(train, keys, settings.eval, config.run.seed, source)
        distinct, shared = len(set(keys)) - settings.eval, 0
    else:
        held = load_rows(settings.eval, settings, base_folder, part="eval") if settings.eval else []
        distinct = len(set(keys))
        shared = len(set(_prompt_keys(held, settings, settings.eval or "")) & set(keys))
    _check_size(train, config, source)
    proof = fingerprint(held) if held else None  # of all of them: the limit may change at a resume
    return Data(train, held[: config.evaluation.limit], fingerprint(train), proof, distinct, shared)


def hold_out(rows: list[Row], keys: list[str], count: int, seed: int, source: str = "data") -> tuple[list[Row], list[Row]]:
    """(train, held out): `count` distinct prompts leave the training rows, with every duplicate of them.

    `keys[i]` is the rendered prompt of row i: rows with equal prompts go to the same side, whatever else differs. Which prompts are held
    out depends on the seed and the prompts, not on the order of the rows; each is held out once, as its first row, in the rows' order.
    """
    first = {key: index for index, key in reversed(list(enumerate(keys)))}
    if count >= len(first):
        raise DataError(
            f"data.eval = {count}: {source} has only {len(first)} distinct prompts in {len(rows)} rows, so nothing would be left to train "
            f"on; hold out at most {max(len(first) - 1, 0)}"
        )
    chosen = set(sorted(first, key=lambda key: (xxhash.xxh3_64_intdigest(key.encode(), seed=seed), key))[:count])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in chosen]
    return train, [rows[index] for index in sorted(first[key] for key in chosen)]


def _prompt_keys(rows: list[Row], settings: DataSettings, source: str) -> list[str]:
    """The rendered prompt of every row; the first few wrong rows are named together."""
    keys, wrong = [], []
    for number, row in enumerate(rows, start=1):
        try:
            keys.append(prompt_key(render_messages(row, settings, f"{source}, row {number}")))
        except DataError as error:
            wrong.append(str(error))
    if wrong:
        more = f"\n... and {len(wrong) - 3} more rows" if len(wrong) > 3 else ""
        raise DataError("\n".join(wrong[:3]) + more)
    return keys


def _check_size(train: list[Row], config: Config, source: str) -> None:
    count, needed = len(train), config.trainer.groups_per_step
    rows = f"{source}: {count} training row" + ("" if count == 1 else "s")
    if isinstance(config.data.eval, int):
        rows += f" after holding out {config.data.eval} prompts"
    if count == 1:
        raise DataError(f"{rows}: one row is not a data set to learn from; give at least {max(2, needed)}")
    if count < needed:
        raise DataError(
            f"{rows}, fewer than trainer.groups_per_step = {needed}: a step could not draw {needed} different rows; "
            f"add rows or use groups_per_step <= {count}"
        )
