"""What is said of the quickstart recipe in other places is what the recipe says."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import load_config
from slipstream.config.arithmetic import arithmetic
from slipstream.data import load_data

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


def quickstart() -> dict[str, Any]:
    return tomllib.loads((RECIPES / "quickstart.toml").read_text(encoding="utf-8"))


def test_the_readme_shows_the_quickstart_recipe():
    blocks = re.findall(r"^```toml\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    shown = [tomllib.loads(block) for block in blocks]
    assert quickstart() in shown, "the run file in README.md differs from recipes/quickstart.toml; they must have the same settings"


def test_the_readme_shows_what_the_quickstart_amounts_to():
    config = load_config([RECIPES / "quickstart.toml"]).config
    numbers = arithmetic(config, len(load_data(config, RECIPES).train))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in numbers.lines()[:2]:
        assert f"\n{line}\n" in text, f"README.md lacks the line that validate prints of the quickstart: {line}"


def test_the_template_of_init_learns_with_the_settings_of_the_quickstart():
    text = (resources.files("slipstream.cli") / "template" / "run.toml").read_text(encoding="utf-8")
    template, recipe = tomllib.loads(text), quickstart()
    for table in ("model", "data", "rollout", "engine", "trainer", "evaluation"):
        assert template[table] == recipe[table], f"[{table}] of src/slipstream/cli/template/run.toml differs from recipes/quickstart.toml"


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.glob("*.toml")))
def test_every_recipe_loads(recipe):
    config = load_config([RECIPES / recipe]).config
    assert config.run.name == recipe.removesuffix(".toml").replace("_", "-") and config.reward
