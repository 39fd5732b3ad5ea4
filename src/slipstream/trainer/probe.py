"""The trainer's side of the weight probe (`weight_sync.probe`): its own logprobs of the fixed tokens, sent with each version."""

from __future__ import annotations

import msgspec
import torch
from torch import nn

from slipstream.models.head import base_model, head_logits
from slipstream.models.layout import PackedLayout, Segment
from slipstream.models.support import num_embeddings
from slipstream.protocols import Manifest
from slipstream.weight_sync.ends import Publisher
from slipstream.weight_sync.probe import NUM_TOKENS, probe_tokens


class ProbedPublisher(Publisher):
    """A publisher whose manifests carry the probe. One forward pass over 64 tokens per version."""

    def __init__(self, publisher: Publisher, model: nn.Module):
        self._publisher, self._model = publisher, model

    def pack(self, slot: int, incarnation: int, version: int) -> Manifest:
        manifest = self._publisher.pack(slot, incarnation, version)
        return msgspec.structs.replace(manifest, probe=probe_logprobs(self._model))

    def close(self) -> None:
        self._publisher.close()


@torch.no_grad()
def probe_logprobs(model: nn.Module) -> tuple[float, ...]:
    """Logprobs of the probe's tokens after the first, by a model with slipstream's attention."""
    device = next(model.parameters()).device
    tokens = torch.from_numpy(probe_tokens(num_embeddings(model))).to(device)
    layout = PackedLayout((Segment(0, NUM_TOKENS),))
    body = base_model(model)(input_ids=tokens[None], position_ids=layout.position_ids(device), layout=layout, use_cache=False)
    logprobs = torch.log_softmax(head_logits(model, body.last_hidden_state[0, :-1]).float(), dim=-1)
    return tuple(logprobs.gather(1, tokens[1:, None])[:, 0].tolist())
