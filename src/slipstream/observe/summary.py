"""What a run came to, in numbers: the object that `train --json` prints last and `Result.metrics` holds.

Every total is read from the ledger's fold (`controller/state.py`), so it counts the whole run, resumed or not, and never twice.
"""

from __future__ import annotations

from typing import Any

from slipstream.config.arithmetic import staleness_bound, staleness_limit
from slipstream.config.settings import Config
from slipstream.controller.metrics_line import dropping_bias, staleness_stats
from slipstream.controller.state import RunState


def summarize(state: RunState, config: Config, run_folder: str, wall_s: float) -> dict[str, Any]:
    """The summary of the run in `state`. None is "not applicable": no evaluation, no step yet.

    `wall_s`: command to summary. Rates count from the first admission to the last optimizer step; trainer idle is waiting for a batch
    after the first arrived, rollout idle is the share of engine slots left free behind a closed gate, the evaluation fraction is the
    engine's time on evaluation passes; fractions are of the time that the rates count.
    """
    totals, evaluations, staleness = state.totals, state.evaluations, staleness_stats(state.totals.staleness)
    evaluated = ratio(evaluations.engine_s, totals.active_s)
    rewards = [result.reward for result in evaluations.results]
    at_start = [result.reward for result in evaluations.results if result.version == 0]
    return {
        "run_folder": run_folder,
        "run_name": config.run.name,
        "incarnation": state.incarnation,
        "steps": state.step,
        "steps_planned": config.trainer.steps,
        "model_version": state.step,
        "eval_reward_first": at_start[0] if at_start else None,  # of the start weights, and of no other version
        "eval_reward_last": rewards[-1] if rewards else None,
        "evaluations": len(rewards),
        "evaluations_skipped": evaluations.num_skipped,
        "trained_groups": totals.trained_groups,
        "trained_samples": totals.trained_samples,
        "trained_samples_per_s": ratio(totals.trained_samples, totals.active_s),
        "trained_tokens_per_s": ratio(totals.trained_tokens, totals.active_s),
        "generated_tokens_per_s": ratio(totals.generated_tokens, totals.active_s),
        "trainer_idle_fraction": ratio(totals.trainer_wait_s, totals.trainer_active_s),
        "rollout_idle_fraction": ratio(totals.rollout_idle_s, totals.active_s),
        "evaluation_fraction": None if evaluated is None else min(1.0, evaluated),  # the last one runs after the time that is counted
        "staleness_mean": staleness["staleness_mean"],
        "staleness_max": staleness["staleness_max"],
        "staleness_limit": staleness_limit(config),
        "staleness_bound": staleness_bound(config),
        "rollouts_with_several_versions": totals.several_versions,
        "masked_stale_tokens": totals.masked_tokens,
        "down_weighted_tokens": totals.down_weighted_tokens,
        **dropping_bias(totals),
        "skipped_steps": totals.skipped_steps,
        "filtered_groups": totals.filtered,
        "dropped_groups": sum(totals.dropped.values()),
        "generated_tokens": totals.generated_tokens,
        "wasted_tokens": sum(totals.wasted_tokens.values()),  # by cause: `slipstream inspect`
        "wall_s": wall_s,
    }


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
