"""Roles that ask of the controller and of each other all that the real ones do, and do next to no work themselves.

    FreeEngine       one token per live request and tick, out of a table; lengths are drawn per request, so nothing runs in lockstep
    train            a trainer without a model: batch, publish, report, checkpoint
    serve_weights    an engine without requests: takes every version and confirms it
    Groups           a rollout worker without an engine: groups that are sampled elsewhere, at one token per turn of a virtual clock

So what a run with them costs is what the library costs. `seconds` of engine and groups is the stand-in's own CPU time, to be taken off.
"""

from __future__ import annotations

import asyncio
import heapq
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.checkpoint_files import describe_files, write_bytes, write_manifest
from slipstream.config import Config
from slipstream.controller.controller import Controller, open_controller
from slipstream.controller.run_folder import RunFolder
from slipstream.observe.observer import open_observer
from slipstream.protocols import CheckpointManifest, ControllerAPI, Manifest, Observer, WeightsOffer
from slipstream.types import (
    Assignment,
    EngineReport,
    EvalResult,
    Frame,
    GenerateRequest,
    Group,
    PrefixChunk,
    RequestKey,
    Rollout,
    Score,
    Span,
    StepReport,
    StopReason,
    Turn,
    seal,
)
from slipstream.weight_sync.ends import Reader
from slipstream.weight_sync.slots import SlotBroker

ENGINE_ID = "engine-0"
PROMPT_TOKENS = 64
CHUNK_TOKENS = 64  # what the worker's recorder sends at a time
_TABLE = 1 << 16
_RANDOM = np.random.default_rng(0)
_TOKENS = _RANDOM.integers(300, 50_000, 2 * _TABLE).astype(np.int32)
_LOGPROBS = -_RANDOM.exponential(1.0, 2 * _TABLE).astype(np.float32)


