"""The quickstart learns while it keeps generating, and it learns synchronously too. The real command line, the real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


def train(folder: Path, *overrides: str) -> dict[str, Any]:
    """What `slipstream train recipes/quickstart.toml --json` prints last."""
    command = [sys.executable, "-m", "slipstream.cli.main", "train", str(RECIPE), "--json", "--run.folder", str(folder), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(900)
def test_the_quickstart_learns_asynchronously(tmp_path):
    """Half of its steps: of five seeds the worst then has a held-out reward of 0.88 (`benchmarks/results/learning`)."""
    summary = train(tmp_path / "run", "--trainer.steps", "50", "--trainer.schedule", "constant")
    assert summary["eval_reward_first"] < 0.3 and summary["eval_reward_last"] > 0.75
    assert 0 < summary["staleness_mean"] and summary["staleness_max"] <= summary["staleness_bound"]
    assert summary["rollouts_with_several_versions"] > 0


@pytest.mark.timeout(900)
def test_it_learns_synchronously_too(tmp_path):
    """A third of its steps: of five seeds the worst then has a held-out reward of 0.52."""
    summary = train(tmp_path / "run", "--buffer.max-staleness", "0", "--trainer.steps", "32", "--trainer.schedule", "constant")
    assert summary["staleness_max"] == 0 and summary["rollouts_with_several_versions"] == 0
    assert summary["eval_reward_last"] > summary["eval_reward_first"] + 0.15
