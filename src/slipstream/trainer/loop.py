"""The trainer's loop.

    consumes    batches, by step number                     get_batch(step)
    produces    weights of version step + 1                 begin_write -> pack -> publish, with weight_sync.every = k of every k-th
                a report per step                           finish_step
                checkpoints                                 write to .tmp-..., commit_checkpoint
    waits for   the next batch, and for nothing else: a free weight slot always exists
    unblocked   by the controller: a batch, or None (no further step), or its death (PeerLost)

Killed anywhere, nothing is half visible: weights count once published, a step once reported, a checkpoint once renamed by the
controller; what was done since is done again from the ledger's batches.
"""

from __future__ import annotations

import time
from pathlib import Path

from slipstream.config.arithmetic import publishes
from slipstream.deadlines import CHECKPOINT_S
from slipstream.errors import RunFolderError
from slipstream.protocols import ControllerAPI, Manifest, Progress
from slipstream.trainer.checkpoint import write_checkpoint
from slipstream.trainer.trainer import Trainer
from slipstream.types import StepReport
from slipstream.weight_sync.ends import Publisher

_PUBLISH_DEADLINE_S = 120.0


async def run_trainer(trainer: Trainer, controller: ControllerAPI, publisher: Publisher, checkpoints: Path, page: Progress) -> None:
    """Train until the controller has no further batch. The trainer stands at a checkpoint's step, or at 0 with the start weights.

    Publishes the start weights as version `trainer.step` first. Raises RunFailed after too many skipped updates in a row, RunFolderError
    where a checkpoint cannot be written, and whatever the controller raises.
    """
    settings = trainer.config
    _, incarnation, _ = await controller.checkpoint_context()
    committed = trainer.step
    weights: Manifest | None = await _publish(trainer, controller, publisher, incarnation, page)
    while True:
        page.idle()
        started = time.perf_counter()
        batch = await controller.get_batch(trainer.step)
        wait_s = time.perf_counter() - started
        if batch is None:
            break
        page.working("step", settings.trainer.step_timeout_s, owed=f"batch {batch.step}")
        started = time.perf_counter()
        step = trainer.train_step(batch)
        step_s = time.perf_counter() - started
        weights = None
        if publishes(settings, trainer.version):
            weights = await _publish(trainer, controller, publisher, incarnation, page)
        publish_s = time.perf_counter() - started - step_s
        report = StepReport(
            step=batch.step,
            version=trainer.version,
            skipped=step.skipped,
            checksum=weights.checksum if weights else "",
            metrics=step.metrics | _sync_metrics(weights),
            wait_s=wait_s,
            step_s=step_s,
            publish_s=publish_s,
        )
        await controller.finish_step(report)
        if trainer.step % settings.checkpoint.every == 0 or trainer.step == settings.trainer.steps:
            weights = weights or await _pack(trainer, controller, publisher, incarnation, page)
            await _checkpoint(trainer, controller, weights, checkpoints, page)
            committed = trainer.step
    if trainer.step > committed and not settings.run.deterministic:  # that one's checkpoints are where its schedule puts them
        weights = weights or await _pack(trainer, controller, publisher, incarnation, page)
        await _checkpoint(trainer, controller, weights, checkpoints, page)
    page.idle()


def _sync_metrics(weights: Manifest | None) -> dict[str, float]:
    """Of payload "delta": the share of the weights that changed, and what an engine reads that holds the version before."""
    if weights is None or weights.changed_fraction is None:
        return {}
    return {
        "sync_changed_fraction": weights.changed_fraction,
        "sync_bytes": float(weights.deltas[-1].num_bytes if weights.deltas else weights.total_bytes),
    }


async def _publish(trainer: Trainer, controller: ControllerAPI, publisher: Publisher, incarnation: int, page: Progress) -> Manifest:
    page.working("publish", _PUBLISH_DEADLINE_S, owed=f"weights {incarnation}.{trainer.version}")
    slot = await controller.begin_write()
    manifest = publisher.pack(slot, incarnation, trainer.version)
    await controller.publish(slot, manifest)
    return manifest


async def _pack(trainer: Trainer, controller: ControllerAPI, publisher: Publisher, incarnation: int, page: Progress) -> Manifest:
    """What would be published, for a checkpoint of a version that is not. The slot stays the one to write, for the next version."""
    page.working("pack", _PUBLISH_DEADLINE_S, owed=f"weights {incarnation}.{trainer.version}")
    return publisher.pack(await controller.begin_write(), incarnation, trainer.version)


async def _checkpoint(trainer: Trainer, controller: ControllerAPI, weights: Manifest, checkpoints: Path, page: Progress) -> None:
    page.working("checkpoint", CHECKPOINT_S, owed=f"checkpoint {trainer.step}")
    run_id, incarnation, ledger_seq = await controller.checkpoint_context()
    try:
        name, manifest = write_checkpoint(
            checkpoints,
            trainer,
            run_id=run_id,
            incarnation=incarnation,
            ledger_seq=ledger_seq,
            weights_checksum=weights.checksum,
        )
    except OSError as error:
        raise RunFolderError(
            f"checkpoint {trainer.step} cannot be written to {checkpoints}: {error}. Free space there and --resume"
        ) from error
    await controller.commit_checkpoint(name, manifest)