def settings(in_flight: int, group_size: int, tokens: int, steps: int, **tables: dict[str, Any]) -> Config:
    """A run with `in_flight` rollouts in flight at the shipped max_staleness of 1; everything not named here is the shipped default."""
    base: dict[str, dict[str, Any]] = {
        "rollout": {"group_size": group_size, "max_new_tokens": 2 * tokens},
        "trainer": {"steps": steps, "groups_per_step": max(1, in_flight // (2 * group_size))},
        "engine": {"slots": in_flight},
    }
    for name, table in tables.items():
        base[name] = base.get(name, {}) | table
    return Config.model_validate(base)


def length_of(group_id: int, sample: int, mean: int) -> int:
    """Tokens of this rollout: even over [mean/2, 3/2 mean], a function of its name."""
    return mean // 2 + (group_id * 2_654_435_761 + sample * 40_503 + 12_345) % 65_521 * mean // 65_521


class Marking:
    """The observer of a run (metrics.jsonl, samples.jsonl, no display), and `on_step(s)` once s steps are made and durable."""

    def __init__(self, observer: Observer, on_step: Callable[[int], object]):
        self._observer, self._on_step = observer, on_step

    def step(self, line: dict[str, Any], groups: tuple[Group, ...]) -> None:
        self._observer.step(line, groups)
        self._on_step(line["version"])

    def evaluation(self, line: dict[str, Any], result: EvalResult) -> None:
        self._observer.evaluation(line, result)

    def note(self, text: str) -> None:
        self._observer.note(text)


def open_run(folder: Path, config: Config, on_step: Callable[[int], object] = lambda step: None, num_rows: int = 512) -> Controller:
    """A controller on this run folder, new or not, with the files that a run writes."""
    place = RunFolder.open(folder) if folder.exists() else RunFolder.create("benchmark", folder)
    place.save_config(config)
    rows = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(num_rows)]
    observer = Marking(open_observer(folder, config), on_step)
    return open_controller(place, config, rows=rows, data_fingerprint="rows", broker=SlotBroker(), observer=observer)


# ---- engine --------------------------------------------------------------------------------------------------------------------


class FreeEngine:
    """What `engine_socket.EngineServer`, `InProcessClient` and the engine's loop ask of an engine."""

    engine_id = ENGINE_ID

    def __init__(self, mean_tokens: int):
        self.version, self.checksum = (0, -1), ""
        self.seconds = 0.0  # in `tick` and `submit`: the stand-in's own cost
        self.num_ticks = 0
        self._mean = mean_tokens
        self._last_handle = 0
        self._handles = np.empty(0, np.int32)
        self._left = np.empty(0, np.int64)
        self._waiting: list[tuple[int, GenerateRequest]] = []  # for a slot of this tick, or for a newer version
        self._by_key: dict[RequestKey, int] = {}
        self._keys: dict[int, RequestKey] = {}

    def submit(self, request: GenerateRequest) -> int:
        began = time.thread_time()
        self._last_handle += 1
        self._by_key[request.key], self._keys[self._last_handle] = self._last_handle, request.key
        self._waiting.append((self._last_handle, request))
        self.seconds += time.thread_time() - began
        return self._last_handle

    def cancel(self, handle: int) -> None:
        if handle in self._keys:
            self._forget(handle)
            keep = self._handles != handle
            self._handles, self._left = self._handles[keep], self._left[keep]
            self._waiting = [entry for entry in self._waiting if entry[0] != handle]

    def handle(self, key: RequestKey) -> int | None:
        return self._by_key.get(key)

    def save(self, handle: int) -> int | None:
        return None

    def free(self, state: int) -> None: ...

    def free_all_states(self) -> None: ...

    def pin(self) -> tuple[int, int, str]:
        return (*self.version, self.checksum)

    def unpin(self) -> float:
        return 0.0

    def may_adopt(self) -> bool:
        return True

    def set_version(self, incarnation: int, version: int, checksum: str) -> None:
        self.version, self.checksum = (incarnation, version), checksum

    def has_work(self) -> bool:
        return self.version[1] >= 0 and (len(self._handles) > 0 or any(r.min_version <= self.version[1] for _, r in self._waiting))

    def tick(self) -> Frame:
        began = time.thread_time()
        started = self._start()
        at = self.num_ticks * 4_099 % _TABLE
        handles, count = self._handles, len(self._handles)
        tokens, logprobs = np.resize(_TOKENS[at:], count), np.resize(_LOGPROBS[at:], count)
        self._left -= 1
        done = self._left <= 0
        finished: tuple[tuple[int, StopReason], ...] = ()
        if done.any():
            finished = tuple((handle, StopReason.LENGTH) for handle in handles[done].tolist())
            for handle, _ in finished:
                self._forget(handle)
            self._handles, self._left = handles[~done], self._left[~done]
        self.num_ticks += 1
        frame = Frame(
            tick=self.num_ticks,
            engine_id=ENGINE_ID,
            incarnation=self.version[0],
            version=self.version[1],
            handles=handles,
            token_ids=tokens,
            logprobs=logprobs,
            finished=finished,
            prefilled=tuple((handle, *self.version) for handle in started),
        )
        self.seconds += time.thread_time() - began
        return frame

    def _start(self) -> list[int]:
        """Requests whose version is there get their first token in this tick."""
        ready = [(handle, request) for handle, request in self._waiting if request.min_version <= self.version[1]]
        if ready:
            self._waiting = [entry for entry in self._waiting if entry[1].min_version > self.version[1]]
            handles = [handle for handle, _ in ready]
            lengths = [length_of(request.group_id, request.sample, self._mean) - request.num_sampled for _, request in ready]
            self._handles = np.concatenate([self._handles, np.array(handles, np.int32)])
            self._left = np.concatenate([self._left, np.array(lengths, np.int64)])
            return handles
        return []

    def _forget(self, handle: int) -> None:
        del self._by_key[self._keys.pop(handle)]


class NoWeights(Reader):
    """Loads nothing; the checksum that was published."""

    def __call__(self, offer: WeightsOffer) -> str:
        return offer.manifest.checksum


async def serve_weights(controller: ControllerAPI) -> None:
    """Take every version that is published and confirm it; for ever."""
    incarnation = version = -1
    while True:
        offer = await controller.next_weights(ENGINE_ID, incarnation, version)
        made = offer.manifest
        incarnation, version = made.incarnation, made.version
        report = EngineReport(engine_id=ENGINE_ID, incarnation=incarnation, version=version, checksum=made.checksum)
        await controller.confirm_weights(offer.slot, report)


# ---- trainer -------------------------------------------------------------------------------------------------------------------


async def train(
    controller: ControllerAPI,
    config: Config,
    start_step: int,
    checkpoints: Path,
) -> None:
    """The trainer's loop (`trainer/loop.py`) without a model."""
    step = start_step
    _, incarnation, _ = await controller.checkpoint_context()
    await _publish(controller, incarnation, step)
    while (batch := await controller.get_batch(step)) is not None:
        assert batch.step == step
        await _publish(controller, incarnation, step + 1)
        step += 1
        await controller.finish_step(StepReport(step=step - 1, version=step, checksum=_checksum(step), metrics={"loss": 0.0}))
        if step % config.checkpoint.every == 0 or step == config.trainer.steps:
            await _checkpoint(controller, checkpoints, step)


async def _publish(controller: ControllerAPI, incarnation: int, version: int) -> None:
    slot = await controller.begin_write()
    manifest = Manifest(incarnation=incarnation, version=version, checksum=_checksum(version), total_bytes=0, entries=())
    await controller.publish(slot, manifest)


async def _checkpoint(controller: ControllerAPI, folder: Path, step: int) -> None:
    run_id, incarnation, seq = await controller.checkpoint_context()
    place = folder / f".tmp-{step}-{incarnation}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    write_bytes(place / "model.bin", b"%d" % step * 100)
    manifest = CheckpointManifest(
        run_id=run_id,
        incarnation=incarnation,
        step=step,
        ledger_seq=seq,
        weights_checksum=_checksum(step),
        files=describe_files(place),
    )
    write_manifest(place, manifest)
    await controller.commit_checkpoint(place.name, manifest)


def _checksum(version: int) -> str:
    return f"{version:032x}"


# ---- rollout worker ------------------------------------------------------------------------------------------------------------


class FreeScorer:
    """A reward that costs nothing: 1 for even tokens at the end, else 0."""

    name, weight = "free", 1.0

    async def score(self, group: Group) -> list[Score]:
        return [Score(name=self.name, value=float(r.token_ids[-1] % 2), weight=1.0) for r in group.rollouts]

    async def close(self) -> None: ...


class FreeTokenizer:
    """PROMPT_TOKENS ids for every prompt, a short text for every completion; what a real tokenizer costs is printed apart."""

    chat_template = "free"
    eos_token_id = 1
    all_special_ids = (1,)

    def apply_chat_template(self, messages: Any, **ignored: Any) -> str:
        return "".join(m["content"] for m in messages)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(range(2, 2 + PROMPT_TOKENS))

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "the answer is 42"


class Groups:
    """Stands for the whole sampling side: takes groups, records their tokens CHUNK_TOKENS at a time, hands them back scored.

    A virtual clock gives every running rollout one token per turn. As in a run with a real engine each chunk falls due at its own turn and
    is recorded before the next one, and a group is durable before the next turn: nothing is saved by haste.
    """

    def __init__(self, controller: ControllerAPI, config: Config, mean_tokens: int):
        self.seconds = 0.0
        self._controller, self._config, self._mean = controller, config, mean_tokens
        self._now = 0
        self._queue: list[tuple[int, int, int]] = []  # (turn, group id, tokens): a chunk boundary of the group's samples
        self._tasks: dict[int, Assignment] = {}
        self._incarnation = 1
        self._started = asyncio.Event()

    async def run(self) -> None:
        _, self._incarnation, _ = await self._controller.checkpoint_context()
        async with asyncio.TaskGroup() as tasks:
            admitting = tasks.create_task(self._admit())
            clock = tasks.create_task(self._turns())
            await admitting
            clock.cancel()

    async def _admit(self) -> None:
        """Groups as they come: the controller's gate is what bounds them."""
        while not (work := await self._controller.admit(self._config.engine.slots)).stop:
            for task in work.assignments:
                self.take(task)
            self._started.set()

    def take(self, task: Assignment) -> None:
        """This group runs from now on."""
        self._tasks[task.group_id] = task
        self._push(task.group_id, 0)

    async def _turns(self) -> None:
        while True:
            while not self._queue:
                self._started.clear()
                await self._started.wait()
            chunks, finished = self.turn()
            await self._controller.progress([seal(chunk) for chunk in chunks])
            await asyncio.gather(*map(self._controller.finish_group, finished))
            await asyncio.sleep(0)  # a turn for the others, also where nothing had to be waited for

    def turn(self) -> tuple[list[PrefixChunk], list[Group]]:
        """What falls due at the next turn at which anything does."""
        began = time.thread_time()
        self._now = max(self._now, self._queue[0][0])
        chunks: list[PrefixChunk] = []
        finished: list[Group] = []
        while self._queue and self._queue[0][0] <= self._now:
            _, group_id, tokens = heapq.heappop(self._queue)
            chunks += self._chunks(group_id, tokens)
            if tokens >= self._longest(group_id):
                finished.append(self._group(self._tasks.pop(group_id)))
            else:
                self._push(group_id, tokens)
        self.seconds += time.thread_time() - began
        return chunks, finished

    def _push(self, group_id: int, tokens: int) -> None:
        """The next turn at which a sample of the group has a chunk to record: a boundary or its end."""
        ends = [length for s in range(self._config.rollout.group_size) if (length := length_of(group_id, s, self._mean)) > tokens]
        following = min((tokens // CHUNK_TOKENS + 1) * CHUNK_TOKENS, min(ends))
        heapq.heappush(self._queue, (self._now + following - tokens, group_id, following))

    def _longest(self, group_id: int) -> int:
        return max(length_of(group_id, s, self._mean) for s in range(self._config.rollout.group_size))

    def _chunks(self, group_id: int, tokens: int) -> Iterator[PrefixChunk]:
        """What each sample has to record once the group has come to `tokens`."""
        task = self._tasks[group_id]
        for sample in range(self._config.rollout.group_size):
            length = length_of(group_id, sample, self._mean)
            if length == tokens or (tokens % CHUNK_TOKENS == 0 and tokens < length):
                start = (tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
                yield PrefixChunk(
                    group_id=group_id,
                    sample=sample,
                    attempt=task.attempt,
                    prompt_length=PROMPT_TOKENS,
                    start=start,
                    token_ids=_TOKENS[start:tokens],
                    logprobs=_LOGPROBS[start:tokens],
                    spans=(Span(PROMPT_TOKENS + start, PROMPT_TOKENS + tokens, self._incarnation, task.min_version, ENGINE_ID),),
                    prefill_version=(self._incarnation, task.min_version),
                    stop_reason=StopReason.LENGTH if tokens == length else None,
                )

    def _group(self, task: Assignment) -> Group:
        rollouts = tuple(self._rollout(task, sample) for sample in range(self._config.rollout.group_size))
        prompt = [{"role": "user", "content": task.row["prompt"]}]
        return Group(
            group_id=task.group_id,
            attempt=task.attempt,
            draw=task.draw,
            row=task.row,
            prompt=prompt,
            rollouts=rollouts,
            min_version=task.min_version,
        )

    def _rollout(self, task: Assignment, sample: int) -> Rollout:
        length = length_of(task.group_id, sample, self._mean)
        whole = PROMPT_TOKENS + length
        turns = (
            Turn(start=0, end=PROMPT_TOKENS, role="prompt"),
            Turn(start=PROMPT_TOKENS, end=whole, role="assistant", terminated=True),
        )
        reward = float((task.group_id + sample) % 2)
        return Rollout(
            group_id=task.group_id,
            sample=sample,
            attempt=task.attempt,
            episode=sample,
            stop_reason=StopReason.LENGTH,
            prompt_length=PROMPT_TOKENS,
            token_ids=_TOKENS[:whole],
            logprobs=_sampled_logprobs(whole),
            loss_mask=np.arange(whole) >= PROMPT_TOKENS,
            spans=(Span(PROMPT_TOKENS, whole, self._incarnation, task.min_version, ENGINE_ID),),
            prefill_version=(self._incarnation, task.min_version),
            turns=turns,
            scores=(Score(name="free", value=reward),),
            reward=reward,
            completion="the answer is 42",
        )


def _sampled_logprobs(length: int) -> np.ndarray:
    logprobs = _LOGPROBS[:length].copy()
    logprobs[:PROMPT_TOKENS] = 0.0
    return logprobs
