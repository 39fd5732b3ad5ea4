"""Random tiny models, requests, and a driver for the embedded engine; plain transformers forwards as the reference."""

from __future__ import annotations

import copy

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.protocols import Generation
from slipstream.types import Frame, GenerateRequest, Purpose, Sampling, StopReason

VOCABULARY = 97
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # transformers' 0.02 makes near-uniform logits, in which an error would hide
}
# Windows of 8 bind in every test sequence.
ARCHITECTURES: dict[str, dict] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
    },
    "mistral": {"sliding_window": 8},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256, "initializer_range": 0.3},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "gpt_oss": {"head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None},
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny_model(kind: str = "llama", seed: int = 0, **overrides):
    """A random model of this architecture, as transformers makes it."""
    sizes = {} if kind == "gpt2" else _SIZES
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, **{**sizes, **_SPECIAL, **ARCHITECTURES.get(kind, {}), **overrides})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def plain(model):
    """An unmodified copy: same weights, transformers' own eager attention."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


def change_weights(model, seed: int = 1) -> None:
    """As a weight sync does: the model's own tensors are overwritten."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def replay(old, new, ids: list[int], num_old: int, start: int) -> torch.Tensor:
    """Logprobs of ids[start:] where the first `num_old` positions' keys and values are the old weights', the rest the new ones'."""
    cache = DynamicCache(config=old.config)
    out = []
    with torch.no_grad():
        for at, token in enumerate(ids[:-1]):
            model = old if at < num_old else new
            logits = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]
            if at + 1 >= start:
                out.append(logits.log_softmax(-1)[ids[at + 1]])
    return torch.stack(out)


def make_engine(model, *, version: int = 0, slots: int = 8, max_context: int = 128, **options) -> EmbeddedEngine:
    engine = EmbeddedEngine(model, decode, slots=slots, max_context=max_context, **options)
    if version >= 0:
        engine.set_version(1, version, f"sum-{version}")
    return engine


def decode(ids: list[int]) -> str:
    """Token 10 is "a", 11 "b", ...; others are dots."""
    return "".join(chr(ord("a") + i - 10) if 10 <= i < 36 else "." for i in ids)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).astype(np.int32)


def request(group: int, sample: int, ids: np.ndarray, new: int = 8, *, temperature: float = 1.0, **fields) -> GenerateRequest:
    sampling = Sampling(temperature=temperature, max_new_tokens=new, stop_strings=fields.pop("stop_strings", ()))
    defaults = {
        "attempt": 0,
        "turn": 0,
        "purpose": Purpose.TRAIN,
        "prompt_length": len(ids),
        "num_sampled": 0,
        "sampling": sampling,
        "stop_token_ids": (),
    }
    return GenerateRequest(group_id=group, sample=sample, token_ids=ids, **{**defaults, **fields})


class Driver:
    """Submits, ticks, and sorts frames into generations."""

    def __init__(self, engine: EmbeddedEngine):
        self.engine = engine
        self.generations: dict[int, Generation] = {}
        self.requests: dict[int, GenerateRequest] = {}
        self.num_prefill_tokens = 0

    @property
    def num_running(self) -> int:
        """Sequences in slots of the live weights."""
        return len(self.engine._live.running)

    def submit(self, *requests: GenerateRequest) -> list[int]:
        handles = [self.engine.submit(r) for r in requests]
        for handle, r in zip(handles, requests, strict=True):
            self.requests[handle] = r
            self.generations[handle] = Generation(len(r.token_ids))
        return handles

    def tick(self) -> Frame:
        frame = self.engine.tick()
        self.num_prefill_tokens += frame.num_prefill_tokens
        for handle, *version in frame.prefilled:
            self.generations[handle].prefill_version = tuple(version)
        kept_sets = frame.kept or (b"",) * len(frame.handles)
        rows = zip(frame.handles.tolist(), frame.token_ids.tolist(), frame.logprobs.tolist(), kept_sets, strict=True)
        for handle, token, logprob, kept in rows:
            self.generations[handle].append(token, logprob, frame.incarnation, frame.version, frame.engine_id, kept)
        for handle, routing in frame.routing.items():
            self.generations[handle].routing = routing
        for handle, reason in frame.finished:
            self.generations[handle].stop_reason = StopReason(reason)
        return frame

    def drain(self, limit: int = 500) -> None:
        for _ in range(limit):
            if not self.engine.has_work():
                return
            self.tick()
        raise AssertionError(f"still at work after {limit} ticks")

    def ids(self, handle: int) -> list[int]:
        return self.requests[handle].token_ids.tolist() + self.generations[handle].token_ids

    def gap(self, handle: int, reference, temperature: float = 1.0) -> float:
        """Largest difference of the generation's logprobs from a plain forward of the whole sequence."""
        generation = self.generations[handle]
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([self.ids(handle)]), use_cache=False).logits[0, generation.start - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        return float((expected - torch.tensor(generation.logprobs)).abs().max())


def run(engine: EmbeddedEngine, *requests: GenerateRequest) -> list[Generation]:
    driver = Driver(engine)
    handles = driver.submit(*requests)
    driver.drain()
    return [driver.generations[h] for h in handles]
