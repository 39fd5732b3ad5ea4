"""Which rollouts of an oversampled group are kept: of G' sampled ones the G that are trained. Pure functions over records.

A choice is a function of recorded facts alone (run seed, group id, attempt, sample numbers, rewards, scores), so it comes out the same
whenever it is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import xxhash

from slipstream.types import Group, Rollout

NOT_SELECTED = "not selected"  # the cause that their tokens are counted under

Draw = Callable[[Rollout], int]


def usable(rollout: Rollout) -> bool:
    """Finished and with a reward: a failed rollout is never selected."""
    return rollout.status.ok and rollout.reward is not None


def select(group: Group, keep: int, how: str, seed: int) -> tuple[Group, tuple[Rollout, ...]]:
    """(the group with `keep` of its usable rollouts, in order of sample; the rollouts left out, failed ones among them).

    how = "uniform": a draw without replacement.
    how = "roc": resample on correct, see `_resample_on_correct`.
    A group of at most `keep` rollouts stays as it is. Raises ValueError where fewer than `keep` of more rollouts are usable.
    """
    if len(group.rollouts) <= keep:
        return group, ()
    candidates = [rollout for rollout in group.rollouts if usable(rollout)]
    if len(candidates) < keep:
        raise ValueError(f"group {group.group_id} has {len(candidates)} usable rollouts, {keep} are to be kept")

    def draw(rollout: Rollout) -> int:
        """uint64: this rollout's lot."""
        return xxhash.xxh3_64_intdigest(
            f"slipstream selection, seed {seed}, group {group.group_id}, attempt {group.attempt}, sample {rollout.sample}".encode()
        )

    chosen = _SELECTIONS[how](candidates, keep, draw)
    numbers = {rollout.sample for rollout in chosen}
    left_out = tuple(rollout for rollout in group.rollouts if rollout.sample not in numbers)
    return msgspec.structs.replace(group, rollouts=tuple(r for r in group.rollouts if r.sample in numbers)), left_out


def _uniform(candidates: Sequence[Rollout], keep: int, draw: Draw) -> list[Rollout]:
    return sorted(candidates, key=draw)[:keep]


def _resample_on_correct(candidates: Sequence[Rollout], keep: int, draw: Draw) -> list[Rollout]:
    """The cleanest positives and a uniform draw of the negatives, in the proportion in which they were sampled.

    The "resample on correct" of GRPO-RoC (rStar2-Agent, arXiv 2508.20722): a correct answer that was stumbled on through
    failed tool calls is no model to follow, while failures should stay as varied as they are. Each side keeps its share of `keep`, rounded,
    and at least one rollout where it has any, so that a group that differs in reward still does. Positives of equal penalty are drawn.
    """
    middle = _middle(candidates)
    positive = [r for r in candidates if _reward(r) > middle]
    negative = [r for r in candidates if _reward(r) <= middle]
    count = _share(len(positive), len(negative), keep)
    cleanest = sorted(positive, key=lambda r: (penalty(r), draw(r)))
    return [*cleanest[:count], *_uniform(negative, keep - count, draw)]


def _share(num_positive: int, num_negative: int, keep: int) -> int:
    """How many positives are kept: in proportion (halves up), at least one of each side where there is one and room for both.

    >>> _share(6, 10, 8), _share(1, 15, 8), _share(15, 1, 8), _share(0, 16, 8), _share(3, 5, 8)
    (3, 1, 7, 0, 3)
    """
    total = num_positive + num_negative
    count = (2 * num_positive * keep + total) // (2 * total)
    if keep > 1:
        count = max(min(1, num_positive), min(count, keep - min(1, num_negative)))
    return max(keep - num_negative, min(count, num_positive))


def _middle(candidates: Sequence[Rollout]) -> float:
    """What positives are rewarded above: the middle between the lowest and the highest reward; 0 where all rewards are equal."""
    rewards = [_reward(r) for r in candidates]
    return (min(rewards) + max(rewards)) / 2 if min(rewards) < max(rewards) else 0.0


def _reward(rollout: Rollout) -> float:
    assert rollout.reward is not None
    return rollout.reward


def penalty(rollout: Rollout) -> float:
    """What speaks against a correct rollout: every part that a scorer reports as "penalty", 1 if it was cut off at a length limit, and
    the share of its tool turns that answered with an error or were cut off."""
    reported = sum(score.parts.get("penalty", 0.0) for score in rollout.scores)
    cut_off = rollout.stop_reason is not None and rollout.stop_reason.truncated
    tools = [turn for turn in rollout.turns if turn.role == "tool"]
    failed = sum(turn.error or turn.truncated for turn in tools)
    return reported + float(cut_off) + (failed / len(tools) if tools else 0.0)


_SELECTIONS: dict[str, Callable[[Sequence[Rollout], int, Draw], list[Rollout]]] = {"uniform": _uniform, "roc": _resample_on_correct}
