"""AdamW with schedule, clipping, float32 master weights for bfloat16 models, and updates that are skipped whole when not finite.

Gradients are accumulated in float32: in the parameter's own `.grad` for a float32 model, else in the master copy, by a hook that moves
each bfloat16 gradient as soon as it is made. So neither a sum over micro-batches nor a small update is lost to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from slipstream.config.settings import TrainerSettings

STATE_NAMES = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps per parameter


def learning_rate(settings: TrainerSettings, step: int) -> float:
    """The learning rate of batch `step` (from 0): linear warm-up, then constant, linear or cosine to 0 at `steps`. Pure.

    >>> settings = TrainerSettings(steps=10, learning_rate=1.0, warmup_steps=2, schedule="linear")
    >>> [learning_rate(settings, step) for step in (0, 1, 2, 6)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    if settings.schedule == "linear":
        return settings.learning_rate * max(0.0, 1 - done)
    if settings.schedule == "cosine":
        return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return settings.learning_rate


class Optimizer:
    """AdamW over a model's trained parameters, each once (tied ones are one). Matrices are decayed; biases and norms are not."""

    def __init__(self, model: nn.Module, settings: TrainerSettings):
        self._settings = settings
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters: dict[str, torch.Tensor] = {}  # float32, what AdamW updates; the parameter itself where it is float32
        for name, parameter in self._parameters.items():
            self._masters[name] = parameter if parameter.dtype == torch.float32 else self._make_master(parameter)
        matrices = [p for p in self._masters.values() if p.ndim >= 2]
        others = [p for p in self._masters.values() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        fused = all(p.device.type in ("cpu", "cuda", "mps") for p in self._masters.values())  # one pass over memory
        self._adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=settings.betas, fused=fused)

    @staticmethod
    def _make_master(parameter: nn.Parameter) -> torch.Tensor:
        master = parameter.detach().float().requires_grad_()

        def move_gradient(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            gradient, parameter.grad = parameter.grad.float(), None
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

        parameter.register_post_accumulate_grad_hook(move_gradient)
        return master

    def zero_grad(self) -> None:
        for master in self._masters.values():
            master.grad = None

    def gradient_norm(self) -> float:
        """2-norm of the whole accumulated gradient; not finite where any of it is not."""
        gradients = [m.grad.flatten() for m in self._masters.values() if m.grad is not None]
        # A dot product has all threads and keeps its sums apart: half the time of torch's norm on two threads, and at 28 million entries an
        # error of 5e-6 instead of 3e-4.
        return math.sqrt(float(torch.stack([torch.dot(g, g) for g in gradients]).double().sum())) if gradients else 0.0

    def update(self, step: int, norm: float) -> None:
        """Clip by the norm just measured and update the weights with the learning rate of batch `step`."""
        if norm > self._settings.max_grad_norm:
            for master in self._masters.values():
                if master.grad is not None:
                    master.grad.mul_(self._settings.max_grad_norm / norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(self._settings, step)
        self._adamw.step()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])  # round to nearest, once per update

    # ---- state: a flat table of tensors, "<parameter>.<what>"

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Everything an exact continuation needs besides the weights: moments, update counts, float32 masters."""
        out: dict[str, torch.Tensor] = {}
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                out[f"{name}.master"] = master.detach()
            for kind in STATE_NAMES:
                if master in self._adamw.state:
                    out[f"{name}.{kind}"] = self._adamw.state[master][kind]
        return out

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Continue from `state_tensors`. The model's own weights are loaded apart. KeyError names a missing tensor."""
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                master.copy_(tensors[f"{name}.master"])
            self._adamw.state.pop(master, None)
            if f"{name}.exp_avg" in tensors:  # absent before the first update
                state = {kind: tensors[f"{name}.{kind}"].clone() for kind in STATE_NAMES}
                self._adamw.state[master] = {kind: value.to(master.device) for kind, value in state.items()}
