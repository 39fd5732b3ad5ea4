"""Sequences that a real server generates while new weights come, and what transformers says of each of their tokens.

    six sequences ──► new weights while they run; one more sequence comes meanwhile, one after ──► the same again ──► all end

The engine and its loop are the product's; this is the controller (it publishes) and the worker (it sends interrupted sequences again).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from vllm_server import LABELS, PROMPT, LiveServer, perturb
from ways import Way, perturb_some

from slipstream.engines.frames import FrameRouter
from slipstream.engines.interrupts import InterruptPolicy
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.loop import run_vllm_engine
from slipstream.engines.vllm.server import MODEL
from slipstream.engines.vllm.weights import ServerWeights, WholeWeights
from slipstream.launch.page import NullProgress
from slipstream.protocols import Generation, WeightsOffer
from slipstream.types import EngineReport, Frame, GenerateRequest, Purpose, Sampling, StopReason

DEADLINE_S = 240.0
NEW_TOKENS = 100
TEMPERATURE = 0.7
FIRST = 6  # sequences
UPDATES_AT = (30, 230)  # tokens of all sequences

POLICIES = (
    InterruptPolicy("in_flight", "keep"),
    InterruptPolicy("in_flight", "recompute"),
    InterruptPolicy("abort_resume", "recompute"),
    InterruptPolicy("abort_retry", "recompute"),
    InterruptPolicy("drain"),
)

State = dict[str, torch.Tensor]


@dataclass
class Story:
    """What came of it."""

    generations: list[Generation] = field(default_factory=list)
    weights: dict[int, State] = field(default_factory=dict)  # by version, as they were sent
    num_interrupted: int = 0


def interrupt(live: LiveServer, policy: InterruptPolicy, way: Way | None) -> Story:
    return live.run(_Interrupted(live, policy, way).run())


class _Interrupted:
    def __init__(self, live: LiveServer, policy: InterruptPolicy, way: Way | None):
        self._live, self._policy, self._way, self.story = live, policy, way, Story()
        vocab_size = live.model.config.vocab_size
        self._engine = VllmEngine(
            live.client, labels=LABELS, engine_id="engine-0", model=MODEL, slots=8, max_context=128, vocab_size=vocab_size, policy=policy
        )
        path = f"/proc/{os.getpid()}/fd/{live.slot.fileno()}"
        direct = WholeWeights(self._engine, ServerWeights(live.client, MODEL, vocab_size, LABELS), lambda offer: path)
        self._weights = direct if way is None else way.weights(self._engine)
        self._router, self._news, self._num_tokens = FrameRouter(), asyncio.Condition(), 0
        self._offers: asyncio.Queue[WeightsOffer] = asyncio.Queue()
        self._confirmed: set[int] = set()

    async def run(self) -> Story:
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            engine = group.create_task(
                run_vllm_engine(self._engine, self._weights, self, self._send, NullProgress(), asyncio.Event().wait)  # type: ignore[arg-type]
            )
            await self._publish()
            running = [group.create_task(self._complete(sample)) for sample in range(FIRST)]
            for num_tokens in UPDATES_AT:
                await self._until(lambda num_tokens=num_tokens: self._num_tokens >= num_tokens)
                perturb(self._live.model) if self._way is None else perturb_some(self._live.model)
                publishing = group.create_task(self._publish())
                running.append(group.create_task(self._complete(len(running))))
                await publishing
                running.append(group.create_task(self._complete(len(running))))
            self.story.generations = [await each for each in running]
            assert self._engine.num_running == 0
            engine.cancel()
        return self.story

    async def _complete(self, sample: int) -> Generation:
        """What the rollout worker does: an interrupted sequence comes again, with its tokens or without."""
        into, attempt = Generation(len(PROMPT)), 0
        while True:
            num = len(into.token_ids)
            request = GenerateRequest(
                group_id=0, sample=sample, attempt=attempt, turn=0, purpose=Purpose.TRAIN,
                token_ids=np.array([*PROMPT, *into.token_ids], np.int32), prompt_length=len(PROMPT), num_sampled=num, stop_token_ids=(),
                sampling=Sampling(temperature=TEMPERATURE, max_new_tokens=NEW_TOKENS - num),
                oldest_version=min((span.version for span in into.spans), default=None),
            )  # fmt: skip
            await self._router.open(self._engine.submit(request), into)
            if into.stop_reason is not StopReason.INTERRUPT:
                return into
            self.story.num_interrupted += 1
            if self._policy.interrupt == "abort_retry":
                into, attempt = Generation(len(PROMPT)), attempt + 1

    async def _send(self, frame: Frame) -> None:
        self._router.feed(frame)
        self._num_tokens += len(frame.token_ids)
        async with self._news:
            self._news.notify_all()

    async def _until(self, reached: Callable[[], bool]) -> None:
        async with self._news:
            await self._news.wait_for(reached)

    # ---- the controller

    async def _publish(self) -> None:
        offer = WeightsOffer(slot=0, manifest=self._live.pack()) if self._way is None else self._way.offer()
        version = offer.manifest.version
        self.story.weights[version] = self._live.sent_weights()
        self._offers.put_nowait(offer)
        await self._until(lambda: version in self._confirmed)

    async def next_weights(self, engine_id: str, incarnation: int, version: int) -> WeightsOffer:
        return await self._offers.get()

    async def confirm_weights(self, slot: int, report: EngineReport) -> None:
        async with self._news:
            self._confirmed.add(report.version)
            self._news.notify_all()

    async def note(self, text: str) -> None: ...


def versions_of(generation: Generation) -> list[int]:
    """Of each token."""
    return [span.version for span in generation.spans for _ in range(span.start, span.end)]


class Reference:
    """transformers in float32 with the weights that were sent."""

    def __init__(self, live: LiveServer, weights: dict[int, State]):
        self._model = AutoModelForCausalLM.from_config(live.model.config, attn_implementation="eager").eval().float()
        self._weights = weights

    @torch.no_grad()
    def logprobs(self, tokens: list[int], versions: list[int], *, keep: bool) -> np.ndarray:
        """float[n]: of tokens that these versions sampled after PROMPT. keep: over keys and values that stay those of whoever made them;
        else each version reads all that is before anew."""
        ids, cache, rows = torch.tensor([[*PROMPT, *tokens]]), DynamicCache(), []
        for version in sorted(set(versions)):
            mine = [place for place, by in enumerate(versions, start=len(PROMPT)) if by == version]
            assert mine == list(range(mine[0], mine[-1] + 1)), "versions only grow"
            self._model.load_state_dict(self._weights[version])
            first = cache.get_seq_length() if keep else 0  # a pass reads the token before the one it samples
            logits = self._model(ids[:, first : mine[-1]], past_key_values=cache if keep else None, use_cache=keep).logits[0]
            rows.append(logits[mine[0] - 1 - first :])
        logprobs = torch.log_softmax(torch.cat(rows) / TEMPERATURE, -1)
        return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def check_interrupted(live: LiveServer, policy: InterruptPolicy, way: Way | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """|difference| of logprobs to transformers with the versions that the tokens name; and, of each new version's first token, with the
    version before instead: what a label that is one token off would show. Checks what the policy says of versions."""
    story = interrupt(live, policy, way)
    reference, gaps, others = Reference(live, story.weights), [], []
    first, *_, last = story.weights
    for generation in story.generations:
        tokens, versions = generation.token_ids, versions_of(generation)
        assert len(tokens) == NEW_TOKENS and generation.stop_reason is StopReason.LENGTH
        assert versions == sorted(versions) and first <= versions[0] and versions[-1] <= last
        logprobs = np.array(generation.logprobs)
        gaps.append(np.abs(logprobs - reference.logprobs(tokens, versions, keep=_keeps(policy))))
        swaps = [place for place in range(1, len(tokens)) if versions[place] != versions[place - 1]]
        late = [versions[place - 1] if place in swaps else version for place, version in enumerate(versions)]
        others += np.abs(logprobs - reference.logprobs(tokens, late, keep=_keeps(policy)))[swaps].tolist()
    mixed = policy.interrupt in ("in_flight", "abort_resume")
    assert bool(others) == mixed, f"{len(others)} sequences saw new weights amid their tokens"
    assert bool(story.num_interrupted) == policy.interrupt.startswith("abort")
    seen = {version for generation in story.generations for version in versions_of(generation)}
    assert last in seen if policy.interrupt == "abort_retry" else seen == set(story.weights)
    return np.concatenate(gaps), np.array(others) if others else None


def _keeps(policy: InterruptPolicy) -> bool:
    return policy.interrupt == "in_flight" and policy.kv == "keep"
