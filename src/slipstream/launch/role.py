"""A role's process: `python -m slipstream.launch.role NAME`, started by `processes.spawn`.

    controller socket ◄── every call ── engines | trainer | rollout worker
    engine sockets    ◄── generate, frames ── rollout worker
    logprobs socket   ◄── annotate ── rollout worker

The role's own error is reported over the controller's socket before the process exits with 1. It leaves with 0 when its work is done
(trainer, rollout worker); engines, whose roles are named by their ids, and the logprob stage are ended from outside.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from slipstream.config.load import load_config
from slipstream.deadlines import LOAD_S
from slipstream.launch.context import RunContext
from slipstream.launch.processes import ASKED_TO_LEAVE, Child, child_setup, importing
from slipstream.launch.together import together
from slipstream.launch.wire import RemoteController, connect

CONTROLLER_SOCKET = "controller.sock"


def controller_socket(folder: str) -> str:
    return str(Path(folder) / CONTROLLER_SOCKET)


def context_options(context: RunContext) -> dict[str, str]:
    """What a child is told of the run besides its folder; `context_of` reads it back."""
    return {
        "base_folder": str(context.base_folder),
        "incarnation": str(context.incarnation),
        "start_step": str(context.start_step),
        "run_id": context.run_id,
        "experiment": context.experiment,
    }


def context_of(child: Child) -> RunContext:
    folder, options = Path(child.spec.run_folder), child.spec.options
    config = load_config([folder], reward_given=True, checked=False).config
    return RunContext(
        config,
        Path(options["base_folder"]),
        folder,
        int(options["incarnation"]),
        int(options["start_step"]),
        options["run_id"],
        child.spec.socket_folder,
        options["experiment"],
    )


async def run_engine_role(child: Child, controller: RemoteController) -> None:
    context = context_of(child)
    if context.config.engine.type == "vllm":
        with importing():
            from slipstream.launch.assemble_vllm import run_vllm_role

        await run_vllm_role(child, context, controller)
    else:
        await _run_embedded(child, context, controller)


async def _run_embedded(child: Child, context: RunContext, controller: RemoteController) -> None:
    with importing():
        from slipstream.engines.embedded.loop import run_engine
        from slipstream.launch.assemble import build_engine
        from slipstream.launch.assemble_weights import build_reader
        from slipstream.launch.engine_socket import serve, socket_path
        from slipstream.models.loading import load_model

    engine = build_engine(context.config, child.spec.role, load=child.base or load_model)
    wake = asyncio.Event()
    server = await serve(engine, socket_path(child.spec.socket_folder, engine.engine_id), wake.set)
    weights = build_reader(context, engine.weights, engine.engine_id, child.slots)
    fetch = weights.fetch  # where the transport has to bring them here first
    await run_engine(engine, controller, weights, server.send_frame, wake, child.progress, fetch)


async def run_trainer_role(child: Child, controller: RemoteController) -> None:
    with importing():
        from slipstream.launch.assemble import build_trainer
        from slipstream.models.loading import load_model
        from slipstream.trainer.freed_memory import keep_freed_memory
        from slipstream.trainer.loop import run_trainer

    context = context_of(child)
    trainer, publisher = build_trainer(context, child.slots, load=child.base or load_model)
    if trainer.device.type == "cpu":
        keep_freed_memory()
    await run_trainer(trainer, controller, publisher, context.checkpoints, child.progress)
    if context.config.weight_sync.transport == "collective":  # engines get them from this process
        await controller.weights_taken()


async def run_rollout_role(child: Child, controller: RemoteController) -> None:
    with importing():
        from slipstream.launch.assemble_worker import run_rollout_worker
        from slipstream.scoring.scorers import make_scorers

    context = context_of(child)
    scorers = make_scorers(context.config.reward)
    await run_rollout_worker(context, controller, scorers, child.spec.socket_folder, child.progress)


async def run_logprobs_role(child: Child, controller: RemoteController) -> None:
    with importing():
        from slipstream.launch.assemble import build_logprobs
        from slipstream.launch.logprob_socket import run_logprobs

    context = context_of(child)
    stage = build_logprobs(context.config)
    assert stage is not None and child.spec.listener is not None, "started for a run without a logprob stage"
    await run_logprobs(stage, socket.socket(fileno=child.spec.listener), context.config, child.progress)


ROLES: dict[str, Callable[[Child, RemoteController], Awaitable[None]]] = {
    "engine": run_engine_role,
    "trainer": run_trainer_role,
    "rollout": run_rollout_role,
    "logprobs": run_logprobs_role,
}


def kind_of(role: str) -> str:
    """What a role does, by its name.

    >>> kind_of("engine-3"), kind_of("trainer")
    ('engine', 'trainer')
    """
    return role.partition("-")[0]


async def run_role(child: Child) -> int:
    """Play the role in every run that this process was started for, until all have ended or one has failed; the exit code."""
    try:
        await together(play(each) for each in (child, *child.others))
    except asyncio.CancelledError as cancelled:
        if ASKED_TO_LEAVE not in cancelled.args:
            raise
    except Exception:
        traceback.print_exc()
        return 1
    return 0


async def play(child: Child) -> None:
    """Connect, work, and report how it ended."""
    controller = await connect(controller_socket(child.spec.socket_folder), child.spec.role)
    try:
        child.progress.working("load", LOAD_S, owed="model, tokenizer or rewards")
        await ROLES[kind_of(child.spec.role)](child, controller)
        child.progress.idle()
    except Exception as error:
        controller.failed(error)
        raise
    finally:
        await controller.close()


def main() -> int:
    return asyncio.run(run_role(child_setup()))


if __name__ == "__main__":
    sys.exit(main())
