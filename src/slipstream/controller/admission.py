"""The arithmetic of admission: how many groups may be in flight, on which weights they may run, which may be pulled, how stale they get.

S = max_staleness, P = fresh groups per batch (constant in a run), W = window (None: unbounded), T = batches finished, and for one group
a = the groups ahead of it that must train first (pulled but not finished, or unpulled and earlier in order).

Why the bound holds. A group that is handed out when T batches are finished and a groups are ahead of it gets no token older than its
permit T + floor(a/P) - S. With W = 1 groups are pulled in order, so it trains at step T + floor(a/P) at the latest: filtered or
dropped groups ahead only bring it forward, and a retried one keeps its place. With the anchored window at most W - 1 later groups can
pass the oldest unpulled one, and the same W - 1 pass every group behind it; it then trains at step T + floor((a + W - 1)/P) at the
latest. Staleness is at most the difference

    S + floor((a + W - 1)/P) - floor(a/P)  <=  S + ceil((W - 1)/P),

with equality for some a. For S = 0 the gate closes as soon as one batch is admitted, so nothing younger can pass: 0 for every W.

Why it needs no global barrier. A slot is given back only when *every* engine in service has confirmed a version that contains the
group's batch, so in normal running a < (S+1)P minus the groups trained but not confirmed, and every engine already meets the permit of
what the gate lets through. After a restart or a resume the permit alone holds back exactly what has to wait.

Weights that are published only every k steps: the batches since the newest version, at most k - 1, hold their slots, so
a < (S+1-(k-1))P = (S+2-k)P groups can be in flight on it. That is one batch at least, and the permits are met, exactly if k <= S + 1.

Without a window (ready first) any finished group may be pulled, so a group may wait for ever and no worst case exists. Only the pulled
groups must train before it: the permit is then the version that could be trained in bound by the next batch, T + floor(pulled/P) - S,
and the slots are a number that is set.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence


def num_slots(max_staleness: int, groups_per_step: int) -> int:
    """Groups in flight at most: (S+1) P.

    >>> num_slots(1, 4)
    8
    """
    return (max_staleness + 1) * groups_per_step


def default_window(max_staleness: int, groups_per_step: int) -> int:
    """floor(0.3 (S+1) P), at least 1; 1 for S = 0, where nothing can pass.

    >>> default_window(1, 4), default_window(0, 64), default_window(3, 8)
    (2, 1, 9)
    """
    return 1 if max_staleness == 0 else max(1, 3 * num_slots(max_staleness, groups_per_step) // 10)


def clipped_window(window: int | None, max_staleness: int, groups_per_step: int) -> int | None:
    """The window under a lower `max_staleness`: at most the new slots, 1 for S = 0; unbounded stays so while there is anything to reorder.

    >>> clipped_window(8, 1, 3), clipped_window(2, 1, 3), clipped_window(8, 0, 3), clipped_window(None, 1, 3), clipped_window(None, 0, 3)
    (6, 2, 1, None, 1)
    """
    if max_staleness == 0:
        return 1
    return None if window is None else min(window, num_slots(max_staleness, groups_per_step))


def worst_staleness(max_staleness: int, groups_per_step: int, window: int | None) -> int | None:
    """The oldest any token can be when it is trained: 0 for S = 0, else S + ceil((W-1)/P); no smaller bound is true. None: no bound.

    >>> worst_staleness(0, 4, 1), worst_staleness(1, 4, 1), worst_staleness(1, 4, 2), worst_staleness(2, 3, 9), worst_staleness(1, 4, None)
    (0, 1, 2, 5, None)
    """
    if window is None:
        return None
    return 0 if max_staleness == 0 else max_staleness - (1 - window) // groups_per_step


def worst_updates(worst: int | None, updates_per_batch: int) -> int | None:
    """The same in optimizer updates: those of the batches between, and those of its own batch before the last one.

    >>> worst_updates(1, 1), worst_updates(1, 4), worst_updates(None, 4)
    (1, 7, None)
    """
    return None if worst is None else (worst + 1) * updates_per_batch - 1


def slots_taken(unpulled: int, pulled: int, unconfirmed: int) -> int:
    """Groups that hold a slot: not yet pulled, pulled but not trained, trained but not confirmed by every engine in service."""
    return unpulled + pulled + unconfirmed


def free_slots(taken: int, slots: int) -> int:
    """Groups that the gate lets through now; after a resume more may be taken than there are slots."""
    return max(0, slots - taken)


def still_needed(steps: int, next_batch: int, groups_per_step: int, unpulled: int) -> int:
    """Groups that the remaining steps can use beyond those already under way; near the end no more are admitted."""
    return max(0, (steps - next_batch) * groups_per_step - unpulled)


def permit(finished_batches: int, ahead: int, max_staleness: int, groups_per_step: int) -> int:
    """`min_version`: a group starts, goes on or is retried only on an engine at this version or later; T + floor(a/P) - S.

    >>> permit(10, 0, 1, 4), permit(10, 7, 1, 4), permit(0, 3, 1, 4)
    (9, 10, -1)
    """
    return finished_batches + ahead // groups_per_step - max_staleness


def pull(
    places: Sequence[int], pulled: Callable[[int], bool], finished: Sequence[int], window: int | None, groups_per_step: int
) -> list[int] | None:
    """The P groups of the next batch in pull order, or None while fewer may be pulled.

    Without a window: the oldest finished ones.

    `places` are the groups in order, from the oldest unpulled one; pulled ones among them still count as places, filtered and dropped
    ones are not in it. `finished` are those that have finished and are not pulled, in order. The window is anchored: any finished group
    among the W places from the oldest unpulled group may be pulled, and the anchor moves only when that oldest group is pulled. (A window
    over the W oldest *unpulled* groups would let an unbounded number pass a slow one.) Of those that may be pulled the oldest is: so a
    batch is the P oldest finished ones, if each of them was within the window when its turn came.
    """
    if len(finished) < groups_per_step:
        return None
    batch = list(finished[:groups_per_step])
    if window is None:
        return batch
    chosen: set[int] = set()
    anchor = 0
    for group_id in batch:
        while places[anchor] in chosen or pulled(places[anchor]):
            anchor += 1
        if bisect_left(places, group_id, anchor) >= anchor + window:
            return None
        chosen.add(group_id)
    return batch
