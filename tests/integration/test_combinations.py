"""One setting each: any two values of two settings either train together, to the end and in good order, or are refused with the reason.

Rows are pairwise (`covering.py`); each is a whole run of the tiniest kind.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from covering import Covering, Row, cover, pairs_of
from run_harness import Tables, run_file, sampled_with, step_lines, tables, told

from slipstream import train
from slipstream.config.arithmetic import arithmetic
from slipstream.config.load import LoadedConfig, load_config, load_tables
from slipstream.config.loss_tables import ALIASES, PRESETS
from slipstream.errors import ConfigError

STEPS, P, G = 5, 2, 3
PARTS = 4  # of the rows, a test each
LOWERS: Tables = {"threshold": [{"metric": "reward_std", "above": 0.0, "action": "lower_max_staleness"}]}
TWO = [{"type": "version_gate", "high": 2}, {"type": "geometric", "low": 0.9, "high": 1.1}]


def key(name: str, *values: object) -> dict[str, Tables]:
    """The values of one setting, the default first: what is written -> the tables that it makes. None: the setting is left out."""
    table, _, leaf = name.partition(".")
    return {_written(value): {} if value is None else {table: {leaf: value}} for value in values}


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# Setting -> what is written there -> the tables that it makes.
FACTORS: dict[str, dict[str, Tables]] = {
    name: key(name, *values)
    for name, values in {
        "rollout.interrupt": ("in_flight", "abort_resume", "abort_retry", "drain", "barrier"),
        "rollout.kv": ("keep", "recompute"),
        "rollout.interrupt_after": (None, 0, 1),
        "rollout.oversample": (None, 5),
        "rollout.selection": ("uniform", "roc"),
        "rollout.top_p": (1.0, 0.8),
        "buffer.max_staleness": (1, 0, 3),
        "buffer.window": (None, 1, "largest", "unbounded"),
        "buffer.on_stale": ("mask_tokens", "down_weight", "drop", "cancel_early", "keep"),
        "buffer.stale_level": (None, "token", "rollout", "group"),
        "buffer.filter_zero_variance": (False, True),
        "weight_sync.every": (1, 2),
        "weight_sync.transport": ("shared_memory", "files", "collective"),
        "weight_sync.payload": (None, "full", "delta", "adapter"),
        "lora.rank": (0, 2),
        "weight_sync.lag": (None, 1),
        "run.deterministic": (False, True),
        "data.eval": (None, 2),
        "trainer.updates_per_batch": (1, 2),
        "trainer.minibatches": (1, 2),
        "trainer.gradient_checkpointing": (False, True),
        "loss.preset": ("grpo", *(name for name in PRESETS if name != "grpo")),
        "loss.old_logprobs": (None, "sampler", "recomputed"),
        "loss.correction": (None, [], *([name] for name in ALIASES), TWO),
        "loss.kl_coefficient": (0.0, 0.1),
        "loss.kl_in": ("loss", "reward"),
        "loss.kl_estimator": (None, "k1", "k2"),
        "loss.teacher": (None, "builtin:tiny"),
        "loss.teacher_kl": ("sampled", "full"),
        "loss.entropy_coefficient": (0.0, 0.01),
        "loss.overlong_tokens": (None, 4),
    }.items()
} | {"threshold": {"none": {}, "lowers": LOWERS}, "reward": {"given": {}, "none": {}}}
# Policy losses and corrections are many, and need not meet in every way what they are tested with elsewhere (`test_trainer_objective.py`,
# `test_loss_settings.py`: the parts of a loss), nor how tokens came, which they do not see.
LOSS = ("loss.preset", "loss.correction")
PARTS_OF_LOSS = (*LOSS, "loss.old_logprobs", "loss.kl_in", "loss.kl_estimator")
HOW_TOKENS_CAME = ("rollout.interrupt", "rollout.interrupt_after", "buffer.window", "buffer.on_stale", "buffer.stale_level")
APART = [frozenset({of_loss, name}) for of_loss in LOSS for name in PARTS_OF_LOSS + HOW_TOKENS_CAME]
# Keys that an error may name -> the settings that are to blame.
OWNERS = {name: (name,) for name in FACTORS} | {
    "buffer.max_groups": ("buffer.window",),
    "loss.policy": ("loss.preset",),
    "loss.advantage": ("loss.preset",),
    "threshold.0.action": ("threshold",),
    "reward": ("reward", "loss.teacher"),
}


def settings(row: Row, folder: Path | str, **changes: Tables | str) -> Tables:
    """The tiniest run with these values: fewer engine slots than rollouts, so that some of a group run while weights change."""
    made = tables(
        Path(folder),
        rollout={"group_size": G, "max_new_tokens": 12, "temperature": 1.5},
        engine={"slots": 8},
        trainer={"steps": STEPS, "groups_per_step": P, "logprob_chunk_tokens": 16},
        checkpoint={"every": 3},
        evaluation={"every": 3},
    )
    for table, change in [item for name, value in row.items() for item in FACTORS[name][value].items()] + list(changes.items()):
        made[table] = {**made.get(table, {}), **change} if isinstance(change, dict) else change
    buffer = made.get("buffer", {})
    if buffer.get("window") == "largest":
        buffer["window"] = P * (1 + buffer.get("max_staleness", 1))
    elif buffer.get("window") == "unbounded":
        buffer["max_groups"] = 3 * P
    return made


def problems(row: Row) -> list[str]:
    """What is said of these settings when they are loaded; nothing of those that can be trained."""
    try:
        load_tables(settings(row, "run"), reward_given=row.get("reward") != "none")
    except ConfigError as error:
        return error.problems
    return []


def blame(row: Row) -> frozenset[str]:
    """The settings of the row that are refused. Every refusal names one of them: `source: key, key: text`."""
    blamed: set[str] = set()
    for line in problems(row):
        owners = {owner for name in line.split(": ")[1].split(", ") for owner in OWNERS.get(name, ())}
        assert owners, f"this names none of the settings: {line}"
        blamed |= owners
    return frozenset(blamed)


SEED = 10  # of the first twenty-five the one with the fewest rows


@cache
def covering(seed: int = SEED) -> Covering:
    return cover({name: list(values) for name, values in FACTORS.items()}, blame, seed, APART)


# ---- what is refused

# Settings that exclude each other in some of their values -> in how many pairs of these.
REFUSED = {
    ("buffer.filter_zero_variance", "reward"): 1,
    ("buffer.filter_zero_variance", "weight_sync.lag"): 1,
    ("buffer.max_staleness", "buffer.window"): 2,
    ("buffer.max_staleness", "rollout.interrupt_after"): 1,
    ("buffer.max_staleness", "threshold"): 1,
    ("buffer.max_staleness", "weight_sync.every"): 1,
    ("buffer.max_staleness", "weight_sync.lag"): 2,
    ("buffer.on_stale", "buffer.stale_level"): 6,
    ("buffer.on_stale", "buffer.window"): 1,
    ("buffer.window", "weight_sync.lag"): 1,
    ("data.eval", "reward"): 1,
    ("loss.kl_coefficient", "loss.kl_estimator"): 2,
    ("loss.kl_coefficient", "loss.kl_in"): 1,
    ("loss.overlong_tokens", "loss.preset"): 1,
    ("loss.teacher", "loss.teacher_kl"): 1,
    ("loss.teacher", "reward"): 1,
    ("lora.rank", "weight_sync.payload"): 2,
    ("reward", "rollout.selection"): 1,
    ("rollout.interrupt", "rollout.interrupt_after"): 6,
    ("rollout.interrupt", "rollout.kv"): 3,
    ("rollout.interrupt", "weight_sync.lag"): 4,
    ("rollout.interrupt_after", "weight_sync.lag"): 2,
    ("rollout.kv", "weight_sync.lag"): 1,
    ("rollout.oversample", "rollout.selection"): 1,
    ("run.deterministic", "weight_sync.lag"): 1,
    ("threshold", "weight_sync.lag"): 1,
    ("weight_sync.every", "weight_sync.lag"): 1,
}


def test_what_is_refused_is_known_and_everything_else_is_covered() -> None:
    made = covering()
    found = Counter(tuple(sorted(name for name, _ in pair)) for pair in made.refused)
    assert found == REFUSED
    met = set().union(*map(pairs_of, made.rows)) | set(made.refused)
    for name, values in FACTORS.items():
        for other in FACTORS.keys() - {name}:
            if frozenset({name, other}) not in APART:
                assert all(frozenset({(name, x), (other, y)}) in met for x in values for y in FACTORS[other])


def test_every_refusal_says_what_to_do() -> None:
    for pair in covering().refused:
        for line in problems(dict(pair)):
            text = line.split(": ", 2)[2]
            assert any(word in text for word in ("use ", "leave ", "set ", "name one", "write ", "add ")), line


# ---- what trains


def coarse(completion: str) -> float:
    """A reward that the rollouts of a group often have in common."""
    return sum(map(ord, completion)) % 3 / 2


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A few prompts: they are read for every run."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"sort {n}", "answer": "".join(sorted(str(n)))}) + "\n" for n in range(1234, 1274)))
    return str(path)


def check_run(loaded: LoadedConfig, folder: Path) -> None:
    """A finished run: accounts closed, every number finite, no token of weights that were not published or older than was said before."""
    story, lines, said = told(folder), step_lines(folder), arithmetic(loaded.config)
    assert sorted(story.batches) == list(range(STEPS)) == [line["step"] for line in lines]
    for line in lines:
        assert line["skipped"] == ("no token to train" if not line["num_loss_tokens"] else None)
        assert line["skipped"] or {"loss", "grad_norm"} <= line.keys()
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, int | float)), line
        assert line["staleness_max"] is None or said.staleness_limit is None or line["staleness_max"] <= said.staleness_limit
    for step, versions in sampled_with(story).items():
        assert versions <= {version for version in story.versions if version <= step}
        assert said.worst_staleness is None or step - min(versions) <= said.worst_staleness
        assert loaded.config.weight_sync.lag is None or versions == {max(0, step - loaded.config.weight_sync.lag)}
    assert loaded.config.data.eval is None or {0, STEPS} <= story.evaluations.keys()
    assert all(version >= due and version in story.versions for due, (version, *_) in story.evaluations.items())


@pytest.mark.parametrize("part", range(PARTS))
def test_every_two_settings_train_together(part: int, rows_file: str, tmp_path: Path) -> None:
    for number, row in list(enumerate(covering().rows))[part::PARTS]:
        folder, rewarded = tmp_path / str(number), row["reward"] != "none"
        loaded = load_tables(settings(row, folder, data={"train": rows_file}, run={"seed": number}), reward_given=rewarded)
        try:
            train(loaded, reward=coarse if rewarded else None)
            check_run(loaded, folder)
        except Exception as error:
            error.add_note(f"row {number}: {changed(row)}")
            raise


# Rows whose parts live in processes of their own: new attempts and cancellations, frozen models, unpublished versions, gates of the engine.
ACROSS = {
    "aborted, selected, distilled": {
        "rollout.interrupt": "abort_retry",
        "rollout.oversample": "5",
        "rollout.selection": "roc",
        "trainer.updates_per_batch": "2",
        "loss.teacher": "builtin:tiny",
        "loss.teacher_kl": "full",
    },
    "drained, published by twos, evaluated": {
        "weight_sync.transport": "collective",
        "rollout.interrupt": "drain",
        "weight_sync.every": "2",
        "data.eval": "2",
        "buffer.filter_zero_variance": "true",
        "loss.kl_coefficient": "0.1",
        "loss.kl_in": "reward",
    },
    "resumed, ready first, cancelled": {
        "rollout.interrupt": "abort_resume",
        "rollout.kv": "recompute",
        "buffer.window": "unbounded",
        "buffer.on_stale": "cancel_early",
        "loss.preset": "decoupled_ppo",
    },
    "in turns, truncated, compared": {
        "rollout.interrupt": "barrier",
        "rollout.top_p": "0.8",
        "trainer.minibatches": "2",
        "loss.kl_coefficient": "0.1",
        "loss.teacher": "builtin:tiny",
        "loss.correction": '["m2po"]',
    },
}


@pytest.mark.parametrize("row", ACROSS.values(), ids=list(ACROSS))
def test_settings_meet_across_processes(row: Row, tmp_path: Path) -> None:
    loaded = load_config([run_file(tmp_path, settings(row, tmp_path / "run", launch="local"))])
    train(loaded)
    check_run(loaded, tmp_path / "run")


def changed(row: Row) -> Row:
    return {name: value for name, value in row.items() if value != next(iter(FACTORS[name]))}
