"""What a step says about itself: statistics of its tokens, over all of them and per version lag ("lag/<n>/<name>").

π is the trainer's model before the first update of the step, μ the weights that sampled. Sums are kept per lag, with their counts, so no
mean of means can occur. Quantiles are of all tokens of the step at once, sorted once. N = trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from slipstream.trainer.losses import log_ratio
from slipstream.trainer.packing import MicroBatch
from slipstream.trainer.token_table import PrefixKV

MAX_LAG = 8  # the last bucket is "8+"
QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99, "ratio_max": 1.0}


class Diagnostics:
    """Accumulates over the forward passes and updates of one step. `masked`: staleness -> sampled tokens that are not trained."""

    def __init__(self, masked: Mapping[int, int]):
        self._masked = _per_lag(np.array(list(masked.keys()), dtype=np.int64), np.array(list(masked.values()), dtype=np.float64))
        self._before: dict[str, list[np.ndarray]] = {}  # columns, one array [N] per micro-batch
        self._updates: dict[str, list[np.ndarray]] = {}  # the same, of every pass over the batch
        self._routing = np.zeros(3)  # choices of a router for a token: all, those recorded, those where the model's own differs
        self._applied: list[tuple[float, float]] = []  # (loss, gradient norm) of each update that was made

    @torch.no_grad()
    def before(self, m: MicroBatch, start_logprob: torch.Tensor, entropy: torch.Tensor, distances: Mapping[str, torch.Tensor]) -> None:
        """A micro-batch under the weights before the first update; `distances` [N] from other models are reported as they are named."""
        columns = {
            "lag": m.staleness.clamp(max=MAX_LAG),
            "log_ratio": log_ratio(start_logprob, m.sampler_logprob),
            "gap": (start_logprob - m.sampler_logprob).abs(),
            "prefix_kv": m.prefix_kv,
            "entropy": entropy,
            **distances,
        }
        _append(self._before, columns)

    @torch.no_grad()
    def pass_over(self, m: MicroBatch, cut: torch.Tensor, rejected: torch.Tensor) -> None:
        """One of the step's passes: tokens [N] whose gradient the policy loss cut off, tokens that have no weight in it."""
        _append(self._updates, {"lag": m.staleness.clamp(max=MAX_LAG), "clipped": cut, "rejected": rejected})

    def routing(self, choices: int, recorded: int, different: int) -> None:
        """Of a micro-batch's first pass: choices of a router for a token, those recorded, and of these those it would not have made."""
        self._routing += (choices, recorded, different)

    def update(self, loss: float, norm: float, applied: bool) -> None:
        """One optimizer update, made or skipped."""
        if applied:
            self._applied.append((loss, norm))

    def metrics(self) -> dict[str, float]:
        """A mean over no tokens is left out: `logprob_gap` where nothing was fresh, say. Loss and norm are means over the updates made."""
        out: dict[str, float] = {}
        if self._applied:
            out["loss"], out["grad_norm"] = (float(np.mean(values)) for values in zip(*self._applied, strict=True))
        out["updates"] = float(len(self._applied))
        choices, recorded, different = self._routing.tolist()
        if choices:
            out["routing_recorded_fraction"] = recorded / choices
        if recorded:
            out["router_disagreement"] = different / recorded
        if not self._before:
            return out
        before = {name: np.concatenate(parts) for name, parts in self._before.items()}
        for name in before.keys() - {"lag", "log_ratio", "gap", "prefix_kv"}:
            out[name] = float(before[name].mean(dtype=np.float64))
        fresh, kept = (before["gap"][before["prefix_kv"] == kind] for kind in (PrefixKV.FRESH, PrefixKV.KEPT))
        if len(fresh):
            out["logprob_gap"], out["logprob_gap_max"] = float(fresh.mean(dtype=np.float64)), float(fresh.max())
        if len(kept):
            out["kept_kv_gap"] = float(kept.mean(dtype=np.float64))
        sums = self._sums(before)
        out |= _statistics({name: float(values.sum()) for name, values in sums.items()}) | _quantiles(before["log_ratio"])
        for lag, name, chosen in _lags(sums["tokens"] + self._masked, before["lag"], before["log_ratio"]):
            of_lag = {key: float(values[lag]) for key, values in sums.items()}
            line = {"tokens": of_lag["tokens"]} | _statistics(of_lag) | _quantiles(chosen)
            line.pop("ratio_mean", None)
            out |= {f"lag/{name}/{key}": value for key, value in line.items()}
        return out

    def _sums(self, before: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """float64[MAX_LAG + 1] each."""
        log_r, lag = before["log_ratio"].astype(np.float64), before["lag"]
        ratio = np.exp(log_r)
        updates = {name: np.concatenate(parts) for name, parts in self._updates.items()}
        return {
            "tokens": _per_lag(lag),
            "ratio": _per_lag(lag, ratio),
            "square": _per_lag(lag, ratio * ratio),
            "k1": _per_lag(lag, -log_r),
            "k3": _per_lag(lag, ratio - 1 - log_r),
            "visits": _per_lag(updates["lag"]),
            "clipped": _per_lag(updates["lag"], updates["clipped"]),
            "rejected": _per_lag(updates["lag"], updates["rejected"]),
            "masked": self._masked,
        }


def _statistics(sums: Mapping[str, float]) -> dict[str, float]:
    """The means that these sums make; those over no token are left out."""
    tokens, visits, masked = sums["tokens"], sums["visits"], sums["masked"]
    if not tokens:
        return {"masked_fraction": 1.0}
    rejected = tokens * sums["rejected"] / visits if visits else 0.0
    return {
        "ratio_mean": sums["ratio"] / tokens,
        "kl_k1": sums["k1"] / tokens,  # KL(μ‖π) estimated from tokens of μ: log(μ/π)
        "kl_k3": sums["k3"] / tokens,  # the same, never negative (Schulman 2020, "Approximating KL divergence")
        "ess_fraction": sums["ratio"] ** 2 / (tokens * sums["square"]),  # effective sample size (Kish 1965) of weights π/μ, per token
        "clipped_fraction": sums["clipped"] / visits if visits else 0.0,
        "masked_fraction": (rejected + masked) / (tokens + masked),
    }


def _quantiles(log_r: np.ndarray) -> dict[str, float]:
    if not len(log_r):
        return {}
    ascending = np.sort(log_r)
    return {name: float(np.exp(ascending[round(q * (len(ascending) - 1))])) for name, q in QUANTILES.items()}


def _lags(count: np.ndarray, lag: np.ndarray, log_r: np.ndarray) -> Iterator[tuple[int, str, np.ndarray]]:
    """(lag, its name, log ratios of its tokens) for each lag that occurs, masked tokens included."""
    order = np.argsort(lag, kind="stable")
    ends = np.searchsorted(lag[order], np.arange(MAX_LAG + 2))
    for each in np.flatnonzero(count).tolist():
        yield each, f"{each}+" if each == MAX_LAG else str(each), log_r[order[ends[each] : ends[each + 1]]]


def _per_lag(lag: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
    """float64[MAX_LAG + 1]: the sums of `values`, or how many there are."""
    return np.bincount(np.minimum(lag, MAX_LAG), weights=values, minlength=MAX_LAG + 1).astype(np.float64)


def _append(columns: dict[str, list[np.ndarray]], new: Mapping[str, torch.Tensor]) -> None:
    for name, values in new.items():
        columns.setdefault(name, []).append(values.float().cpu().numpy() if values.is_floating_point() else values.cpu().numpy())
