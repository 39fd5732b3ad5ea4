"""The linear layers of a model in the forms that a CPU's library is fast at (`product_forms.py`): weights packed beside the plain ones.

Packing all layers takes as long as two to five passes over them, anew for every version of the weights. So each pass packs an eighth of
them, until all are: the price is spread, and a version that is soon replaced has not cost more than it gained.

A packed weight gives the bits that the plain one gives. That is checked for every shape of weight when one is packed first, and where it
does not hold, or with numbers of rows for which it may not, the plain one stays. So nothing depends on when a weight was packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from slipstream.engines.embedded import product_forms

_PASSES = 8  # over which packing is spread
PACKED_BYTES = 2 << 30  # a model whose linear layers are larger is not packed: it would take as much memory again

_packs: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weight -> (its packed form, its version counter then), for all models that share it


class Products:
    """The linear layers of a model. Only within `fast` do they compute as said above; the model itself stays as it is.

    A layer whose `forward` somebody has replaced computes as that one says. Whoever overwrites weights calls `forget`; those in `frozen`
    are never overwritten.
    """

    def __init__(self, model: nn.Module, frozen: Iterable[Tensor] = ()):
        linears = [m for m in model.modules() if type(m) is nn.Linear] if next(model.parameters()).device.type == "cpu" else []
        self._packing = packing = _Packing([m.weight for m in linears], frozen)
        self._forwards: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = [(m, partial(_forward, packing, m)) for m in linears]

    def forget(self) -> None:
        """The weights are others now."""
        self._packing.forget()

    @contextmanager
    def fast(self) -> Iterator[None]:
        """One pass, or a part of one."""
        self._packing.start_pass()
        plain = [(module, forward) for module, forward in self._forwards if "forward" not in module.__dict__]
        for module, forward in plain:
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module, _ in plain:
                del module.__dict__["forward"]


class _Packing:
    """Which weights are packed. The packed forms themselves are kept by weight, so that models which share one share its form."""

    def __init__(self, weights: Sequence[Tensor], frozen: Iterable[Tensor]):
        self.form = product_forms.form()
        kept = {id(weight) for weight in frozen}
        self._overwritten = [weight for weight in weights if id(weight) not in kept]
        num_bytes = sum(weight.nbytes for weight in {id(w): w for w in weights}.values() if self.form.packs(weight.dtype))
        self.on = 0 < num_bytes <= PACKED_BYTES
        self._per_pass = num_bytes / _PASSES
        self._left = 0.0  # bytes that this pass may still pack

    def start_pass(self) -> None:
        self._left = self._per_pass

    def forget(self) -> None:
        for weight in self._overwritten:
            _packs.pop(weight, None)

    def packed(self, weight: Tensor) -> Tensor | None:
        """The weight's packed form, made now where this pass has room for it. None where it has not."""
        packed, counter = _packs.get(weight, (None, 0))
        if packed is not None and counter == weight._version:
            return packed
        wanted = self.on and self._left > 0 and self.form.packs(weight.dtype)
        if not wanted or not product_forms.same_bits(self.form, *weight.shape, weight.dtype, torch.get_num_threads()):
            return None
        self._left -= weight.nbytes
        packed = self.form.pack(weight)
        _packs[weight] = packed, weight._version
        return packed


def _forward(packing: _Packing, linear: nn.Linear, x: Tensor) -> Tensor:
    """x [..., K] -> [..., N]."""
    rows, form = x.reshape(-1, x.shape[-1]), packing.form
    if packing.on:
        rows = rows.contiguous()  # whatever form the layer before had: a product of columns may sum in another order
    packed = packing.packed(linear.weight) if len(rows) in form.rows else None
    out = form.plain(rows, linear) if packed is None else form.packed(rows, packed, linear)
    return out.view(*x.shape[:-1], -1)
