"""Pairwise covering rows: few choices of settings in which every two values of two settings that may meet do meet.

A row maps each factor to one of its values. Most faults need two values at once (Kuhn et al. 2004), so that pairs are covered instead of
all choices; greedy construction as in AETG (Cohen et al. 1997), around whatever is refused.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Pair = frozenset[tuple[str, Any]]  # of two (factor, value)
Blame = Callable[[Row], frozenset[str]]  # factors whose values in the row are refused, with the others at their defaults; empty: it loads

MAX_HELP = 3  # further factors that are set so that a pair loads


@dataclass(slots=True)
class Covering:
    """Rows that load, and the pairs that no row can have."""

    rows: list[Row] = field(default_factory=list)
    refused: list[Pair] = field(default_factory=list)


def pairs_of(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def cover(factors: Mapping[str, Sequence[Any]], blame: Blame, seed: int, without: Sequence[frozenset[str]] = ()) -> Covering:
    """Every pair of values of two factors is in a row or refused. `without`: pairs of factors that need not meet in every way."""
    rng, out = random.Random(seed), Covering()
    left = {
        frozenset({(a, x), (b, y)}): None
        for a, b in combinations(factors, 2)
        if frozenset({a, b}) not in without
        for x in factors[a]
        for y in factors[b]
    }  # a dict keeps the order, which a set of texts does not between processes
    while left:
        wanted = Counter(value for pair in left for value in pair)  # (factor, value) -> what it has not met yet
        pair = max(left, key=lambda pair: sum(wanted[value] for value in pair))
        start = _help(dict(sorted(pair)), factors, blame, MAX_HELP)
        if start is None:
            out.refused.append(pair)
            del left[pair]
            continue
        row = _fill(start, factors, blame, left, wanted, rng)
        for covered in pairs_of(row):
            left.pop(covered, None)
        out.rows.append(row)
    return out


def _help(row: Row, factors: Mapping[str, Sequence[Any]], blame: Blame, depth: int) -> Row | None:
    """The row with as few further factors as make it load; None where none do."""
    blamed = blame(row)
    if not blamed:
        return row
    if depth == 0:
        return None
    more = ({**row, name: value} for name in factors if name in blamed and name not in row for value in factors[name])
    return next((helped for each in more if (helped := _help(each, factors, blame, depth - 1)) is not None), None)


def _fill(
    start: Row,
    factors: Mapping[str, Sequence[Any]],
    blame: Blame,
    left: Mapping[Pair, None],
    wanted: Mapping[tuple[str, Any], int],
    rng: random.Random,
) -> Row:
    """The row with every factor: always the value that meets most of what it has not met yet, of those that load."""
    row = dict(start)
    open_values = {  # (factor, value) -> what it would newly meet
        (name, value): sum(frozenset({(name, value), other}) in left for other in row.items())
        for name in factors
        if name not in row
        for value in factors[name]
    }
    while open_values:
        name, value = best = max(open_values, key=lambda each: (open_values[each], wanted[each], rng.random()))
        if blame({**row, name: value}):
            del open_values[best]
            continue
        row[name] = value
        open_values = {each: gain + (frozenset({each, best}) in left) for each, gain in open_values.items() if each[0] != name}
    assert row.keys() == factors.keys(), "the default of a factor is refused in a row that does without the factor"
    return row
