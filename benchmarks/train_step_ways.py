"""One batch, three ways to get its loss and gradient: the shipped trainer's, a padded trainer's, a bare loop's.

The last two are written out here by hand, with nothing of slipstream but the attention that the packed forward pass needs.

Shapes: G = completions of a group, P = prompt tokens, R = completion tokens, T = packed tokens, V = vocabulary.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.config.settings import Config
from slipstream.models.layout import PackedLayout, Segment
from slipstream.trainer.trainer import Trainer
from slipstream.types import Batch, Draw, Group, Rollout, Sampling, Span, Turn

CLIP = 0.2  # both ways; what `loss.preset = "grpo"` ships


@dataclass(frozen=True, slots=True)
class Shape:
    """What a batch is made of. `lengths` of all completions; they are equal unless a row of the table says otherwise."""

    prompt: int  # P
    lengths: tuple[int, ...]  # G numbers of at least 2, the same in every group
    groups: int

    @classmethod
    def equal(cls, prompt: int, completion: int, group_size: int, groups: int) -> Shape:
        return cls(prompt, (completion,) * group_size, groups)

    @property
    def num_loss_tokens(self) -> int:
        return self.groups * sum(self.lengths)


def matrix_parameters(model: nn.Module) -> tuple[int, int]:
    """(body, head): parameters of the weight matrices that tokens are multiplied with. An embedding is looked up, not multiplied."""
    linear = {name: m.weight.numel() for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    head = linear.pop("lm_head")
    return sum(linear.values()), head


def make_batch(shape: Shape, vocabulary: int, seed: int = 0) -> Batch:
    """Random tokens and rewards; every completion token is trained. The sampler's logprobs come from `sampled_by`."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(shape.groups):
        prompt = rng.integers(3, vocabulary, shape.prompt)
        rollouts = []
        for sample, length in enumerate(shape.lengths):
            total = shape.prompt + length
            rollouts.append(
                Rollout(
                    group_id=number,
                    sample=sample,
                    prompt_length=shape.prompt,
                    token_ids=np.concatenate([prompt, rng.integers(3, vocabulary, length)]).astype(np.int32),
                    logprobs=np.zeros(total, dtype=np.float32),
                    loss_mask=np.arange(total) >= shape.prompt,
                    spans=(Span(shape.prompt, total, 1, 0, "e0"),),
                    prefill_version=(1, 0),
                    turns=(Turn(start=shape.prompt, end=total, role="assistant", sampling=Sampling()),),
                    reward=float(rng.random()),
                )
            )
        draw = Draw(number=number, row=number, epoch=0, dataset="random")
        groups.append(Group(group_id=number, draw=draw, row={}, rollouts=tuple(rollouts)))
    return Batch(step=0, groups=tuple(groups), num_loss_tokens=shape.num_loss_tokens)


def record_sampler(batch: Batch, logprob: Tensor, spread: float = 0.1, seed: int = 0) -> None:
    """Write into the batch that a sampler slightly off the model drew it, so that ratios differ from 1 and some are clipped.

    `logprob` [tokens of the loss] under the model, rollout after rollout.
    """
    noise = np.random.default_rng(seed).normal(0.0, spread, len(logprob)).astype(np.float32)
    values, at = np.minimum(logprob.numpy() + noise, 0.0), 0
    for rollout in (r for g in batch.groups for r in g.rollouts):
        count = int(rollout.loss_mask.sum())
        rollout.logprobs[rollout.loss_mask] = values[at : at + count]
        at += count


def policy_loss(logprob: Tensor, sampler_logprob: Tensor, advantage: Tensor) -> Tensor:
    """PPO's clipped objective, the mean over the tokens [N]."""
    ratio = (logprob - sampler_logprob).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


def group_advantages(rewards: Sequence[float]) -> np.ndarray:
    """GRPO's: (r - mean) / (std + 1e-6), std with n - 1."""
    r = np.asarray(rewards)
    return (r - r.mean()) / (r.std(ddof=1) + 1e-6)


def _token_arrays(batch: Batch) -> tuple[Tensor, Tensor]:
    """(sampler's logprob, advantage) [N], rollout after rollout."""
    logprob, advantage = [], []
    for group in batch.groups:
        for rollout, value in zip(group.rollouts, group_advantages([r.reward or 0.0 for r in group.rollouts]), strict=True):
            logprob.append(rollout.logprobs[rollout.loss_mask])
            advantage.append(np.full(len(logprob[-1]), value, dtype=np.float32))
    return torch.from_numpy(np.concatenate(logprob)), torch.from_numpy(np.concatenate(advantage))


