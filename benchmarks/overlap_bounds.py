"""How soon a run can end at best, from the very lengths that are generated. Times in seconds, steps counted from 0.

P groups of G rollouts per batch, N engine slots, a training step of T seconds, S = max_staleness, W = window (None: unbounded).
L[g, i]: seconds that rollout i of group g needs in a slot of its own. e[b]: when step b ends; 0 for b < 0.

Three bounds, each below what any scheduler can do that keeps the rules it is derived from:

    rates       neither side can be faster than itself: all slots full from the first second, and one step after the other
                    max( P-th soonest of all groups + n T,  sum of all L / N + T )            a group takes max_i L[g, i] at least
    staleness   S and W as `controller/admission.py` has them, and N slots. Group g is admitted once step floor(g/P) - S - 1 has ended,
                    r[g] = e[floor(g/P) - S - 1] + max_i L[g, i]                              its end at the soonest, with a slot for each
                step b starts when
                    step b - 1 has ended
                    groups 0 .. (b+1)P - W have:         >= max of their r                    nobody else can be trained in their place
                    (b+1)P of the first (b+1)P + W - 1:  >= the (b+1)P-th smallest of their r
                    the work since any earlier admission fits: >= e[j - S - 1] + sum of L[jP .. (b+1)P - W] / N     for every j <= b
    sync        the same for S = 0, W = 1: a batch is generated, then trained

A scheduler that knew every length ahead could come near to them: it would start the longest rollouts first. One that does not know them
cannot fill the slots of the last stragglers, so there is a gap that nobody can close where a batch is many times the slots and S is 1.
"""

from __future__ import annotations

import numpy as np


def rates_bound(lengths: np.ndarray, groups_per_step: int, slots: int, step_s: float) -> float:
    """Seconds. `lengths`: [groups, G]; whole batches."""
    num_steps = len(lengths) // groups_per_step
    first = np.sort(lengths.max(axis=1))[groups_per_step - 1]
    return float(max(first + num_steps * step_s, lengths.sum() / slots + step_s))


def staleness_bound(lengths: np.ndarray, groups_per_step: int, slots: int, step_s: float, max_staleness: int, window: int) -> float:
    """Seconds. `lengths` as above."""
    P, S, W = groups_per_step, max_staleness, window
    num_steps = len(lengths) // P
    longest = lengths.max(axis=1)  # [groups]
    work = np.concatenate([[0.0], np.cumsum(lengths.sum(axis=1))]) / slots  # [groups + 1] seconds of all slots, before each group
    ready = np.empty(len(lengths))  # r
    ends: list[float] = []

    def confirmed(step: int) -> float:
        return ends[step] if step >= 0 else 0.0

    spare = -np.inf  # over j: e[j - S - 1] - work before batch j
    for b in range(num_steps):
        mine = slice(b * P, (b + 1) * P)
        admitted = confirmed(b - S - 1)
        ready[mine] = admitted + longest[mine]
        spare = max(spare, admitted - work[b * P])
        last = max(0, (b + 1) * P - W + 1)  # the groups before this one must be ready
        later = np.arange((b + 1) * P, min((b + 1) * P + W - 1, len(lengths)))  # these may pass, where they are admitted before step b
        later = later[later // P - S - 1 < b]
        passing = [confirmed(g // P - S - 1) + longest[g] for g in later.tolist()]
        candidates = np.sort(np.concatenate([ready[: (b + 1) * P], passing]))
        start = max(
            ends[-1] if ends else 0.0,
            ready[:last].max(initial=0.0),
            candidates[(b + 1) * P - 1],
            spare + work[last],
        )
        ends.append(start + step_s)
    return float(ends[-1])
