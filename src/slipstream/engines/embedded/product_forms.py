"""Forms of a matrix product of few rows on a CPU, and which of them an engine computes in. `products.py` says what for.

`nn.Linear` computes x W^T, with the few rows of x as the long side of MKL's tiles, and brings the weight into the library's own layout in
every call. Here are two families that do better, each with a plain form and one of weights that are kept in a library's layout:

    Mkl       turned: (W x^T)^T, the weight's rows as the long side; packed: float32 alone, in bfloat16 MKL's packed form gains nothing
    OneDnn    oneDNN's linear layer, of the weight as it is or packed; float32 and bfloat16

Plain and packed give the same bits, which is checked here for every shape; the two families do not. So which one is taken goes by who made
the processor, and not by a stopwatch: a run repeated on the same kind of machine gives the same bits. MKL is Intel's library, and on
AMD's processors its packed form is slower than none:

    all products of a decode pass of SmolLM2-135M, two threads, ms          nn.Linear   turned   MKL packed   oneDNN   oneDNN packed
    AMD EPYC (Zen 4, AVX-512), float32,   4 rows                            62          25       67           33       23
                                          8                                 56          40       69           40       29
                                         32                                 89          77       103          67       54
                               bfloat16, 32                                 39          34                    38       29

    a decode pass as a whole, Intel Xeon (AVX-512, MKL 2024.2), float32     packed 1.4x as fast as turned with 4 and 8 rows, 1.2x with
                                                                            16 and 32; turned 1.1x to 2.0x nn.Linear with 32 rows

Turned, a row's sums do not depend on the number of rows from 2 rows on, and oneDNN's neither (`nn.Linear`: from 16 on, and in bfloat16
never), so that decode passes need less padding: see `probe.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream import processor

_EXPANDS = 2  # more than so many times as many outputs as inputs: what follows is elementwise, and then a contracting layer
_ROWS_HINT = 32  # about a decode pass


class Form(Protocol):
    """How products are computed: plainly, and from packed weights."""

    rows: range  # numbers of rows for which a packed weight may give the same bits
    checked_rows: tuple[int, ...]  # that stand for all of those: kernels change at multiples of small powers of two

    def packs(self, dtype: torch.dtype) -> bool: ...

    def pack(self, weight: Tensor) -> Tensor: ...

    def plain(self, rows: Tensor, linear: nn.Linear) -> Tensor:
        """[rows, K] -> [rows, N]."""
        ...

    def packed(self, rows: Tensor, weight: Tensor, linear: nn.Linear) -> Tensor:
        """The same, from the packed weight."""
        ...


class Mkl:
    """torch's own operators of the packed form, which its compiler uses for frozen weights. With fewer rows, or more, its kernels are
    others, with other sums."""

    rows = range(4, 49)
    checked_rows = (4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48)

    @staticmethod
    def available() -> bool:
        return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")

    def packs(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32 and self.available()

    def pack(self, weight: Tensor) -> Tensor:
        return torch.ops.mkl._mkl_reorder_linear_weight(weight.detach(), _ROWS_HINT)

    def plain(self, rows: Tensor, linear: nn.Linear) -> Tensor:
        """Where the layer expands, what comes out is the transpose of a contiguous tensor: turning it over costs as much as is won, and the
        next product wants it as it is."""
        out = torch.mm(linear.weight, rows.t())  # [N, rows]
        if linear.bias is not None:
            out += linear.bias[:, None]
        out = out.t()
        return out.contiguous() if linear.out_features <= _EXPANDS * linear.in_features else out

    def packed(self, rows: Tensor, weight: Tensor, linear: nn.Linear) -> Tensor:
        """The last argument says that the form suits this number of rows; else torch computes from the plain weight. Given a bias it would
        begin its sums with that, and round otherwise than `plain`."""
        out = torch.ops.mkl._mkl_linear(rows, weight, linear.weight, None, len(rows))
        return out if linear.bias is None else out.add_(linear.bias)


class OneDnn:
    """torch's operators of oneDNN's linear layer, as its compiler uses them. One row alone has a kernel of its own."""

    rows = range(2, 257)
    checked_rows = (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 127, 128, 129, 255, 256)

    @staticmethod
    def available() -> bool:
        return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    def packs(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def pack(self, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)

    def plain(self, rows: Tensor, linear: nn.Linear) -> Tensor:
        if not self.packs(rows.dtype):
            return F.linear(rows, linear.weight, linear.bias)
        return self.packed(rows.contiguous(), linear.weight, linear)

    def packed(self, rows: Tensor, weight: Tensor, linear: nn.Linear) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, weight, linear.bias, "none", [], "")


@cache
def form() -> Form:
    """The one of this machine."""
    return OneDnn() if processor.vendor() == processor.AMD and OneDnn.available() else Mkl()


@cache
def same_bits(form: Form, outputs: int, inputs: int, dtype: torch.dtype, threads: int) -> bool:
    """Whether plain and packed give the same bits here for a weight of this shape, with so many threads. MKL's do not with many inputs."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False, dtype=dtype)  # leaves torch's own generator alone
    linear.requires_grad_(False)
    linear.weight.copy_(torch.randn(outputs, inputs, generator=generator))
    packed = form.pack(linear.weight)
    rows = torch.randn(max(form.checked_rows), inputs, generator=generator).to(dtype)
    return all(torch.equal(form.packed(rows[:n], packed, linear), form.plain(rows[:n], linear)) for n in form.checked_rows)