class Shipped:
    """`Trainer.train_step` as it runs in every launcher, at learning rate 0: the update is made, the weights stay."""

    def __init__(self, model: nn.Module, batch: Batch, threads: int):
        self.model, self.batch = model, batch
        self.trainer = Trainer(Config.model_validate({"trainer": {"learning_rate": 0.0, "threads": threads}}), model)
        self.optimizer_s = 0.0  # spent in the optimizer's update so far: not a part of what is compared
        self.gradient: dict[str, Tensor] | None = None  # kept of the next step, where asked for
        self.keep_gradient = False
        self.metrics: dict[str, float] = {}
        update = self.trainer.optimizer.update

        def timed(step: int, norm: float) -> None:
            began = time.perf_counter()
            if self.keep_gradient:
                self.gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            update(step, norm)
            self.optimizer_s += time.perf_counter() - began

        self.trainer.optimizer.update = timed

    def __call__(self) -> float:
        self.trainer.step = 0  # the same batch again
        step = self.trainer.train_step(self.batch)
        assert step.skipped is None, step.skipped
        self.metrics = step.metrics
        return step.metrics["loss"]


class Padded:
    """What trainers without packing do: one row per completion, prompts padded on the left and completions on the right to the longest.

    Logits only where a completion token is predicted, as TRL does (`logits_to_keep`); the attention is transformers' own ("sdpa").
    """

    def __init__(self, model: nn.Module, batch: Batch, threads: int):
        self.model, self.threads = model, threads
        rollouts = [r for g in batch.groups for r in g.rollouts]
        longest_prompt = max(r.prompt_length for r in rollouts)
        self.longest = max(len(r.token_ids) - r.prompt_length for r in rollouts)
        self.ids = torch.zeros(len(rollouts), longest_prompt + self.longest, dtype=torch.int64)
        self.attention_mask = torch.zeros_like(self.ids)
        for row, r in enumerate(rollouts):
            start = longest_prompt - r.prompt_length
            self.ids[row, start : start + len(r.token_ids)] = torch.from_numpy(r.token_ids.astype(np.int64))
            self.attention_mask[row, start : start + len(r.token_ids)] = 1
        self.completion = self.attention_mask[:, longest_prompt:].bool()
        self.sampler_logprob, self.advantage = _token_arrays(batch)

    def logprob(self) -> Tensor:
        """[N], rollout after rollout."""
        logits = self.model(
            input_ids=self.ids, attention_mask=self.attention_mask, logits_to_keep=self.longest + 1, use_cache=False
        ).logits[:, :-1]
        targets = self.ids[:, -self.longest :]
        return -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")[self.completion.flatten()]

    def __call__(self) -> float:
        torch.set_num_threads(self.threads)
        self.model.zero_grad()
        loss = policy_loss(self.logprob(), self.sampler_logprob, self.advantage)
        loss.backward()
        return loss.item()


class Bare:
    """The least that trains the same useful tokens: a packed forward pass, logits where they are needed, loss, backward.

    Layout, indices and advantages are made beforehand, outside what is timed; no chunks, no statistics, no checks.
    """

    def __init__(self, model: nn.Module, batch: Batch, threads: int):
        self.model, self.threads = model, threads
        ids: list[np.ndarray] = []
        segments: list[Segment] = []
        needed: list[int] = []  # packed positions whose logits are needed: each prompt's last, all but the last of each completion
        row: list[int] = []  # which of them predicts each token
        targets: list[np.ndarray] = []
        at = 0
        for group in batch.groups:
            length = group.rollouts[0].prompt_length
            ids.append(group.rollouts[0].token_ids[:length])
            segments.append(Segment(at, length))
            parent, shared = len(segments) - 1, len(needed)
            at += length
            needed.append(at - 1)
            for rollout in group.rollouts:
                completion = rollout.token_ids[length:]
                targets.append(completion)
                row += [shared, *range(len(needed), len(needed) + len(completion) - 1)]
                needed += range(at, at + len(completion) - 1)
                ids.append(completion[:-1])  # nothing is predicted from the last token
                segments.append(Segment(at, len(completion) - 1, parent))
                at += len(completion) - 1
        self.ids = torch.from_numpy(np.concatenate(ids).astype(np.int64))[None]
        self.layout = PackedLayout(tuple(segments))
        self.positions = self.layout.position_ids()
        self.needed, self.row = torch.tensor(needed), torch.tensor(row)
        self.targets = torch.from_numpy(np.concatenate(targets).astype(np.int64))
        self.sampler_logprob, self.advantage = _token_arrays(batch)

    def logprob(self) -> Tensor:
        """[N], rollout after rollout."""
        hidden = self.model.model(input_ids=self.ids, position_ids=self.positions, layout=self.layout, use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden[0].index_select(0, self.needed))
        return logits.log_softmax(-1)[self.row, self.targets]

    def __call__(self) -> float:
        torch.set_num_threads(self.threads)
        self.model.zero_grad()
        loss = policy_loss(self.logprob(), self.sampler_logprob, self.advantage)
        loss.backward()
        return loss.item()


def padded_twin(model: nn.Module) -> nn.Module:
    """The same weights with transformers' own attention."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("sdpa")
    return twin.eval()


def gradient_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """2-norm of the difference of two whole gradients, over that of the second."""
    assert found.keys() == expected.keys(), "different parameters have a gradient"
    apart = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    return (apart / sum(float(g.double().square().sum()) for g in expected.values())) ** 0.5
