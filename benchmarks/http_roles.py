"""The role processes of slipstream's side of `vs_trl_async`: those of the local launcher, two of them changed.

engine     `HttpEngine` in place of the embedded one
trainer    the shipped one; each step takes VS_TRL_STEP_S seconds longer, asleep

python http_roles.py ROLE                   a role, started by the launcher
python http_roles.py --train RUN.toml       the launcher; prints every step's metrics as one line of JSON
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from http_engine import HttpEngine
from step_lines import train_and_tell

from slipstream.launch import local, role
from slipstream.launch.engine_socket import serve, socket_path
from slipstream.launch.processes import Child, ChildSpec, RoleProcess, child_setup
from slipstream.launch.supervisor import Supervisor
from slipstream.launch.wire import RemoteController

URL, STEP_S = "VS_TRL_URL", "VS_TRL_STEP_S"  # environment variables


class HttpSupervisor(Supervisor):
    """Starts engine and trainer from this file."""

    async def start(self, spec: ChildSpec, log: Path, command: list[str] | None = None) -> RoleProcess:
        if (kind := role.kind_of(spec.role)) in ("engine", "trainer"):
            command = [sys.executable, __file__, kind]
        return await super().start(spec, log, command)


async def run_http_engine(child: Child, controller: RemoteController) -> None:
    context = role.context_of(child)
    engine = HttpEngine(os.environ[URL], context.config.engine.slots)
    server = await serve(engine, socket_path(child.spec.socket_folder, engine.engine_id))
    child.progress.idle()  # what a server takes is not this process's to answer for: the rollout's own deadline is
    await engine.run(controller, server.send_frame, child.slots, context.run_folder / "weights.bin")


async def run_slow_trainer(child: Child, controller: RemoteController) -> None:
    from slipstream.trainer.trainer import Trainer

    train_step, more_s = Trainer.train_step, float(os.environ[STEP_S])

    def slow_step(self: Trainer, batch: Any) -> Any:
        time.sleep(more_s)
        return train_step(self, batch)

    Trainer.train_step = slow_step  # type: ignore[method-assign]
    await role.run_trainer_role(child, controller)


def main() -> int:
    if sys.argv[1] == "--train":
        local.Supervisor = HttpSupervisor  # type: ignore[misc]
        train_and_tell(Path(sys.argv[2]))
        return 0
    role.ROLES.update(engine=run_http_engine, trainer=run_slow_trainer)
    return asyncio.run(role.run_role(child_setup()))


if __name__ == "__main__":
    sys.exit(main())
