"""NF4: the linear layers of a base rounded to 4 bits as the model is loaded, for an adapter to lie on (QLoRA). Made by bitsandbytes.

    W  ──►  a code of 4 bits each; for every 64 of them a scale, itself in 8 bits  ──►  W', in the model's dtype: what is computed with

Every role rounds (`round_layers`), so every role has the same base, on CPUs bit for bit; only the trainer keeps the codes and makes W' for
each product anew. Rounding is done on the CPU, wherever the model computes, and once: rounding W' again would move it.

Not bitsandbytes' own `Linear4bit`: with a model in eval mode and no gradient, on a CPU that has bfloat16 instructions, it packs its weights
for a bfloat16 kernel, computes float32 with it as well, and from then on silently gives no gradient.

Source: Dettmers et al. 2023, arXiv:2305.14314.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from slipstream.errors import ModelError
from slipstream.system_memory import give_back_freed_memory
from slipstream.tensors import LazyTensors, Made, outline

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 64  # codes that share a scale

# It says so at its import, by peft or by us, of a kernel that nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda r: not str(r.msg).startswith("Failed to load CPU gemm_4bit_forward"))


class Nf4:
    """A matrix in 4 bits. Nobody writes it, so copies of what holds it share it."""

    def __init__(self, weight: Tensor):
        try:
            from bitsandbytes import functional  # seconds of imports that only a quantised base waits for
        except ImportError as error:
            raise ModelError(f"model.quantize needs bitsandbytes: {error}; use pip install 'slipstream[qlora]'") from error
        self._functional = functional
        self.codes, self._scales = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
        self.outline = outline(weight.shape, weight.dtype)

    def values(self) -> Tensor:
        """W' [outputs, inputs], made anew."""
        return self._functional.dequantize_4bit(self.codes, self._scales)

    @property
    def nbytes(self) -> int:
        """Of codes and scales; the two tables of values are the same for all matrices."""
        assert self._scales.state2 is not None, "the scales are quantised, too"
        return self.codes.nbytes + self._scales.absmax.nbytes + self._scales.state2.absmax.nbytes

    def to(self, device: torch.device) -> Nf4:
        """Itself, moved there."""
        self.codes = self.codes.to(device)
        self._scales.to(device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Nf4:
        return self


class Nf4Linear(nn.Linear):
    """`nn.Linear` that holds its frozen weight in 4 bits: the same outputs and gradients of its inputs as over W' held whole."""

    def __init__(self, linear: nn.Linear, matrix: Nf4):
        nn.Module.__init__(self)  # makes no weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.matrix = matrix
        self.train(linear.training)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """W', made anew: for those who look at a layer's weight, as peft does."""
        return self.matrix.values()

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self.matrix, self.bias)  # pyright: ignore[reportReturnType]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.matrix.codes  # what is there; `base_tensors` gives the values
        super()._save_to_state_dict(destination, prefix, keep_vars)


class _Product(torch.autograd.Function):
    """x W'^T + bias. The backward pass makes W' again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Nf4, bias: Tensor | None) -> Tensor:
        ctx.matrix = matrix
        return F.linear(x, matrix.values(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] @ ctx.matrix.values(), None, None


@torch.no_grad()
def round_layers(model: PreTrainedModel, codes_on: torch.device | None = None) -> None:
    """Round the linear layers of a model that is still on the CPU, one after the other. ModelError where it has none, or no such device can
    make weights of codes.

    They hold W', or with a device for `codes_on` their codes there.
    """
    if codes_on is not None and codes_on.type not in ("cpu", "cuda"):
        raise ModelError(
            f"model.quantize: bitsandbytes makes weights of codes on CPUs and CUDA devices, not on {codes_on.type}; set trainer.device"
        )
    sharing: dict[int, list[str]] = {}  # by their tensor, which is rounded once
    for name in rounded_layers(model):
        sharing.setdefault(id(model.get_submodule(name).weight), []).append(name)
    for names in sharing.values():
        weight = model.get_parameter(f"{names[0]}.weight")
        matrix = Nf4(weight)
        if codes_on is None:
            weight.copy_(matrix.values())
            continue
        matrix.to(codes_on)
        for name in names:
            model.set_submodule(name, Nf4Linear(model.get_submodule(name), matrix))  # pyright: ignore[reportArgumentType]
        give_back_freed_memory()  # each layer's codes come to lie in what the one before had for its sums, and split it
    if codes_on is not None:
        for parameter in model.parameters():  # the last ones to hold the file that they were mapped from
            parameter.data = parameter.data.clone()


def rounded_layers(model: PreTrainedModel) -> list[str]:
    """The names of the layers that `model.quantize` is about, in the model's order. ModelError where there are none."""
    kept = {id(module.weight) for module in (model.get_output_embeddings(), model.get_input_embeddings()) if module is not None}
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = [name for name, module in linear if isinstance(module, Nf4Linear) or id(module.weight) not in kept]
    if not found:
        transposed = any(isinstance(module, Conv1D) for module in model.modules())
        reason = "are Conv1D, which hold their weights transposed" if transposed else "are none"
        raise ModelError(
            f'model.quantize = "nf4" rounds nn.Linear layers, and those of {type(model).__name__} beside its head {reason}; leave it out'
        )
    return found


def num_rounded(model: PreTrainedModel) -> int:
    """Parameters that `model.quantize` rounds; the model may be without weights, on the meta device. ModelError as `rounded_layers`."""
    weights = [model.get_parameter(f"{name}.weight") for name in rounded_layers(model)]
    return sum({id(weight): weight.numel() for weight in weights}.values())


def check_saved(model: PreTrainedModel, modules_to_save: Sequence[str]) -> None:
    """ModelError for a module that is to be trained whole and is, or holds, a rounded layer."""
    for name in rounded_layers(model):
        for saved in modules_to_save:
            if f".{saved}." in f".{name}.":
                raise ModelError(
                    f'lora.modules_to_save: "{saved}" would train {name} whole, which model.quantize rounds to 4 bits; name it in '
                    "lora.targets, or leave model.quantize out"
                )


def base_tensors(model: nn.Module) -> LazyTensors:
    """The model's `state_dict()` by the values that it computes with: of layers in 4 bits W', made when it is asked for."""
    entries: dict[str, Tensor | Made] = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, Nf4Linear):
            entries[f"{name}.weight"] = Made(module.matrix.outline, module.matrix.values)
    return LazyTensors(entries)
