"""slipstream against TRL's `AsyncGRPOTrainer`: what asynchrony makes of samples, whichever side is the slower.

    python benchmarks/vs_trl_async.py [--short] [--json PATH]

Both train the same tiny model on the same prompts with the same batch (4 groups of 4), and both have the same HTTP server sample: an answer
of random tokens comes after a lognormal time (sigma 1, cut at 4 times the mean). Every training step is made 0.2 s longer, asleep, so that
what is compared is who waits for whom. The server's mean time is set so that the rollouts that may be in flight come at 0.25 .. 4 times the
speed at which the trainer would take them.

Limits are equal on all sides and TRL's defaults: 64 requests in flight (4 batches), samples at most 4 versions old. Three sides:

    trl           as it ships: whatever group is ready is queued, up to 1024 samples, and dropped if it is too old when its turn comes
    shipped       slipstream as it ships, but for max_staleness = 4: (4 + 1) x 4 groups are admitted until they are trained, and a slow one
                  is waited for (`buffer.window`); a rollout that is too old all the same leaves the loss
    ready first   slipstream with TRL's rule: window = "unbounded", 32 groups in flight, and those that are too old dropped, even while
                  they run (on_stale = "cancel_early")

slipstream runs its local launcher, with an engine process that asks the server (`http_engine.py`) and a trainer that sleeps
(`http_roles.py`). TRL runs its own rollout worker and trainer, with four replacements without which it does not run on a CPU
(`peers/trl_async.py`). TRL's samples get the version that was live when their group began, slipstream's the one that was live when each
rollout was asked for.

A side is watched for the same number of seconds from its first request on. Trained samples are those of the steps that ended by then; of
the samples that the server has answered, those neither trained nor dropped are listed apart, as waiting, and so are requests that it was
still answering, as running. A request that is given up before its answer (ready first does that) has cost the server its time: it counts as
generated in the trained share, and the share of the server's time is printed beside that of samples. The bound is the slower side's speed:
the trainer's batch per 0.2 s, or the rollouts in flight per mean time. One window per side and speed: no spread is known.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
from bench import Report, start
from peers.environment import peer_python
from turns import Program

HERE = Path(__file__).parent
OUT = HERE / "out" / "vs_trl_async"
GROUPS, GROUP_SIZE, NEW_TOKENS, STEP_S, LEARNING_RATE = 4, 4, 16, 0.2, 1e-4
IN_FLIGHT, MAX_STALENESS = 64, 4
SIGMA, LONGEST, VOCABULARY = 1.0, 4.0, 200
SIDES = ("trl", "shipped", "ready first")
READY_FIRST = {"window": "unbounded", "max_groups": 2 * IN_FLIGHT // GROUP_SIZE, "on_stale": "cancel_early"}
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0)  # generator over trainer
SHORT_SPEEDS = (0.25, 1.0, 4.0)
START_S = 180.0  # until the first request
MANY = 1_000_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """One side at one speed. Samples, but for `steps` and `seconds`."""

    seconds: float
    steps: int
    trained: int
    dropped: int  # too old, dropped or masked
    answered: int  # by the server
    cut_off: int  # requests that were given up before their answer
    wasted_time: float  # share of the server's time that went into those, of what it ended
    running: int  # requests that had no answer when the time was up
    most_running: int

    @property
    def rate(self) -> float:
        return self.trained / self.seconds

    @property
    def trained_share(self) -> float:
        """Of those whose fate is known."""
        return self.trained / max(1, self.trained + self.dropped + self.cut_off)

    @property
    def waiting(self) -> int:
        """Answered, and neither trained nor dropped when the time was up."""
        return self.answered - self.trained - self.dropped


def mean_latency_s(speed: float) -> float:
    """Of a request, so that IN_FLIGHT of them come at `speed` times the trainer's speed.

    >>> IN_FLIGHT / mean_latency_s(2.0) / (GROUPS * GROUP_SIZE / STEP_S)
    2.0
    """
    return IN_FLIGHT / (speed * GROUPS * GROUP_SIZE / STEP_S)


def bound(speed: float) -> float:
    """Samples per second at most: of the trainer, or of the rollouts in flight.

    >>> bound(0.25), bound(4.0)
    (20.0, 80.0)
    """
    return min(1.0, speed) * GROUPS * GROUP_SIZE / STEP_S


def seconds(speed: float, short: bool) -> float:
    """How long a side is watched: long enough for the slowest answers to come several times."""
    return max(12.0, 6 * mean_latency_s(speed)) if short else max(20.0, 12 * mean_latency_s(speed))


def main() -> None:
    report, options = start("vs_trl_async", __doc__.splitlines()[0])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no program is left behind
    python = peer_python()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    subprocess.run([str(python), str(HERE / "peers" / "tiny_model.py"), str(OUT / "tiny")], check=True, timeout=START_S)
    rows = [{"prompt": [{"role": "user", "content": f"say a {i}"}]} for i in range(64)]
    (OUT / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    speeds = SHORT_SPEEDS if options.short else SPEEDS
    outcomes = {speed: {side: measure(side, speed, seconds(speed, options.short), python) for side in SIDES} for speed in speeds}
    tell(report, outcomes)
    report.finish(options.json)


# ---- running ---------------------------------------------------------------------------------------------------------------------


def measure(side: str, speed: float, watched_s: float, python: Path) -> Outcome:
    folder = OUT / f"{side.replace(' ', '-')}-{speed:g}"
    folder.mkdir()
    port = _free_port()
    with ExitStack() as stack:
        server = {"mean_s": mean_latency_s(speed), "sigma": SIGMA, "longest": LONGEST, "vocabulary": VOCABULARY, "seed": 0, "port": port}
        command = [str(python), str(HERE / "peers" / "latency_server.py"), json.dumps(server)]
        stack.callback(Program("server", command, folder / "server.log").close)
        url = f"http://127.0.0.1:{port}"
        program = _trl(folder, url, python) if side == "trl" else _slipstream(folder, url, READY_FIRST if side == "ready first" else {})
        stack.callback(program.close)
        _until_first_request(port, program)
        steps = program.collect(watched_s)
        log = _log(port)
    outcome = _outcome(side, steps, log)
    print(f"{time.strftime('%H:%M:%S')} speed {speed:g}, {side}: {outcome.rate:.1f} samples/s", file=sys.stderr, flush=True)
    return outcome


def _outcome(side: str, steps: list[dict[str, Any]], log: dict[str, Any]) -> Outcome:
    if side == "trl":
        trained, dropped = (steps[-1]["trained"], steps[-1]["dropped"]) if steps else (0, 0)
    else:  # every rollout has NEW_TOKENS tokens, of one version
        trained = sum(s["num_loss_tokens"] for s in steps) // NEW_TOKENS
        wasted = sum(value for s in steps for name, value in s.items() if name.startswith("wasted_tokens/"))
        dropped = (wasted + sum(s["masked_stale_tokens"] for s in steps)) // NEW_TOKENS
    wasted_time = log["cut_off_s"] / max(1e-9, log["cut_off_s"] + log["latency_s"])
    return Outcome(
        log["since_first_s"],
        len(steps),
        trained,
        dropped,
        log["finished"],
        log["cut_off"],
        wasted_time,
        log["running"],
        log["most_running"],
    )


def _trl(folder: Path, url: str, python: Path) -> Program:
    given = {
        "url": url,
        "model": str(OUT / "tiny"),
        "rows": str(OUT / "rows.jsonl"),
        "output": str(folder / "out"),
        "step_s": STEP_S,
        "steps": MANY,
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
        "new_tokens": NEW_TOKENS,
        "learning_rate": LEARNING_RATE,
        "in_flight": IN_FLIGHT,
        "max_staleness": MAX_STALENESS,
    }
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return Program("trl", [str(python), str(HERE / "peers" / "trl_async.py"), json.dumps(given)], folder / "trl.log", env)


def _slipstream(folder: Path, url: str, buffer: dict[str, Any]) -> Program:
    run = {
        "launch": "local",
        "run": {"folder": str(folder / "run")},
        "model": {"name": str(OUT / "tiny")},
        "data": {"train": str(OUT / "rows.jsonl")},
        "reward": [{"function": f"{HERE / 'peers' / 'count_a.py'}:count_a"}],
        "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": NEW_TOKENS},
        "engine": {"slots": IN_FLIGHT, "max_context": 128},
        "buffer": {"max_staleness": MAX_STALENESS, **buffer},
        "trainer": {"steps": MANY, "groups_per_step": GROUPS, "learning_rate": LEARNING_RATE},
        "checkpoint": {"every": MANY},
    }
    (folder / "run.toml").write_text(tomli_w.dumps(run))
    command = [sys.executable, str(HERE / "http_roles.py"), "--train", str(folder / "run.toml")]
    env = {**os.environ, "VS_TRL_URL": url, "VS_TRL_STEP_S": str(STEP_S)}
    return Program("slipstream", command, folder / "slipstream.log", env)


def _free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


def _until_first_request(port: int, program: Program) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        time.sleep(0.1)
        try:
            if _log(port)["since_first_s"] is not None:
                return
        except OSError:
            pass  # the server is still starting
        program.check()
    raise RuntimeError(f"{program.name} asked for nothing within {START_S:.0f} s; its log is {program.log}")


def _log(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/_log", timeout=10) as answer:
        return json.load(answer)


# ---- telling ---------------------------------------------------------------------------------------------------------------------


def tell(report: Report, outcomes: dict[float, dict[str, Outcome]]) -> None:
    rates = report.table(
        "Trained samples per second, by the generator's speed over the trainer's",
        ("speed", "mean latency s", "bound", *SIDES, "shipped / trl", "ready first / trl"),
    )
    shares = report.table(
        "What became of the samples that were asked for",
        (
            *("speed", "side", "answered", "trained", "too old", "given up", "trained share", "time given up"),
            *("waiting", "running", "most in flight"),
        ),
        "Given up: before the server had answered. Trained share: of those that were trained, too old or given up. Time given up: share of "
        "the server's time that went into those. At the end, listed apart: waiting in a queue or in a group that is not whole; running.",
    )
    for speed, sides in outcomes.items():
        ratios = {name: sides[name].rate / max(sides["trl"].rate, 1e-9) for name in SIDES[1:]}
        figures = (mean_latency_s(speed), bound(speed), *(sides[name].rate for name in SIDES))
        rates.rows.append((f"{speed:g}", *(f"{value:.3g}" for value in figures), *(f"{value:.2f}" for value in ratios.values())))
        for name, side in sides.items():
            counts = map(str, (side.answered, side.trained, side.dropped, side.cut_off))
            at_the_end = map(str, (side.waiting, side.running, side.most_running))
            shares.rows.append((f"{speed:g}", name, *counts, f"{side.trained_share:.3f}", f"{side.wasted_time:.3f}", *at_the_end))
        for name, ratio in ratios.items():
            report.at_least(f"generator {speed:g}x: {name} / trl, trained samples/s", ratio, 1.0, "x")
        report.data[f"{speed:g}"] = {name: asdict(side) for name, side in sides.items()}


if __name__ == "__main__":
    main()
