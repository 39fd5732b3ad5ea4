"""One rollout: start the environment, render, generate, let the environment answer, until it is done."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from slipstream.config.settings import Config
from slipstream.errors import DataError, DeadlineExceeded, EngineRefused, EnvironmentFailed, ModelError, RunFailed
from slipstream.protocols import EngineClient, Environment, EnvironmentReply, Generation, Message
from slipstream.rollout.external import ExternalCalls
from slipstream.rollout.prefixes import Prefix, PrefixRecorder
from slipstream.rollout.rendering import PromptDoesNotFit, Renderer, as_template_messages, with_described_tools
from slipstream.rollout.trajectory import Trajectory
from slipstream.types import GenerateRequest, PrefixChunk, Purpose, Rollout, Sampling, StopReason

T = TypeVar("T")

EVAL_SEED_SHIFT = 1_000_003  # row n of the evaluation draws other numbers than group n
CLOSE_TIMEOUT_S = 5.0  # of an environment whose rollout was cancelled

# Causes of failed rollouts, as they are counted: `Rollout.error` is "<cause>: <detail>".
PROMPT_DOES_NOT_FIT = "prompt does not fit"
BAD_PROMPT = "bad prompt"
CHAT_TEMPLATE = "chat template"
ENVIRONMENT = "environment failed"
ENGINE = "engine refused"
DEADLINE = "deadline"
ABORTED = "aborted"
PREFIX = "recorded prefix does not fit"
INTERRUPTED = "interrupted"


class _PrefixMismatch(Exception):
    """Recorded tokens that do not follow the prompt as it is rendered now."""


class _Interrupted(Exception):
    """New weights stopped the rollout, and its tokens are not to be kept."""


class SharedPrompt:
    """The prompt that all rollouts of a group begin with: the engine computes it once."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._ids: np.ndarray | None = None

    def agree(self, messages: list[dict[str, Any]], ids: np.ndarray) -> None:
        """The first rollout sets it, the others must have the same (EnvironmentFailed)."""
        if self._ids is None:
            self.messages, self._ids = messages, ids
        elif not np.array_equal(ids, self._ids):
            raise EnvironmentFailed("its first messages differ from those of another rollout of its group; a group shares one prompt")


@dataclass(frozen=True, slots=True)
class RolloutJob:
    """What to roll out."""

    group_id: int  # evaluation: the row's index
    sample: int
    attempt: int  # evaluation: the evaluation's number, so that no two have the same key
    purpose: Purpose
    row: dict[str, Any]
    sampling: Sampling
    min_version: int = 0
    num_retries: int = 0  # earlier attempts that new weights stopped
    prefix: PrefixChunk | None = None  # recorded tokens to go on from
    shared: SharedPrompt = field(default_factory=SharedPrompt)


