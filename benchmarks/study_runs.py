"""Training runs of a study: each a `slipstream train` of its own, of which one small JSON record stays. What has a record is not run again.

A run is started in a fresh folder and started anew if it was interrupted: only a finished one leaves a record, written by rename. Its
folder is then removed. So a study may be stopped and killed at any moment; the deadlines that the clock would break meanwhile are
lifted, and a run in which an attempt, an evaluation or an update failed all the same is not accepted, since its data differ.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from slipstream.observe.metrics import Metrics, read_metrics

ROOT = Path(__file__).parent.parent
ATTEMPTS = 3
OUT, ERR = "stdout", "stderr"  # of a run, beside its run folder
BLOCK = 10  # steps that one row of the course of training stands for
COURSE = ("reward_mean", "kl_k3", "ess_fraction", "clipped_fraction", "masked_fraction", "entropy", "completion_tokens_mean")
DAY_S = "86400"
PATIENT = {  # a stopped process must not fail its rollouts when it goes on
    "rollout.timeout_s": DAY_S,
    "evaluation.timeout_s": DAY_S,
    "trainer.step_timeout_s": DAY_S,
}


@dataclass(frozen=True, slots=True)
class Run:
    """One training run: a run file and what is changed of it."""

    task: str
    setting: str
    seed: int
    recipe: str
    changes: dict[str, str]  # section.key -> value as on the command line

    @property
    def name(self) -> str:
        return f"{self.task}-{self.setting}-seed{self.seed}"

    def arguments(self) -> list[str]:
        """As one types them behind `slipstream train`."""
        pairs = {"run.seed": str(self.seed), **self.changes}
        return [f"recipes/{self.recipe}", *(word for key, value in pairs.items() for word in (f"--{key}", value))]

    @property
    def command(self) -> str:
        return "slipstream train " + " ".join(self.arguments())

    @property
    def lag(self) -> int | None:
        value = self.changes.get("weight_sync.lag")
        return None if value is None else int(value)


def record_path(records: Path, run: Run) -> Path:
    return records / f"{run.name}.json"


def recorded(records: Path, run: Run) -> dict[str, Any] | None:
    """The record of this run; None where there is none, or one of other settings."""
    try:
        found = json.loads(record_path(records, run).read_text())
    except FileNotFoundError:
        return None
    return found if found["command"] == run.command else None


# ---- one run -------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Started:
    run: Run
    process: subprocess.Popen[bytes]
    folder: Path
    attempt: int
    revision: str


def revision() -> str:
    """The commit of the code as it is now; with a plus where the tree holds more than that."""
    said = subprocess.run(
        ["git", "describe", "--always", "--abbrev=10", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return said.stdout.strip() or "unknown"


def start_run(run: Run, work: Path, attempt: int) -> Started:
    """Start it in the background, one thread to each pool, its output beside its run folder."""
    work.mkdir(parents=True, exist_ok=True)
    for left in work.glob(f"{run.name}.*"):  # of an interrupted study
        shutil.rmtree(left, ignore_errors=True)
    folder = work / f"{run.name}.{os.getpid()}"  # never that of a run which outlived a killed study
    folder.mkdir()
    command = [sys.executable, "-m", "slipstream.cli.main", "train", *run.arguments()]
    extra = {"run.folder": str(folder / "run"), "checkpoint.keep": "1", **PATIENT}
    command += [word for key, value in extra.items() for word in (f"--{key}", value)] + ["--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with (folder / OUT).open("wb") as out, (folder / ERR).open("wb") as err:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    return Started(run, process, folder, attempt, revision())


def finish_run(started: Started, records: Path) -> str | None:
    """Write the record of a run that has ended and remove its folder. Returns why there is none, else None."""
    run, folder = started.run, started.folder
    if started.process.returncode:
        return f"exit code {started.process.returncode}: {' '.join(_last_lines(folder / ERR, 2))}"
    summary = json.loads(_last_lines(folder / OUT, 1)[0])
    metrics = read_metrics(folder / "run")
    wrong = flaw(run, summary, metrics)
    if wrong is None:
        write_record(record_path(records, run), record(run, summary, metrics, started.revision))
    shutil.rmtree(folder, ignore_errors=True)
    return wrong


def flaw(run: Run, summary: dict[str, Any], metrics: Metrics) -> str | None:
    """Why a finished run must not enter the study."""
    if summary["steps"] != summary["steps_planned"] or len(metrics.steps) != summary["steps"]:
        return f"{summary['steps']} of {summary['steps_planned']} steps, {len(metrics.steps)} step lines"
    if any(line["failed"] for line in metrics.evaluations) or (run.lag is not None and summary["evaluations_skipped"]):
        return "an evaluation failed or was skipped"  # in an asynchronous run one may be: the next came due before it could start
    if summary["dropped_groups"] or any(key.startswith("failures/") for line in metrics.steps for key in line):
        return "an attempt at a group failed"
    if run.lag is not None:
        for line in metrics.steps:
            wanted = min(line["step"], run.lag)
            if line["num_loss_tokens"] and not line["staleness_mean"] == line["staleness_max"] == wanted:
                return f"step {line['step']}: trained tokens are {line['staleness_mean']:g} versions old, not {wanted}"
    return None


def record(run: Run, summary: dict[str, Any], metrics: Metrics, revision: str) -> dict[str, Any]:
    """What stays of a run. Columns stand once, rows under them."""
    after = {0: (0, 0.0)}
    samples = 0
    per_step = summary["trained_samples"] / summary["steps"]
    for line in metrics.steps:
        samples += round(per_step)
        after[line["version"]] = (samples, line["time_s"])
    later = metrics.steps[run.lag or 0 :]
    return {
        "task": run.task,
        "setting": run.setting,
        "seed": run.seed,
        "command": run.command,
        "finished": time.strftime("%Y-%m-%d"),
        "revision": revision,
        "torch": metadata.version("torch"),
        "steps": summary["steps"],
        "trained_samples": summary["trained_samples"],
        "skipped_steps": summary["skipped_steps"],
        "wall_s": round(summary["wall_s"], 1),
        "train_s": round(metrics.steps[-1]["time_s"], 1),
        "trainer_idle_fraction": round(summary["trainer_idle_fraction"], 3),
        "rollout_idle_fraction": round(summary["rollout_idle_fraction"], 3),
        "staleness": {
            "held": run.lag,
            "mean": round(summary["staleness_mean"], 3),
            "max": summary["staleness_max"],
            "from_step": run.lag or 0,
            "mean_from_there": round(math.fsum(line["staleness_mean"] for line in later) / len(later), 3),
            "min_step_mean_from_there": round(min(line["staleness_mean"] for line in later), 3),
        },
        "evaluations": {
            "columns": ["step", "trained_samples", "wall_s", "eval_reward"],
            "rows": [
                [line["version"], after[line["version"]][0], round(after[line["version"]][1], 2), line["eval_reward"]]
                for line in metrics.evaluations
            ],
        },
        "training": {"columns": ["step", *COURSE], "rows": course(metrics.steps)},
    }


def course(steps: list[dict[str, Any]]) -> list[list[float | None]]:
    """Means over ten steps each; the first column is the version after the last of them."""
    rows: list[list[float | None]] = []
    for begin in range(0, len(steps), BLOCK):
        lines = steps[begin : begin + BLOCK]
        row: list[float | None] = [lines[-1]["version"]]
        for key in COURSE:
            values = [line[key] for line in lines if line.get(key) is not None]
            row.append(float(f"{math.fsum(values) / len(values):.4g}") if values else None)
        rows.append(row)
    return rows


def write_record(path: Path, content: dict[str, Any]) -> None:
    """One row of a table a line; there entirely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for key, value in content.items():
        if isinstance(value, dict) and "rows" in value:
            rows = ",\n  ".join(json.dumps(row) for row in value["rows"])
            text = f'{{"columns": {json.dumps(value["columns"])}, "rows": [\n  {rows}\n ]}}'
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(key)}: {text}")
    draft = path.with_suffix(".tmp")
    draft.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    draft.replace(path)


def _last_lines(path: Path, count: int) -> list[str]:
    return path.read_text(errors="replace").strip().splitlines()[-count:] or ["no output"]


# ---- many --------------------------------------------------------------------------------------------------------------------


def run_all(runs: Iterable[Run], at_a_time: int, work: Path, records: Path) -> None:
    """Run what has no record yet, in order, so many at a time. A run that keeps failing is said and left out."""
    waiting = [(run, 1) for run in runs if recorded(records, run) is None]
    running: list[Started] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started does not go on alone
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                run, attempt = waiting.pop(0)
                running.append(start_run(run, work, attempt))
            time.sleep(0.2)
            for started in [s for s in running if s.process.poll() is not None]:
                running.remove(started)
                wrong = finish_run(started, records)
                say(f"{started.run.name}: {wrong or 'done'}; {len(waiting) + len(running)} to go")
                if wrong is not None and started.attempt < ATTEMPTS:
                    waiting.append((started.run, started.attempt + 1))
    finally:
        for started in running:
            started.process.kill()
            started.process.wait()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
