"""One vLLM server of this run's own: started, waited for, watched, ended.

    the engine's role ──spawn──► vllm serve --uds <private directory>/engine-0.vllm         log/engine-0-vllm.log
            │                        └─► engine core, workers      each ends with its parent, and all with the role's process group
            └── exit status, at once, with the last lines of that log

The socket lies in a directory that only this user may enter (0700), so no route is open to anybody else, and no port is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from slipstream.config.engine_problems import SERVED_RANKS
from slipstream.engines.vllm.client import Client
from slipstream.engines.vllm.environment import VllmEnvironment, clean_environment
from slipstream.errors import DeadlineExceeded, RunFailed

MODEL = "policy"  # the name it serves the model under
PROBES = 1  # sequences beside those of `slots`: one that waited for them would hold an update, and all tokens, until one of them ends
LOGPROBS_MODE = "processed_logprobs"  # of the distribution that was sampled from
HEALTH_INTERVAL_S = 0.2
CPU_BLOCK_TOKENS = 32  # the least that its kernels like; of its default, 128, a group's prompt often fills none, and then none is shared
ADAPTER_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"  # without it there are no routes for adapters
STOP_S = 10.0  # from SIGTERM to SIGKILL
LOG_LINES = 20


class ServerDied(RunFailed):
    """The server has ended; the message holds its last lines."""


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """What a server must have for adapters."""

    places: int  # that it holds at a time
    rank: int
    targets: tuple[str, ...]  # layers with an adapter, as peft names them

    def options(self) -> list[str]:
        """Of the command line. Without the targets it would compute with products of 0 in every other layer, and in the output head."""
        rank = str(self.served_rank)
        return ["--enable-lora", "--max-loras", str(self.places), "--max-lora-rank", rank, "--lora-target-modules", *self.targets]

    @property
    def served_rank(self) -> int:
        """The smallest that vLLM knows and this one fits into."""
        return min(rank for rank in SERVED_RANKS if rank >= self.rank)


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What a server is to be."""

    engine_id: str
    model: Path  # folder with config.json; its weights are not read
    dtype: str
    max_context: int
    slots: int  # sequences at a time
    threads: int  # CPU build only
    number: int  # of the engine among those of this machine: which cores are its own
    seed: int
    kv_bytes_per_token: int
    transfer: str  # the weight engine's name in the plugin
    adapters: AdapterRoom | None = None  # payload "adapter"
    max_logprobs: int = 0  # of each token, that requests may ask for; 0: vLLM's default
    tells_routing: bool = False  # GPUs only
    extra: tuple[str, ...] = ()  # engine.server_args

    def command(self, environment: VllmEnvironment, socket: Path) -> list[str]:
        """The server's command line. Its weights start as noise: the first version comes from the trainer, like every other."""
        return [
            *(str(environment.python), "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)),
            *("--served-model-name", MODEL, "--uds", str(socket), "--disable-uvicorn-access-log", "--enable-scale-out"),
            *("--dtype", self.dtype, "--max-model-len", str(self.max_context), "--seed", str(self.seed)),
            *("--max-num-seqs", str(self.slots + PROBES)),
            *("--load-format", "dummy", "--skip-tokenizer-init", "--generation-config", "vllm"),
            *("--logprobs-mode", LOGPROBS_MODE, "--weight-transfer-config", json.dumps({"backend": self.transfer})),
            *("--worker-extension-cls", "slipstream_vllm.worker.WorkerExtension"),
            *(("--enforce-eager", "--block-size", str(CPU_BLOCK_TOKENS)) if environment.on_cpu else ()),
            *(self.adapters.options() if self.adapters else ()),
            *(("--max-logprobs", str(self.max_logprobs)) if self.max_logprobs else ()),
            *(("--enable-return-routed-experts",) if self.tells_routing else ()),
            *self.extra,
        ]

    def variables(self, environment: VllmEnvironment) -> dict[str, str]:
        """Environment variables. On CPUs: memory for the keys and values of all sequences, and cores of the engine's own."""
        own = {
            "VLLM_SERVER_DEV_MODE": "1",  # the control routes
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "SLIPSTREAM_VLLM_OWNED": str(os.getpid()),  # see `plugin/slipstream_vllm/parent.py`
        }
        if self.adapters is not None:
            own[ADAPTER_VARIABLE] = "1"
        if environment.on_cpu:
            gib = math.ceil(self.kv_bytes_per_token * self.max_context * (self.slots + PROBES) / 2**30)
            own["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", str(gib))
            own["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", _cores(self.number, self.threads))
        return own


def _cores(number: int, count: int) -> str:
    """The cores of engine `number`, `count` each, of those that this process may use: vLLM's worker is bound to them."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    first = number * count
    return ",".join(str(allowed[(first + i) % len(allowed)]) for i in range(min(count, len(allowed))))


def _open_log(log: Path) -> BinaryIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    return open(log, "ab")


class Server:
    """A running server. `died` waits for its end."""

    def __init__(self, process: asyncio.subprocess.Process, socket: Path, log: Path):
        self.socket, self.log = socket, log
        self._process = process

    @classmethod
    async def start(cls, spec: ServerSpec, environment: VllmEnvironment, private: Path, log: Path) -> Server:
        """Start it; `private` is a directory of mode 0700. Wait with `until_healthy`."""
        socket = private / f"{spec.engine_id}.vllm"
        socket.unlink(missing_ok=True)
        variables = clean_environment(environment.paths(private / f"{spec.engine_id}.path"), spec.variables(environment))
        with _open_log(log) as output:
            process = await asyncio.create_subprocess_exec(
                *spec.command(environment, socket), stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=variables
            )
        return cls(process, socket, log)

    async def until_healthy(self, client: Client, deadline_s: float) -> None:
        """Wait until it answers. ServerDied where it ends instead, DeadlineExceeded where it does neither."""
        died = asyncio.create_task(self.died(), name="vLLM: its end")
        healthy = asyncio.create_task(client.until_healthy(HEALTH_INTERVAL_S), name="vLLM: health")
        try:
            done, _ = await asyncio.wait({died, healthy}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise DeadlineExceeded(f"the vLLM server did not answer within {deadline_s:.0f} s of its start.{self.last_lines()}")
            for task in done:
                task.result()
        finally:
            died.cancel()
            healthy.cancel()
            await asyncio.gather(died, healthy, return_exceptions=True)

    async def died(self) -> NoReturn:
        """Wait for the server's end and raise ServerDied."""
        code = await self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise ServerDied(f"the vLLM server (pid {self._process.pid}) {how}.{self.last_lines()}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def last_lines(self, count: int = LOG_LINES) -> str:
        """The end of its log, for an error's text."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 300 * count))
                lines = file.read().decode(errors="replace").splitlines()[-count:]
        except OSError:
            lines = []
        return "\nLast lines of its log:\n" + "\n".join(lines) + f"\nThe whole log: {self.log}"

    async def stop(self) -> None:
        """End it: SIGTERM, and after a while SIGKILL."""
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
            except TimeoutError:
                self._signal(signal.SIGKILL)
                await self._process.wait()
        self.socket.unlink(missing_ok=True)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
