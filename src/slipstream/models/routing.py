"""Which experts a mixture of experts chooses for each token: recorded in one forward pass, replayed in another.

A router scores all experts for a token and takes the k best by one `torch.topk`; what it makes of their scores (softmax before or after,
normalised or not) is its own. So that call alone is answered here: `record` keeps the experts it names; `replay` names recorded ones
instead, with the scores that the router gives them now. The weights of the experts then are what this very model makes of this very
choice, and the gradient flows through them as through a choice of its own.

Shapes: T = tokens of a pass, row after row as the model flattens them; M = routers, in layer order; E = experts, k = chosen per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slipstream.errors import ModelError
from slipstream.models.head import base_model
from slipstream.models.layout import PackedLayout, Segment
from slipstream.types import NOT_ROUTED

_ROUTERS = ("Router", "Gate", "Gating")  # how the names of such modules end in transformers


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model: what `record` and `replay` work on."""

    modules: tuple[nn.Module, ...]
    num_experts: int  # E
    top_k: int  # k

    @property
    def width(self) -> int:
        """Experts per token, M * k."""
        return len(self.modules) * self.top_k

    @property
    def dtype(self) -> torch.dtype:
        """The smallest that holds every expert's number and NOT_ROUTED."""
        return torch.int8 if self.num_experts <= 128 else torch.int16


def kept_routers(model: nn.Module, keep: bool | None) -> Routers | None:
    """The routers whose choices this run records and replays (`rollout.keep_routing`); None where there are none.

    ModelError where routing is to be kept and cannot be: the model is dense, or chooses its experts in another way.
    """
    if keep:
        check_has_experts(model)
    return None if keep is False else find_routers(model)


def check_has_experts(model: nn.Module) -> None:
    """ModelError for a dense model; it may be without weights, on the meta device."""
    if not _has_experts(model):
        raise ModelError(f"rollout.keep_routing = true, but {type(model).__name__} has no experts to route to; leave the setting out")


def find_routers(model: nn.Module) -> Routers | None:
    """The routers of a model with slipstream's attention, proved by a forward pass of two tokens; None for a dense model.

    ModelError where experts are not chosen by one top-k over all of them (group-limited choices, sampled ones).
    """
    if not _has_experts(model):
        return None
    body, kind = base_model(model), type(model).__name__
    modules = tuple(m for m in body.modules() if type(m).__name__.endswith(_ROUTERS))
    shapes: list[tuple[int, int]] = []  # (E, k) of each router

    def note(layer: int, scores: torch.Tensor, own: torch.return_types.topk) -> torch.return_types.topk:
        shapes.append((scores.shape[-1], own.indices.shape[-1]))
        return own

    layout = PackedLayout((Segment(0, 2),))
    device = next(body.parameters()).device
    with torch.no_grad(), _answering(modules, note):
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
        body(input_ids=tokens, position_ids=layout.position_ids(device), layout=layout, use_cache=False)
    if not modules or len(shapes) != len(modules) or len(set(shapes)) > 1:
        raise _cannot(f"{kind} has experts, and {len(modules)} routers that choose (k of E) {[f'{k} of {e}' for e, k in shapes]}")
    return Routers(modules, *shapes[0])


def _has_experts(model: nn.Module) -> bool:
    return any(type(module).__name__.endswith("Experts") for module in model.modules())


class Recording:
    """What the routers chose in a pass."""

    def __init__(self, routers: Routers):
        self._dtype = routers.dtype
        self._chosen: list[torch.Tensor | None] = [None] * len(routers.modules)

    def note(self, layer: int, scores: torch.Tensor, own: torch.return_types.topk) -> torch.return_types.topk:
        self._chosen[layer] = own.indices
        return own

    @property
    def experts(self) -> torch.Tensor:
        """[T, M * k] in `Routers.dtype`: a token's experts layer after layer, in the order that the router named them."""
        chosen = [c for c in self._chosen if c is not None]
        assert len(chosen) == len(self._chosen), "the pass left routers out"
        return torch.cat(chosen, dim=1).to(self._dtype)


