"""Whole runs that lose a part: kill -9 of each role in turn, of the launching process, amid a checkpoint; a hang; signals; damage.

Each fault ends the run in seconds with its own cause and without an orphan; the run then goes on, and in the end the accounts close.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
from live_run import GROUP_SIZE, LiveRun, query, run_file
from safetensors.torch import load_file

from slipstream.controller import events as ev
from slipstream.controller.accounts import check_accounts
from slipstream.controller.admission import default_window, worst_staleness
from slipstream.controller.controller import COMMIT_WITHIN_S
from slipstream.controller.ledger import LedgerReader
from slipstream.types import Group, Span

pytestmark = pytest.mark.timeout(600)


def test_each_role_and_the_launching_process_killed_in_turn_and_resumed(tmp_path: Path) -> None:
    """Weights travel as files, and the trainer is killed amid the writing of one."""
    file, choose, weights = run_file(tmp_path), random.Random(11), tmp_path / "run" / "weights"
    for role in ("engine-0", "trainer", "rollout"):
        with LiveRun(file, "--weight_sync.transport", "files", "--engine.max_restarts", "0") as run:  # else it survives its engine
            after(run, choose.randint(1, 5))
            pid = run.freeze(role, lambda: any(weights.glob(".*.tmp"))) if role == "trainer" else run.role(role)
            os.kill(pid, signal.SIGKILL)
            assert run.ended() == 1
            assert run.message().startswith(f"{role} (pid {pid}) was killed by SIGKILL"), run.output
            for whole in weights.glob("*.safetensors"):
                load_file(whole)  # it has its name and is what that says, whatever the moment
    with LiveRun(file, "--weight_sync.transport", "files") as run:
        after(run, choose.randint(1, 5))
        left = [path.name for path in weights.iterdir() if not path.name.startswith(f"{run.incarnation}.")]
        assert not [name for name in left if name.endswith(".safetensors")], "what earlier incarnations left"
        assert len(run.processes()) >= 5  # the launching process, three roles, the reward's
        os.kill(run.process.pid, signal.SIGKILL)
        assert run.ended() == -signal.SIGKILL
    finish(file)


def test_killed_amid_a_checkpoint_then_damaged_stopped_hung_and_resumed(tmp_path: Path) -> None:
    file = run_file(tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    half_written = kill_amid_a_checkpoint(file, checkpoints)
    with LiveRun(file) as run:
        after(run, 3)
        assert not half_written.exists()
        stop_with_half_generated_rollouts(run)
    newest = max(int(folder.name.removeprefix("step-")) for folder in checkpoints.glob("step-*"))
    assert newest == run.query("SELECT count(*) FROM (SELECT DISTINCT step FROM batches)"), "the stop saved no checkpoint of its step"
    flip_a_byte(checkpoints / f"step-{newest}" / "model" / "rank-00000.safetensors")
    with LiveRun(file, "--trainer.step_timeout_s", "4") as run:
        after(run, 1)
        assert f"checkpoint step-{newest} is refused and kept as refused-{newest}" in run.output
        assert "rank-00000.safetensors does not match its checksum" in run.output
        assert f"goes on from step-{(newest - 1) // 2 * 2}" in run.output  # checkpoint.every = 2
        pid = run.freeze("trainer", lambda: run.state("trainer").phase == "step")
        assert run.ended() == 1
        assert run.message().startswith(f"trainer (pid {pid}) hangs: phase 'step' is ") and "it owes batch" in run.message()
    with LiveRun(file, "--run.stop_grace_s", "60") as run:
        after(run, 1)
        run.freeze("engine-0", lambda: run.state("engine-0").phase == "tick")  # so that the first signal cannot end the run
        run.process.send_signal(signal.SIGINT)
        run.until(lambda: "Ctrl-C again stops at once" in run.output)
        run.process.send_signal(signal.SIGTERM)
        assert run.ended() == 130
    groups = finish(file)
    incarnations = [{s.incarnation for s in rollout.spans} for group in groups for rollout in group.rollouts]
    assert any(len(each) > 1 for each in incarnations), "no rollout went on from its recorded tokens"


def after(run: LiveRun, steps: int) -> None:
    """Wait until this incarnation has made so many steps."""
    run.until(lambda: run.steps() >= steps)


def kill_amid_a_checkpoint(file: Path, checkpoints: Path) -> Path:
    """The trainer is stopped while it writes a checkpoint, which has no manifest yet, and killed; the folder it was writing."""

    def half_written() -> list[Path]:
        return [folder for folder in checkpoints.glob(".tmp-*") if not (folder / "manifest.json").exists()]

    with LiveRun(file) as run:
        after(run, 1)
        pid = run.freeze("trainer", lambda: bool(half_written()))
        (folder,) = half_written()
        os.kill(pid, signal.SIGKILL)
        assert run.ended() == 1
        assert run.message().startswith(f"trainer (pid {pid}) was killed by SIGKILL")
    assert folder.exists() and not (checkpoints / f"step-{folder.name.split('-')[1]}").exists()
    return folder


def stop_with_half_generated_rollouts(run: LiveRun) -> None:
    """The first SIGTERM: exit 0, the command that resumes, and the tokens of what was running in the ledger.

    The engine stands still from a moment on where a group has rollouts that ended and others that go on, until the latter's tokens are
    recorded: the machine may be so slow that they would be over by then.
    """

    def half_recorded() -> bool:
        return any(0 < len(samples) < GROUP_SIZE for samples in run.recorded().values())

    pid = run.freeze("engine-0", half_recorded, lag_s=2 * COMMIT_WITHIN_S)
    run.process.send_signal(signal.SIGTERM)
    run.until(lambda: any(chunk.stop_reason is None for samples in run.recorded().values() for chunk in samples))
    os.kill(pid, signal.SIGCONT)
    assert run.ended() == 0, run.output
    assert f"slipstream train --resume {run.folder}" in run.output


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def finish(file: Path) -> list[Group]:
    """Resume with a few steps more than were made, to the end; the accounts must close. The groups that were trained."""
    last = query(file.parent / "run", "SELECT max(step) FROM batches") + 3
    with LiveRun(file, "--trainer.steps", str(last)) as run:
        assert run.process.wait(120) == 0, run.output
        assert run.ended() == 0
    return check_story(run.folder / "ledger.sqlite", last)


def check_story(ledger: Path, steps: int) -> list[Group]:
    """Every group accounted for, none trained twice, no token too old, from the future or of a version that never was."""
    with LedgerReader.open(ledger) as reader:
        account = check_accounts(reader)
        events = [event for *_, event in reader.live_events()]
        attempts = {e.group_id: e.attempt for e in events if isinstance(e, ev.GroupFinished)}
        trained = {step: [reader.group(g, attempts[g]) for g in ids] for step, ids in account.batches.items()}
        groups = [group for each in trained.values() for group in each]
        published = [reader.version_checksum(s.incarnation, s.version) for s in spans(groups)]
    assert sorted(trained) == list(range(steps))
    assert len({group.group_id for group in groups}) == len(groups)
    assert {str(place.status) for place in account.places.values()} == {"trained"}, account.counts
    ages = [step - span.version for step, each in trained.items() for span in spans(each)]
    assert 0 <= min(ages) and max(ages) <= worst_staleness(1, 4, default_window(1, 4))
    assert None not in published
    return groups


def spans(groups: Iterable[Group]) -> list[Span]:
    return [span for group in groups for rollout in group.rollouts for span in rollout.spans]
