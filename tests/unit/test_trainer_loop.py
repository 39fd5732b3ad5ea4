"""The trainer's loop against a controller that keeps a record of what it was told."""

import asyncio

import pytest
import torch
from trainer_models import config, make_batch, tiny_model

from slipstream.checkpoint_files import verify_checkpoint
from slipstream.errors import RunFolderError
from slipstream.protocols import Manifest
from slipstream.trainer.checkpoint import load_checkpoint
from slipstream.trainer.loop import run_trainer
from slipstream.trainer.trainer import Trainer
from slipstream.types import encode
from slipstream.weight_sync.packing import checksum


class Controller:
    """Answers like the controller; `calls` is everything it was told, in order."""

    def __init__(self, folder, last):
        self.folder = folder
        self.last = last  # batches it gives
        self.calls = []
        self.reports = []
        self.checkpoints = []

    async def get_batch(self, step):
        self.calls.append(f"get_batch {step}")
        return make_batch(step) if step < self.last else None

    async def begin_write(self):
        self.calls.append("begin_write")
        return 1

    async def publish(self, slot, manifest):
        assert slot == 1
        self.calls.append(f"publish {manifest.incarnation}.{manifest.version}")

    async def finish_step(self, report):
        self.calls.append(f"finish_step {report.step}")
        self.reports.append(report)

    async def checkpoint_context(self):
        return "run", 3, 40 + len(self.reports)

    async def commit_checkpoint(self, temporary, manifest):
        self.calls.append(f"commit {manifest.step}")
        assert encode(verify_checkpoint(self.folder / temporary)) == encode(manifest)
        (self.folder / temporary).rename(self.folder / f"step-{manifest.step}")
        self.checkpoints.append(manifest)


class Publisher:
    def __init__(self, trainer, calls):
        self.trainer, self.calls = trainer, calls

    def pack(self, slot, incarnation, version):
        self.calls.append("pack")
        return Manifest(incarnation=incarnation, version=version, checksum=checksum(self.trainer.model), total_bytes=0, entries=())


class Page:
    def __init__(self):
        self.phases = []

    def working(self, phase, deadline_s, owed=""):
        assert deadline_s > 0
        self.phases.append(f"{phase}: {owed}")

    def idle(self):
        self.phases.append("idle")


def run(folder, last, every=2, steps=20, start=None, **tables):
    trainer = Trainer(config(trainer={"steps": steps, "learning_rate": 1e-3}, checkpoint={"every": every}, **tables), tiny_model())
    if start is not None:
        load_checkpoint(start, trainer)
    controller, page = Controller(folder, last), Page()
    asyncio.run(run_trainer(trainer, controller, Publisher(trainer, controller.calls), folder, page))
    return trainer, controller, page


def publish_of(version):
    return ["begin_write", "pack", f"publish 3.{version}"]


def test_order_of_calls(tmp_path):
    trainer, controller, page = run(tmp_path, last=3)
    assert controller.calls == [
        *publish_of(0),
        "get_batch 0",
        *publish_of(1),
        "finish_step 0",
        "get_batch 1",
        *publish_of(2),
        "finish_step 1",
        "commit 2",
        "get_batch 2",
        *publish_of(3),
        "finish_step 2",
        "get_batch 3",
        "commit 3",  # stopped: what is newer than the last checkpoint is saved
    ]
    assert page.phases[:5] == ["publish: weights 3.0", "idle", "step: batch 0", "publish: weights 3.1", "idle"]
    assert page.phases[-3:] == ["idle", "checkpoint: checkpoint 3", "idle"]
    last = controller.reports[-1]
    assert (last.step, last.version, last.skipped) == (2, 3, None)
    assert last.checksum == checksum(trainer.model) == controller.checkpoints[-1].weights_checksum
    assert controller.checkpoints[-1].ledger_seq == 43
    assert min(last.step_s, last.publish_s) > 0 and last.wait_s >= 0


def test_the_last_step_makes_a_checkpoint_and_only_one(tmp_path):
    _, controller, _ = run(tmp_path, last=3, every=50, steps=3)
    assert [m.step for m in controller.checkpoints] == [3]
    assert controller.calls.index("commit 3") < controller.calls.index("get_batch 3")