@contextmanager
def record(routers: Routers) -> Iterator[Recording]:
    """Keep what the routers choose in the forward pass made within."""
    recording = Recording(routers)
    with _answering(routers.modules, recording.note):
        yield recording


class Replay:
    """Recorded choices in place of the routers' own, and how often these would have differed."""

    def __init__(self, experts: torch.Tensor):
        self._experts = experts  # [T, M, k]
        self._known = experts[..., 0] != NOT_ROUTED  # [T, M]
        self._compared: set[int] = set()
        self._different = torch.zeros((), dtype=torch.int64, device=experts.device)

    @property
    def num_choices(self) -> int:
        """Choices of a router for a token in the pass, recorded or not."""
        return self._known.numel()

    @property
    def num_recorded(self) -> int:
        return int(self._known.sum())

    @property
    def num_different(self) -> int:
        """Recorded choices in whose place the router's own would have been another set of experts."""
        return int(self._different)

    def answer(self, layer: int, scores: torch.Tensor, own: torch.return_types.topk) -> torch.return_types.topk:
        known, recorded = self._known[:, layer, None], self._experts[:, layer].long()
        indices = torch.where(known, recorded, own.indices)
        if layer not in self._compared:  # gradient checkpointing asks a second time
            self._compared.add(layer)
            self._different += (indices.sort(dim=-1).values != own.indices.sort(dim=-1).values).any(dim=-1).sum()
        return torch.return_types.topk((scores.gather(-1, indices), indices))


@contextmanager
def replay(routers: Routers, experts: torch.Tensor) -> Iterator[Replay]:
    """Have the routers choose `experts` [T, M * k], a token's in layer order (NOT_ROUTED throughout: they choose for themselves).

    Keep it open for the backward pass as well: gradient checkpointing calls the routers again there.
    """
    if experts.shape[1:] != (routers.width,):
        raise ValueError(
            f"the recorded experts have shape {tuple(experts.shape)}; the model's routers choose {routers.width} for each token"
        )
    replayed = Replay(experts.unflatten(1, (len(routers.modules), routers.top_k)))
    with _answering(routers.modules, replayed.answer):
        yield replayed


# ---- between a router and its topk -------------------------------------------------------------------------------------------

_Answer = Callable[[int, torch.Tensor, Any], Any]  # (layer, scores [T, E], what topk gives) -> what the router gets


@contextmanager
def _answering(modules: tuple[nn.Module, ...], answer: _Answer) -> Iterator[None]:
    """Let `answer` stand between each router and its topk.

    Held by the modules, not by a context variable or by the thread: the backward pass may call a router from a thread of its own.
    """
    before = [vars(module).get("forward") for module in modules]
    for layer, module in enumerate(modules):
        module.forward = partial(_forward, module.forward, type(module).__name__, partial(answer, layer))
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _forward(forward: Callable[..., Any], name: str, answer: Callable[[torch.Tensor, Any], Any], *args: Any, **kwargs: Any) -> Any:
    """A router's forward, its one topk answered."""
    with _TopK(name, answer) as calls:
        out = forward(*args, **kwargs)
    if not calls.num_answered:
        raise _cannot(f"{name} never calls topk")
    return out


class _TopK(TorchFunctionMode):
    """While active, `answer` has the last word on what `topk` gives."""

    def __init__(self, name: str, answer: Callable[[torch.Tensor, Any], Any]):
        super().__init__()
        self._name, self._answer = name, answer
        self.num_answered = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        own = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk):
            return own
        scores = args[0] if args else kwargs["input"]
        if self.num_answered or scores.ndim != 2:
            raise _cannot(f"{self._name} calls topk more than once, or over groups of experts")
        self.num_answered += 1
        return self._answer(scores, own)


def _cannot(reason: str) -> ModelError:
    return ModelError(
        f"routing can be kept only where each router chooses its experts by one topk over all of them, alike in every layer; {reason}. "
        "Set rollout.keep_routing = false to train without: the trainer then routes by itself"
    )
