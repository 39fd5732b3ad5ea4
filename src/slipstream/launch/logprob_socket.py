"""The logprob stage in a process of its own: `run_logprobs` there, `connect` in the rollout worker. The calls of `protocols.LogprobClient`.

    worker ──► annotate(group) ──► logprobs        one group after another, in the order they were asked for
    worker ◄── the group with its arrays ◄──

The launching process listens before the role starts, so a worker may connect and ask while the role still loads its models.
"""

from __future__ import annotations

import asyncio
import os
import socket

from slipstream.config.arithmetic import max_groups_in_flight
from slipstream.config.settings import Config
from slipstream.deadlines import LOAD_S
from slipstream.errors import PeerLost
from slipstream.launch.wire import Method, Remote, Server, method_table
from slipstream.protocols import LogprobClient, Progress
from slipstream.types import Group

ROLE = "logprobs"
THREADS = 1  # forward passes without gradients, beside two busier roles
_FILE = f"{ROLE}.sock"


class RemoteLogprobs(Remote, LogprobClient):
    """`protocols.LogprobClient` over a connection."""

    async def annotate(self, group: Group) -> Group:
        return await self.call("annotate", group)


def listen(folder: str) -> socket.socket:
    """A socket of the logprob stage in the run's private directory, which the role inherits."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.path.join(folder, _FILE))
    listener.listen()
    return listener


async def connect(folder: str, config: Config) -> RemoteLogprobs:
    """Connect as the rollout worker; answered once the role has loaded its models. PeerLost where it dies before that."""
    client = RemoteLogprobs(ROLE, _methods(config))
    await client.connect(os.path.join(folder, _FILE), "rollout", LOAD_S)
    return client


async def run_logprobs(stage: LogprobClient, listener: socket.socket, config: Config, progress: Progress) -> None:
    """Serve the stage for ever; ends by cancellation, or with the first error of the stage.

    consumes    groups whose rollouts have ended, one at a time
    produces    the same groups with the arrays that the settings ask for
    waits for   the next group; it owes nothing then. A worker that is lost is for the supervisor to see
    """
    service = _Watched(stage, progress, pass_deadline_s(config))
    server = Server(service, methods=_methods(config), name=ROLE)
    await server.start(listener)
    progress.idle()
    try:
        await service.failed
    finally:
        await server.close()


def pass_deadline_s(config: Config) -> float:
    """One group's forward pass is a small part of what a step over `groups_per_step` groups may take."""
    return config.trainer.step_timeout_s


def _methods(config: Config) -> dict[str, Method]:
    """A call waits at most for the groups in flight, each of which costs less than its share of a step."""
    steps = -(-max_groups_in_flight(config) // config.trainer.groups_per_step)
    return method_table(LogprobClient, {"annotate": steps * pass_deadline_s(config)})


class _Watched:
    """The stage as its process serves it: the progress page says what it owes, and its first error ends the role."""

    def __init__(self, stage: LogprobClient, progress: Progress, deadline_s: float):
        self._stage, self._progress, self._deadline_s = stage, progress, deadline_s
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def annotate(self, group: Group) -> Group:
        self._progress.working("logprobs", self._deadline_s, owed=f"group {group.group_id}")
        try:
            return await self._stage.annotate(group)
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise PeerLost(f"{ROLE} failed; its own error says why") from error  # to the worker, whose error then counts as an echo
        finally:
            self._progress.idle()
