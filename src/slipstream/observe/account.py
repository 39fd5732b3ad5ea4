"""Where every group of a run went, and what its time and tokens were spent on: the account that `slipstream inspect` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from slipstream.controller.metrics_line import dropping_bias, staleness_stats
from slipstream.controller.state import RunState
from slipstream.observe.grid import grid
from slipstream.observe.state import duration, number, percent
from slipstream.observe.summary import ratio
from slipstream.types import GroupStatus

BAR_WIDTH = 30  # characters of the longest bar


def account(state: RunState) -> dict[str, Any]:
    """The account as one JSON-able object. `groups.lost` is what no place explains: it is 0 (promise 1)."""
    totals = state.totals
    running = sum(g.status is GroupStatus.RUNNING for g in state.live.values())
    groups: dict[str, Any] = {
        "drawn": state.next_draw,
        "trained": totals.trained_groups,
        "filtered": totals.filtered,
        "dropped": dict(totals.dropped),
        "batched": state.pulled,
        "finished": state.num_finished,
        "running": running,
    }
    placed = totals.trained_groups + totals.filtered + sum(totals.dropped.values()) + state.pulled + state.num_finished + running
    groups["lost"] = state.next_draw - placed
    return {
        "incarnation": state.incarnation,
        "steps": state.step,
        "checkpoints": [point.step for point in state.checkpoints],
        "groups": groups,
        "staleness_tokens": {str(k): totals.staleness[k] for k in sorted(totals.staleness)},
        **staleness_stats(totals.staleness),
        "trained_samples": totals.trained_samples,
        "rollouts_with_several_versions": totals.several_versions,
        "tokens": {
            "generated": totals.generated_tokens,
            "trained": totals.trained_tokens,
            "masked_stale": totals.masked_tokens,
            "down_weighted": totals.down_weighted_tokens,
            "wasted": dict(+totals.wasted_tokens),  # without what a resume took out again
        },
        **dropping_bias(totals),
        "failures": dict(totals.failures),
        "skipped_steps": totals.skipped_steps,
        "idle": {
            "active_s": totals.active_s,
            "trainer_active_s": totals.trainer_active_s,
            "trainer_wait_s": totals.trainer_wait_s,
            "rollout_gate_closed_s": totals.rollout_idle_s,
            "evaluation_s": state.evaluations.engine_s,
        },
        "evaluations": [
            {"version": e.version, "incarnation": e.incarnation, "reward": e.reward, "failed": e.num_failed, "duration_s": e.duration_s}
            for e in state.evaluations.results
        ],
        "evaluations_skipped": state.evaluations.num_skipped,
    }


def print_account(account: dict[str, Any], console: Console) -> None:
    """The same for people: groups, staleness, tokens, idle time, evaluations."""
    _heading(console, "groups")
    console.print(_groups(account["groups"]))
    _heading(console, "staleness of trained tokens")
    staleness = {f"{k} version{'' if k == '1' else 's'}": v for k, v in account["staleness_tokens"].items()}
    console.print(bars(staleness) if staleness else "no step yet")
    if staleness:
        console.print(
            f"mean {number(account['staleness_mean'], 2)}, p99 {account['staleness_p99']}, max {account['staleness_max']}; "
            f"rollouts with several versions: {account['rollouts_with_several_versions']} of {account['trained_samples']} trained"
        )
    _heading(console, "tokens")
    console.print(_tokens(account["tokens"]))
    if account.get("stale_dropped_rollouts"):
        _heading(console, "dropped because too stale, running ones with their tokens so far")
        console.print(_bias(account))
    if account["failures"]:
        _heading(console, "failed attempts by cause")
        console.print(bars(account["failures"]))
    _heading(console, "time")
    console.print(_time(account["idle"]))
    _heading(console, "evaluations")
    console.print(_evaluations(account) if account["evaluations"] else "none")


def bars(counts: dict[str, float]) -> Text:
    """One line per key: name, count, share, bar."""
    rows = []
    total, longest = sum(counts.values()), max(counts.values())
    for name, count in counts.items():
        width = 0 if longest == 0 else max(1 if count else 0, round(BAR_WIDTH * count / longest))
        rows.append([name, number(count, 0), percent(ratio(count, total)), Text("█" * width, style="cyan")])
    return grid(rows, right=(1, 2))


def _groups(groups: dict[str, Any]) -> Text:
    dropped = groups["dropped"]
    rows = {
        "trained": groups["trained"],
        "filtered": groups["filtered"],
        **{f"dropped ({reason})": count for reason, count in dropped.items()},
        "in a batch": groups["batched"],
        "finished, in the buffer": groups["finished"],
        "running": groups["running"],
    }
    lines: list[list[Text | str]] = [[name, number(count, 0)] for name, count in rows.items() if count or name == "trained"]
    verdict = "each is accounted for" if groups["lost"] == 0 else f"{groups['lost']} ARE NOT ACCOUNTED FOR: the ledger is damaged"
    lines.append(["drawn", number(groups["drawn"], 0), Text(verdict, style="dim" if groups["lost"] == 0 else "bold red")])
    return grid(lines, right=(1,))


def _tokens(tokens: dict[str, Any]) -> Text:
    rows: dict[str, float] = {"trained": tokens["trained"]}
    if tokens["masked_stale"]:
        rows["masked: too stale"] = tokens["masked_stale"]
    rows |= {f"wasted: {cause}": count for cause, count in tokens["wasted"].items()}
    rest = tokens["generated"] - sum(rows.values())
    if rest > 0:
        rows["in the buffer, or not trained"] = rest
    return bars(rows)


def _bias(account: dict[str, Any]) -> Text:
    """Dropping is biased: what is late is longer, and may be rewarded otherwise."""
    lines: list[list[Text | str]] = [["", Text("dropped", style="dim"), Text("trained", style="dim")]]
    lines.append(["rollouts", number(account["stale_dropped_rollouts"], 0), number(account["trained_samples"], 0)])
    for name, key in (("mean length in tokens", "tokens_mean"), ("mean reward", "reward_mean")):
        lines.append([name, number(account[f"stale_dropped_{key}"], 2), number(account[f"stale_trained_{key}"], 2)])
    return grid(lines, right=(1, 2))


def _time(idle: dict[str, float]) -> Text:
    rows = [
        ("trainer waited for a batch", idle["trainer_wait_s"], idle["trainer_active_s"]),
        ("rollout: free slots, gate closed", idle["rollout_gate_closed_s"], idle["active_s"]),
        ("engine on evaluations", idle["evaluation_s"], idle["active_s"]),
    ]
    lines = [[name, f"{number(seconds, 1)} s", percent(ratio(seconds, whole))] for name, seconds, whole in rows]
    return grid([*lines, ["first admission to last step", duration(idle["active_s"])]])


def _evaluations(account: dict[str, Any]) -> Text:
    lines = []
    for e in account["evaluations"]:
        failed = f"{e['failed']} failed" if e["failed"] else ""
        lines.append([f"version {e['version']}", f"reward {number(e['reward'])}", f"{number(e['duration_s'], 1)} s", failed])
    if account["evaluations_skipped"]:
        lines.append([f"{account['evaluations_skipped']} skipped"])
    return grid(lines)


def _heading(console: Console, text: str) -> None:
    console.print(Text(f"\n{text}", style="bold"))
