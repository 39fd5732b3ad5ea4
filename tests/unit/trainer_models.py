"""Tiny random models and made-up batches for the trainer's tests, and the naive computation that packing is held against."""

from __future__ import annotations

import copy

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.config.settings import Config
from slipstream.models.attention import attach
from slipstream.types import Batch, Draw, Group, Rollout, Sampling, Span, Turn

VOCABULARY = 61
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
# Windows of 8 bind in every test sequence; an embedding scale away from 0 keeps tiny gradients out of rounding noise.
ARCHITECTURES: dict[str, dict] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 8},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}


def tiny_model(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides):
    """A random model of this architecture, attached to slipstream's attention."""
    sizes = {} if kind == "gpt2" else _SIZES
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **{"vocab_size": VOCABULARY, **sizes, **special, **ARCHITECTURES.get(kind, {}), **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)  # transformers' 0.02 makes near-uniform logits, in which an error would hide
    model = model.to(dtype).eval()
    attach(model)
    return model


def config(**tables) -> Config:
    return Config(**tables)


def make_rollout(rng: np.random.Generator, group_id: int, sample: int, prompt: np.ndarray, length: int, version: int, **fields) -> Rollout:
    """A rollout of `length` sampled tokens, one in six of them masked (as tool output is), the last one trained."""
    sampled = rng.integers(3, VOCABULARY, length).astype(np.int32)
    total = len(prompt) + length
    mask = np.zeros(total, dtype=bool)
    mask[len(prompt) :] = rng.random(length) > 1 / 6
    mask[-1] = True
    logprobs = np.zeros(total, dtype=np.float32)
    logprobs[len(prompt) :] = -rng.uniform(2.0, 6.0, length)
    made = {
        "group_id": group_id,
        "sample": sample,
        "prompt_length": len(prompt),
        "token_ids": np.concatenate([prompt, sampled]).astype(np.int32),
        "logprobs": logprobs,
        "loss_mask": mask,
        "reward": float(rng.random()),
        "spans": (Span(len(prompt), total, 1, version, "e0"),),
        "turns": (Turn(start=len(prompt), end=total, role="assistant", sampling=Sampling(temperature=1.0)),),
    }
    return Rollout(**{**made, **fields})


def make_group(rollouts: list[Rollout]) -> Group:
    number = rollouts[0].group_id
    return Group(group_id=number, draw=Draw(number=number, row=number, epoch=0, dataset="d"), row={}, rollouts=tuple(rollouts))


def make_batch(
    step: int = 0, groups: int = 2, samples: int = 3, seed: int = 0, version: int | None = None, temperature: float = 1.0
) -> Batch:
    """Groups with prompts of 9..14 tokens and completions of 1..12 tokens, all deterministic in the arguments."""
    rng = np.random.default_rng([seed, step])
    made = []
    for g in range(groups):
        prompt = rng.integers(3, VOCABULARY, int(rng.integers(9, 15))).astype(np.int32)
        rollouts = []
        for s in range(samples):
            length = 1 if s == 0 and g == 0 else int(rng.integers(2, 13))
            total = len(prompt) + length
            turn = Turn(start=len(prompt), end=total, role="assistant", sampling=Sampling(temperature=temperature))
            version_of = step if version is None else version
            rollouts.append(make_rollout(rng, step * groups + g, s, prompt, length, version_of, turns=(turn,)))
        made.append(make_group(rollouts))
    return batch_of(step, made)


def batch_of(step: int, groups: list[Group]) -> Batch:
    tokens = sum(int(r.loss_mask.sum()) for g in groups for r in g.rollouts)
    return Batch(step=step, groups=tuple(groups), num_loss_tokens=tokens)


def plain_logprobs(model, rollout: Rollout, temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of the trained tokens, one sequence per row, by transformers alone (its eager attention)."""
    ids = torch.from_numpy(rollout.token_ids.astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0].float() / temperature
    targets = torch.from_numpy(np.flatnonzero(rollout.loss_mask))
    return logits.log_softmax(-1)[targets - 1, ids[0, targets]]


def eager_twin(model):
    """The same weights in a model that uses transformers' own eager attention and no part of slipstream."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin.eval()


def gradient(model) -> torch.Tensor:
    """The whole gradient as one float64 vector."""
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
