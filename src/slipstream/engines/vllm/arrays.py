"""What a vLLM server tells of tokens beside their logprobs: which experts they were routed to, and what truncated sampling kept.

    what                where it comes from                                                               when
    routed experts      `routed_experts`: .npy in base64, [tokens - 1, layers, k], prompt included        in a stream's last chunk
    kept vocabulary     `top_logprobs`: those entries that are not -inf, if any are                       with each token
                        `sampling_mask`, where the server makes that: the ids themselves                  with each token

Which of it a server gives depends on how it was started, and on which of vLLM's model runners it has; `slipstream_about` says.

Shapes: n = tokens routed, M = layers that have experts, k = experts per token, V = vocabulary.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.errors import ConfigError, RunFailed
from slipstream.sampling_mask import encode_kept

CUT_OFF = -9998.0  # logprobs below are the server's stand-in (-9999) for -inf and NaN


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of a server's model, as `slipstream_about` tells them."""

    layers: tuple[int, ...]  # those that have experts, M of them
    num_layers: int  # all
    num_experts: int
    top_k: int  # k

    @property
    def bytes_per_token(self) -> int:
        """Of the server's answer, at most: two bytes an expert, in base64."""
        return self.num_layers * self.top_k * 2 * 4 // 3 + 1

    def read(self, text: str | None, num_tokens: int) -> np.ndarray:
        """int8 or int16 [num_tokens, M * k]: the experts of a sequence's first tokens. RunFailed for what is not that."""
        if text is None:
            raise RunFailed("the server ended a generation without telling where it routed the tokens (routed_experts)")
        try:
            told = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
        except (binascii.Error, ValueError, EOFError, OSError) as error:
            raise RunFailed(f"the server's routed_experts are no array: {error}") from error
        expected = (num_tokens, self.num_layers, self.top_k)
        if told.dtype.kind not in "iu" or told.shape[1:] != expected[1:] or told.ndim != 3 or len(told) < num_tokens:
            raise RunFailed(f"the server's routed_experts are {told.dtype} {told.shape}; at least integers {expected} were due")
        chosen = told[:num_tokens, list(self.layers)].reshape(num_tokens, -1)
        if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.num_experts:
            raise RunFailed(f"the server names expert {int(chosen.max())} of {self.num_experts}")
        return chosen.astype(np.int8 if self.num_experts <= 128 else np.int16)


@dataclass(frozen=True, slots=True)
class Wants:
    """What a run wants to be told."""

    keep_routing: bool | None  # None: where the server tells it
    top_k: int  # 0: sampling is not truncated
    vocab_size: int
    samples_evaluations: bool  # there are evaluations, at a temperature


@dataclass(frozen=True, slots=True)
class Tells:
    """What a server tells."""

    routing: Routing | None = None
    masks: bool = False  # `sampling_mask` with every token; it then refuses greedy requests, and those without a top-k
    max_logprobs: int = 20  # of a token: so many it names at most; vLLM's default


NOTHING_TOLD = Tells()


def num_logprobs(top_k: int, vocab_size: int) -> int:
    """How many to ask for at first, to see all that top-k kept; 0 where nothing is cut: of the sampled token alone.

    vLLM keeps every token that is as likely as the k-th. In bfloat16 that is 2 or 3 more at k = 50, at most 19 (SmolLM2-135M, 1024 tokens).
    """
    return min(top_k + top_k // 2 + 16, vocab_size) if top_k else 0


def what_it_tells(about: Mapping[str, Any], wants: Wants, where: str) -> Tells:
    """What the server of which `slipstream_about` said this tells a run that wants that. ConfigError where it will not do."""
    given, masks = about["routing"], bool(about["sampling_mask"])
    if wants.keep_routing and given is None:
        raise ConfigError(
            f"rollout.keep_routing = true, but {where} does not tell which experts a token was routed to: start it with "
            "--enable-return-routed-experts, which vLLM's model runner V2 for GPUs knows, or leave keep_routing out: the trainer then "
            "routes by itself"
        )
    if masks and (not wants.top_k or wants.samples_evaluations):
        raise ConfigError(
            f"{where} runs with --return-sampling-mask, and so refuses sampling without a top-k: set rollout.top_k and "
            "evaluation.temperature = 0, or start it without (slipstream reads what top-k kept from logprobs, too)"
        )
    max_logprobs = wants.vocab_size if about["max_logprobs"] < 0 else about["max_logprobs"]  # -1: all
    needed = num_logprobs(wants.top_k, wants.vocab_size)
    if not masks and max_logprobs < needed:
        raise ConfigError(
            f"rollout.top_k = {wants.top_k}: what was kept is read from {needed} logprobs of each token, at times from more, but {where} "
            f"names {max_logprobs}; start it with --max-logprobs {wants.vocab_size}"
        )
    routing = None if given is None or wants.keep_routing is False else Routing(**given | {"layers": tuple(given["layers"])})
    return Tells(routing, masks, max_logprobs)


def kept_sets(choice: Mapping[str, Any], tokens: list[int], tells: Tells, vocab_size: int) -> list[bytes | None]:
    """What truncated sampling kept for each of a chunk's tokens (`sampling_mask.encode_kept`). RunFailed where the server does not tell.

    None: every token that the server named was kept, so there may be more, as likely as the last of them.
    """
    if tells.masks:
        told: list[list[int] | None] = choice.get("sampling_mask") or []
    else:
        told = [_not_cut(entry["top_logprobs"], vocab_size) for entry in choice["logprobs"]["content"]]
    if len(told) != len(tokens):
        raise RunFailed(f"the server told what sampling kept for {len(told)} of {len(tokens)} tokens (sampling_mask)")
    return [None if kept is None else _encoded(kept, token, vocab_size) for kept, token in zip(told, tokens, strict=True)]


def _not_cut(entries: list[Mapping[str, Any]], vocab_size: int) -> list[int] | None:
    kept = [entry["token_id"] for entry in entries if entry["logprob"] > CUT_OFF]
    return None if len(kept) == len(entries) < vocab_size else kept


def _encoded(kept: list[int], token: int, vocab_size: int) -> bytes:
    ids = np.unique(np.array(kept, dtype=np.int64))
    if not len(ids) or ids[0] < 0 or ids[-1] >= vocab_size or token not in kept:
        raise RunFailed(
            f"the server sampled token {token}, and says that {len(ids)} of {vocab_size} tokens were kept: it is not among them, or they "
            f"are not all in the vocabulary: {ids[:20].tolist()}"
        )
    return encode_kept(ids, vocab_size)
