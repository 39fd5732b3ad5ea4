"""docs/losses.md: its tables are those of the code, its example runs.

`python tests/unit/test_losses_page.py` prints the tables, to be put into the page.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from loss_tokens import random_tokens

from slipstream.config import load_config
from slipstream.config.loss_tables import ADVANTAGES, AGGREGATIONS, ALIASES, CORRECTIONS, POLICY_LOSSES, PRESETS, Parameter
from slipstream.config.losses import resolve
from slipstream.config.settings import CorrectionSettings, LossSettings
from slipstream.trainer import losses

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"


def tables() -> Iterator[str]:
    yield table(("preset", "policy loss", "advantage", "aggregation", "π_old", "correction"), map(preset, PRESETS))
    yield table(
        ("policy loss", "per token, minimised", "parameters", "source"),
        ((f"`{n}`", f"`{p.formula}`", parameters(p.parameters), p.source) for n, p in POLICY_LOSSES.items()),
    )
    yield table(("advantage", "formula", "source"), ((f"`{n}`", f"`{a.formula}`", a.source) for n, a in ADVANTAGES.items()))
    yield table(("aggregation", "weights"), ((f"`{n}`", text) for n, text in AGGREGATIONS.items()))
    yield table(
        ("correction", "weight", "keys", "source"),
        ((f"`{n}`", f"`{c.formula}`", keys(n), c.source) for n, c in CORRECTIONS.items()),
    )
    yield table(("name", "correction"), ((f"`{name}`", f"`{as_table(alias)}`") for name, alias in ALIASES.items()))


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(line)} |\n" for line in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


def preset(name: str) -> tuple[str, ...]:
    loss = resolve(LossSettings(preset=name))  # type: ignore[arg-type]
    options = ", ".join(f"{key} {value:g}" for key, value in loss.options.items())
    old = "-" if POLICY_LOSSES[loss.policy].denominator == "none" else loss.old_logprobs
    corrections = ", ".join(f"`{c.type}`" for c in loss.corrections) or "-"
    return f"`{name}`", f"`{loss.policy}` {options}", f"`{loss.advantage}`", f"`{loss.aggregation}`", old, corrections


def parameters(given: dict[str, Parameter]) -> str:
    return ", ".join(f"`{name}` {'off' if p.default is None else f'{p.default:g}'}" for name, p in given.items())


def keys(name: str) -> str:
    row = CORRECTIONS[name]
    out = [f"`level` {' / '.join(row.levels)}"] if row.levels else []
    out += [f"`statistic` {' / '.join(row.statistics)}"] if row.statistics else []
    return "; ".join([*out, *(f"`{bound}`{' (k1)' if row.statistics and bound == 'low' else ''}" for bound in row.bounds)])


def as_table(correction: CorrectionSettings) -> str:
    given = correction.model_dump(exclude_none=True)
    return "{" + ", ".join(f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value:g}" for key, value in given.items()) + "}"


def test_the_tables_of_the_page_are_those_of_the_code():
    text = PAGE.read_text(encoding="utf-8")
    for made in tables():
        absent = [line for line in made.splitlines() if line not in text]
        assert made in text, f"docs/losses.md lacks {absent or 'the order of ' + made.splitlines()[0]}; see {Path(__file__).name}"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_own_loss_of_the_page_runs(tmp_path):
    [code] = blocks("python")
    (tmp_path / "losses.py").write_text(code, encoding="utf-8")
    [settings] = [block for block in blocks("toml") if "losses.py:" in block]
    (tmp_path / "run.toml").write_text(settings + "[[reward]]\nfunction = 'exact'\n", encoding="utf-8")
    loss = losses.policy_loss(resolve(load_config([tmp_path / "run.toml"]).config.loss))
    value, cut = loss(random_tokens(1))
    assert value.isfinite().all() and 0 < cut.sum() < len(cut)


@pytest.mark.parametrize("block", blocks("toml"))
def test_the_settings_of_the_page_resolve(block):
    loss = tomllib.loads(block)["loss"]
    resolve(LossSettings.model_validate(loss))


if __name__ == "__main__":
    print("\n".join(tables()))