def test_weights_are_published_every_k_steps_and_at_the_last_and_packed_for_every_checkpoint(tmp_path):
    trainer, controller, _ = run(tmp_path, last=5, every=2, steps=5, weight_sync={"every": 3})
    assert [call for call in controller.calls if not call.startswith("get_batch")] == [
        *publish_of(0),
        "finish_step 0",
        "finish_step 1",
        "begin_write",  # the same slot as that of the next version, whose bytes it gets then
        "pack",
        "commit 2",
        *publish_of(3),
        "finish_step 2",
        "finish_step 3",
        "begin_write",
        "pack",
        "commit 4",
        *publish_of(5),
        "finish_step 4",
        "commit 5",
    ]
    assert [bool(report.checksum) for report in controller.reports] == [False, False, True, False, True]
    assert [m.step for m in controller.checkpoints] == [2, 4, 5] and all(m.weights_checksum for m in controller.checkpoints)
    (tmp_path / "again").mkdir()
    resumed, again, _ = run(tmp_path / "again", last=5, every=2, steps=5, weight_sync={"every": 3}, start=tmp_path / "step-4")
    assert again.calls[:3] == publish_of(4), "the start weights are published in any case"
    assert checksum(resumed.model) == checksum(trainer.model)


def test_a_stop_between_two_published_versions_saves_what_was_trained(tmp_path):
    trainer, controller, _ = run(tmp_path, last=1, every=50, weight_sync={"every": 3})
    assert controller.calls[-3:] == ["begin_write", "pack", "commit 1"]
    assert controller.checkpoints[0].weights_checksum == checksum(trainer.model)


def test_a_deterministic_run_publishes_what_a_resume_would_start_from(tmp_path):
    _, controller, _ = run(tmp_path, last=6, every=2, run={"deterministic": True}, launch="inline", weight_sync={"every": 3})
    assert [call for call in controller.calls if call.startswith("publish")] == [f"publish 3.{v}" for v in (0, 2, 3, 4, 6)]


def test_nothing_new_no_checkpoint(tmp_path):
    _, controller, _ = run(tmp_path, last=0)
    assert controller.calls == [*publish_of(0), "get_batch 0"]


def test_resumed_equals_uninterrupted(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole, _, _ = run(tmp_path / "a", last=5)
    run(tmp_path / "b", last=3)
    resumed, controller, _ = run(tmp_path / "b", last=5, start=tmp_path / "b" / "step-3")
    assert controller.calls[:4] == [*publish_of(3), "get_batch 3"]
    assert checksum(resumed.model) == checksum(whole.model)


def test_a_skipped_update_is_reported_and_published_with_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.trainer.optimizer.Optimizer.gradient_norm", lambda self: float("nan"))
    _, controller, _ = run(tmp_path, last=1)
    (report,) = controller.reports
    assert report.skipped.startswith("non-finite gradient") and report.version == 1
    assert report.checksum == checksum(tiny_model())


def test_a_checkpoint_that_cannot_be_written_names_the_folder(tmp_path):
    blocked = tmp_path / "checkpoints"
    blocked.write_text("not a folder")
    with pytest.raises(RunFolderError, match=f"checkpoint 2 cannot be written to {blocked}"):
        run(blocked, last=3)


@pytest.mark.parametrize("call", ["get_batch", "begin_write", "publish", "finish_step", "commit_checkpoint"])
def test_killed_at_any_call_the_run_goes_on_to_the_same_weights(tmp_path, monkeypatch, call):
    """The controller vanishes at the second such call; what is on disk then is a whole checkpoint or none."""
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    expected, _, _ = run(tmp_path / "whole", last=4)
    folder = tmp_path / "killed"
    real, count = getattr(Controller, call), []

    async def vanish(self, *args):
        count.append(call)
        if len(count) == 2:
            raise ConnectionError("gone")
        return await real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Controller, call, vanish)
        with pytest.raises(ConnectionError):
            run(folder, last=4)
    visible = sorted(folder.glob("step-*"))
    for path in visible:
        verify_checkpoint(path)
    trainer, _, _ = run(folder, last=4, start=visible[-1] if visible else None)
    assert checksum(trainer.model) == checksum(expected.model)
    assert torch.isfinite(next(trainer.model.parameters())).all()
