"""Matrix products of few rows on a CPU, in the forms that its library is fast at.

`nn.Linear` computes x W^T, with the few rows of x as the long side of the library's tiles, and brings the weight into the library's own
layout in every call. Two forms here do better, with the same sums:

    turned    (W x^T)^T: the weight's rows as the long side
    packed    the weight kept in the library's layout beside the plain one; float32 with MKL alone, in bfloat16 it gains nothing

Measured on a Xeon (AVX-512, MKL 2024.2), SmolLM2-135M, a decode pass as a whole, turned / packed: 1.4x with 4 and 8 rows, 1.2x with 16 and
32, with one thread and with two; turned alone is 1.1x to 2.0x `nn.Linear` by layer with 32 rows. Packing all layers takes as
long as four or five passes over them, anew for every version of the weights. So each pass packs an eighth of them, until all are: the price
is spread, and a version that is soon replaced has not cost more than it gained.

Turned, a row's sums do not depend on the number of rows from 2 rows on (`nn.Linear`: from 16 on, and in bfloat16 never), so that decode
passes need less padding: see `probe.py`. Packed gives the same bits with 4 to 48 rows, where both take rows in one piece. That is checked
for every shape of weight when one is packed first; where it does not hold (with many inputs), and with other numbers of rows, turned stays.
So nothing depends on when a weight was packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_EXPANDS = 2  # more than so many times as many outputs as inputs: what follows is elementwise, and then a contracting layer
_PASSES = 8  # over which packing is spread
_PACKED_ROWS = range(4, 49)  # of a packed product; with fewer or more its kernels are others, with other sums
_CHECKED_ROWS = (4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48)  # kernels change at multiples of small powers of two
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
        kept = {id(weight) for weight in frozen}
        self._overwritten = [weight for weight in weights if id(weight) not in kept]
        num_bytes = sum(weight.nbytes for weight in {id(w): w for w in weights}.values() if weight.dtype == torch.float32)
        self.on = 0 < num_bytes <= PACKED_BYTES and _can_pack()
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
        wanted = self.on and self._left > 0 and weight.dtype == torch.float32
        if not wanted or not _same_bits(*weight.shape, torch.get_num_threads()):
            return None
        self._left -= weight.nbytes
        packed = _pack(weight)
        _packs[weight] = packed, weight._version
        return packed


def _forward(packing: _Packing, linear: nn.Linear, x: Tensor) -> Tensor:
    """x [..., K] -> [..., N]."""
    rows = x.reshape(-1, x.shape[-1])
    if packing.on:
        rows = rows.contiguous()  # whatever form the layer before had: a product of columns may sum in another order
    packed = packing.packed(linear.weight) if len(rows) in _PACKED_ROWS else None
    out = _turned(rows, linear) if packed is None else _multiply(rows, packed, linear)
    return out.view(*x.shape[:-1], -1)


def _turned(rows: Tensor, linear: nn.Linear) -> Tensor:
    """[rows, K] -> [rows, N]. Where the layer expands, what comes out is the transpose of a contiguous tensor: turning it over costs as
    much as is won, and the next product wants it as it is."""
    out = torch.mm(linear.weight, rows.t())  # [N, rows]
    if linear.bias is not None:
        out += linear.bias[:, None]
    out = out.t()
    return out.contiguous() if linear.out_features <= _EXPANDS * linear.in_features else out


# ---- MKL's packed form: torch's own operators, which its compiler uses for frozen weights -----------------------------------------


def _can_pack() -> bool:
    return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkl._mkl_reorder_linear_weight(weight.detach(), 32)  # rows: a hint, about a decode pass


def _multiply(rows: Tensor, packed: Tensor, linear: nn.Linear) -> Tensor:
    """[rows, K] -> [rows, N]. The last argument says that the form suits this number of rows; else torch computes from the plain weight.
    Given a bias it would begin its sums with that, and round otherwise than `_turned`."""
    out = torch.ops.mkl._mkl_linear(rows, packed, linear.weight, None, len(rows))
    return out if linear.bias is None else out.add_(linear.bias)


@cache
def _same_bits(outputs: int, inputs: int, threads: int) -> bool:
    """Whether both forms give the same bits here for a weight of this shape, with so many threads. With many inputs they do not."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False).requires_grad_(False)  # leaves torch's own generator alone
    linear.weight.copy_(torch.randn(outputs, inputs, generator=generator))
    packed = _pack(linear.weight)
    rows = torch.randn(max(_CHECKED_ROWS), inputs, generator=generator)
    return all(torch.equal(_multiply(rows[:n], packed, linear), _turned(rows[:n], linear)) for n in _CHECKED_ROWS)
