"""What a step says about itself: token statistics, summed over micro-batches.

Each metric is kept as (sum, count) so that no mean of means can occur; N = trained tokens of a micro-batch.
"""

from __future__ import annotations

import torch

from slipstream.trainer import losses


class Diagnostics:
    """Accumulates over the micro-batches of one step."""

    def __init__(self, preset: losses.Preset):
        self._preset = preset
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._ratio_max = 0.0
        self.loss = 0.0

    @torch.no_grad()
    def add(
        self,
        loss: torch.Tensor,  # this micro-batch's share of the loss
        logprob: torch.Tensor,  # [N], and so all below
        sampler_logprob: torch.Tensor,
        entropy: torch.Tensor,
        advantage: torch.Tensor,
        staleness: torch.Tensor,
    ) -> None:
        self.loss += float(loss)
        log_ratio = losses.log_ratio(logprob, sampler_logprob)
        ratio = log_ratio.exp()
        clipped = losses.is_clipped(ratio, advantage, self._preset.clip_low, self._preset.clip_high)
        self._mean("entropy", entropy)
        self._mean("ratio_mean", ratio)
        self._mean("clipped_fraction", clipped.float())
        self._mean("kl_k1", -log_ratio)  # KL(μ‖π) estimated from tokens of μ: log(μ/π)
        self._mean("kl_k3", ratio - 1 - log_ratio)  # the same, never negative (Schulman 2020, "Approximating KL divergence")
        self._mean("logprob_gap", (logprob - sampler_logprob).abs()[staleness == 0])
        self._ratio_max = max(self._ratio_max, float(ratio.max()))

    def _mean(self, name: str, values: torch.Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(values.sum())
        self._counts[name] = self._counts.get(name, 0) + len(values)

    def metrics(self) -> dict[str, float]:
        """Means over all tokens of the step; a mean over no tokens is left out (`logprob_gap` where nothing was fresh)."""
        means = {name: self._sums[name] / count for name, count in self._counts.items() if count}
        return {"loss": self.loss, "ratio_max": self._ratio_max, **means}