class RolloutRunner:
    """Runs rollouts for one engine and one set of settings. Holds no state of a rollout, so any number may run at once.

    `in_words`: requests carry the conversation as messages, too.
    """

    def __init__(
        self,
        engine: EngineClient,
        renderer: Renderer,
        config: Config,
        external: ExternalCalls,
        make_environment: Callable[[dict[str, Any]], Environment],
        recorder: PrefixRecorder | None = None,
        *,
        stop_token_ids: tuple[int, ...],
        seed: int,
        in_words: bool = False,
    ):
        self._engine, self._renderer, self._config, self._external = engine, renderer, config, external
        self._make_environment, self._recorder = make_environment, recorder
        self._stop_token_ids, self._seed, self._in_words = stop_token_ids, seed, in_words

    async def run(self, job: RolloutJob) -> Rollout:
        """The rollout's record, failed or not. What raises is not its fault: the engine, the controller, a tool that lost too many threads.

        New weights may stop it: then it goes on from its tokens, or (`abort_retry`) starts anew, with a new environment and a deadline
        of its own, for as long as the controller lets it.
        """
        started = time.monotonic()
        while True:
            trajectory = Trajectory(job.group_id, job.sample, job.attempt, job.purpose, job.num_retries)
            try:
                await self._attempt(job, trajectory)
                break
            except _Interrupted:
                if not await self._discard(job, trajectory):
                    trajectory.fail(INTERRUPTED, f"new weights stopped it, and no further attempt is due after {job.num_retries + 1}")
                    break
            job = replace(job, attempt=job.attempt + 1, num_retries=job.num_retries + 1, prefix=None)
        if self._recorder is not None and job.purpose is Purpose.TRAIN and not self._records(job):
            self._recorder.end((job.group_id, job.sample, job.attempt), trajectory.prompt_length)  # its engine slot is free
        return trajectory.rollout(time.monotonic() - started)

    async def _discard(self, job: RolloutJob, trajectory: Trajectory) -> bool:
        """Throw the attempt's tokens away; whether another one may begin."""
        assert self._recorder is not None, "evaluations are never interrupted"
        return await self._recorder.discard((job.group_id, job.sample, job.attempt), trajectory.num_sampled)

    async def _attempt(self, job: RolloutJob, trajectory: Trajectory) -> None:
        """Fill the trajectory; failures are recorded in it.

        The deadline `rollout.timeout_s` covers environment and generation from the first token on; the wait for the first one of a turn
        does not count: an engine may rightly hold a request until it has the version it must be sampled with. Nor does the time from an
        engine's death to the first token of another. Interrupts do.
        """
        timeout_s = self._config.rollout.timeout_s
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                await self._converse(job, trajectory, deadline)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            text = f"rollout took longer than {timeout_s:g} s"
            if self._config.run.deterministic:
                where = f"group {job.group_id} sample {job.sample}"
                raise DeadlineExceeded(f"{where}: {text}; a deadline that fires ends a deterministic run") from error
            trajectory.fail(DEADLINE, text)
        except EnvironmentFailed as error:
            trajectory.fail(ENVIRONMENT, str(error))
        except EngineRefused as error:
            trajectory.fail(ENGINE, str(error))
        except PromptDoesNotFit as error:
            trajectory.fail(PROMPT_DOES_NOT_FIT, str(error))
        except DataError as error:
            trajectory.fail(BAD_PROMPT, str(error))
        except ModelError as error:
            trajectory.fail(CHAT_TEMPLATE, str(error))
        except _PrefixMismatch as error:
            trajectory.fail(PREFIX, str(error))

    async def _converse(self, job: RolloutJob, trajectory: Trajectory, deadline: asyncio.Timeout) -> None:
        environment = self._make_environment(job.row)
        try:
            messages = as_template_messages(await self._call(job, 0, environment.start()))
            tools = getattr(environment, "tool_schemas", ())
            ids = self._renderer.prompt(messages, job.sampling.max_new_tokens, tools)
            job.shared.agree(messages, ids)
            trajectory.add_prompt(ids)
            trajectory.messages = with_described_tools(messages, tools) if tools else list(messages)
            for turn in range(self._config.rollout.max_turns):
                text = await self._sample_turn(job, turn, trajectory, deadline)
                if trajectory.stop_reason is not StopReason.STOP:
                    break  # cut off: scored as it is
                reply = await self._call(job, 1 + turn, environment.step(Message(role="assistant", content=text)))
                if not self._take_reply(turn, trajectory, reply, tools):
                    break
        except _Interrupted:
            await self._close(job, environment)
            raise
        except asyncio.CancelledError:
            await self._close_quietly(environment)
            raise
        except BaseException:
            await self._close_quietly(environment)  # the first error is the one to report
            raise
        await self._close(job, environment)

    async def _sample_turn(self, job: RolloutJob, turn: int, trajectory: Trajectory, deadline: asyncio.Timeout) -> str:
        """Sample one turn into the trajectory; its text."""
        start, began = len(trajectory), time.monotonic()
        if job.prefix is not None and turn == 0:
            self._take_prefix(job, job.prefix, trajectory)
        if trajectory.stop_reason is None or turn > 0:
            await self._generate(job, turn, trajectory, start, deadline)
        text = self._renderer.decode(trajectory.token_ids[start:])
        trajectory.end_turn(start, job.sampling, time.monotonic() - began, text)
        trajectory.messages.append({"role": "assistant", "content": text})
        if trajectory.stop_reason is StopReason.ABORT:
            trajectory.fail(ABORTED, "the engine stopped the generation")
        return text

    async def _generate(self, job: RolloutJob, turn: int, trajectory: Trajectory, turn_start: int, deadline: asyncio.Timeout) -> None:
        """Ask the engine to go on from the trajectory's tokens, and add what it samples, also where that is cut off.

        A generation that new weights stopped is asked for again, from its exact tokens, under the same key and random stream; what is kept
        of it (tokens, logprobs, spans) and recorded of it goes on as if nothing had been. With `abort_retry` _Interrupted is raised.
        """
        clock = _PausedDeadline(deadline)
        prefix: Prefix | None = None

        def notify() -> None:
            clock.go_on()
            if prefix is not None and self._recorder is not None:
                self._recorder.tell(prefix)

        generation = Generation(len(trajectory), notify)
        generation.on_engine_lost = clock.pause
        if self._records(job):
            num_before = len(trajectory) - trajectory.prompt_length
            prefix = Prefix((job.group_id, job.sample, job.attempt), trajectory.prompt_length, num_before, generation)
            assert self._recorder is not None
            self._recorder.open(prefix)
        generation.notify_at = 1
        try:
            while True:
                await self._engine.generate(self._request(job, turn, trajectory, generation, turn_start), generation)
                if generation.stop_reason is not StopReason.INTERRUPT:
                    break
                trajectory.num_interrupts += 1
                if self._config.rollout.interrupt == "abort_retry":
                    raise _Interrupted
                generation.stop_reason = None
        finally:
            clock.go_on()
            trajectory.add_generation(generation)
        if prefix is not None and self._recorder is not None:
            self._recorder.tell(prefix)

    def _request(self, job: RolloutJob, turn: int, trajectory: Trajectory, generation: Generation, turn_start: int) -> GenerateRequest:
        """What is to be sampled after the trajectory's tokens and those that the generation has already."""
        ids = [*trajectory.token_ids, *generation.token_ids]
        room = self._renderer.max_context - len(ids)
        left = job.sampling.max_new_tokens - (len(ids) - turn_start)
        return GenerateRequest(
            group_id=job.group_id,
            sample=job.sample,
            attempt=job.attempt,
            turn=turn,
            purpose=job.purpose,
            token_ids=np.asarray(ids, dtype=np.int32),
            prompt_length=trajectory.prompt_length,
            num_sampled=trajectory.num_sampled + len(generation.token_ids),
            num_sampled_in_turn=len(ids) - turn_start,
            sampling=msgspec.structs.replace(job.sampling, max_new_tokens=min(left, room)),
            stop_token_ids=self._stop_token_ids,
            min_version=job.min_version,
            seed=self._seed if job.purpose is Purpose.TRAIN else self._seed + EVAL_SEED_SHIFT,
            oldest_version=trajectory.oldest_version(generation),
            state=generation.state,
            messages=tuple(trajectory.messages) if self._in_words else (),
        )

    def _take_prefix(self, job: RolloutJob, prefix: PrefixChunk, trajectory: Trajectory) -> None:
        """Put the recorded tokens behind the prompt; where they already end the turn, say so."""
        if prefix.prompt_length != trajectory.prompt_length:
            now, then = trajectory.prompt_length, prefix.prompt_length
            raise _PrefixMismatch(f"its recorded tokens follow a prompt of {then} tokens, now it has {now}")
        trajectory.add_recorded(prefix)
        if trajectory.stop_reason is None and len(prefix.token_ids):
            trajectory.stop_reason = self._ends(prefix.token_ids, job.sampling)

    def _ends(self, sampled: np.ndarray, sampling: Sampling) -> StopReason | None:
        """Why a generation of these tokens has ended, if it has."""
        if int(sampled[-1]) in self._stop_token_ids:
            return StopReason.STOP
        if sampling.stop_strings and any(stop in self._renderer.decode(sampled.tolist()) for stop in sampling.stop_strings):
            return StopReason.STOP
        return StopReason.LENGTH if len(sampled) >= sampling.max_new_tokens else None

    def _take_reply(self, turn: int, trajectory: Trajectory, reply: EnvironmentReply, tools: tuple[dict[str, Any], ...]) -> bool:
        """Add what the environment answered; whether the model speaks again."""
        last_turn = turn + 1 == self._config.rollout.max_turns
        truncated = reply.truncated or (not reply.done and last_turn)
        trajectory.mark_turn(reward=reply.reward, terminated=reply.done and not reply.truncated, truncated=truncated)
        if reply.done or last_turn:
            return False
        if not reply.messages:
            raise EnvironmentFailed("it neither ended the episode nor answered")
        messages = as_template_messages(reply.messages)
        ids = self._renderer.continuation(trajectory.token_ids[-1], messages, tools)
        if len(trajectory) + len(ids) >= self._renderer.max_context:
            trajectory.mark_turn(truncated=True)
            trajectory.stop_reason = StopReason.LENGTH
            return False
        trajectory.add_given(ids, reply.messages[-1].role, error=reply.error)
        trajectory.messages.extend(messages)
        return True

    def _records(self, job: RolloutJob) -> bool:
        """Only single-turn rollouts go on from recorded tokens: an environment's state is recorded nowhere."""
        single = self._config.rollout.environment == "single_turn"
        return self._recorder is not None and single and job.purpose is Purpose.TRAIN

    async def _call(self, job: RolloutJob, number: int, awaitable: Awaitable[T]) -> T:
        """A call of the environment; EnvironmentFailed with its traceback for what it raises, bad rows and what ends the run aside."""
        key = (job.purpose.value, job.group_id, job.attempt, "environment", job.sample, number)
        try:
            return await self._external.run(key, awaitable)
        except (DataError, EnvironmentFailed, RunFailed, DeadlineExceeded):
            raise
        except Exception as error:
            trace = "".join(traceback.format_exception(error)).rstrip()
            raise EnvironmentFailed(f"{type(error).__name__}: {error}\n{trace}") from error

    async def _close(self, job: RolloutJob, environment: Environment) -> None:
        await self._call(job, 1 + self._config.rollout.max_turns, environment.close())

    async def _close_quietly(self, environment: Environment) -> None:
        """Close an environment whose rollout is lost already; a second error would hide the first."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await environment.close()
        except Exception:
            return


class _PausedDeadline:
    """Takes the clock off a rollout's deadline until its first token arrives, and again while it has no engine."""

    def __init__(self, deadline: asyncio.Timeout):
        self._deadline, self._left_s = deadline, 0.0
        self._paused = False
        self.pause()

    def pause(self) -> None:
        if not self._paused and not self._deadline.expired():
            when = self._deadline.when()
            assert when is not None
            self._left_s, self._paused = when - asyncio.get_running_loop().time(), True
            self._deadline.reschedule(None)

    def go_on(self) -> None:
        if self._paused:
            self._paused = False
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._left_s)
