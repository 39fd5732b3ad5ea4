"""The pure parts of the benchmark of decoding: what is asked for, and what could be reached."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from decode_work import GROUP, PROMPT_TOKENS, Machine, least_passes, lognormal_lengths, make_work, static_passes


def test_lengths_are_lognormal_and_cut() -> None:
    lengths = np.array(lognormal_lengths(20_000, 64))
    assert lengths.min() >= 1 and lengths.max() == 256
    uncut = np.array(lognormal_lengths(200_000, 64, cut=1e9))
    assert uncut.mean() == pytest.approx(64, rel=0.02)
    assert np.log(uncut[uncut > 20]).mean() == pytest.approx(np.log(lengths[lengths > 20]).mean(), rel=0.03)
    assert lognormal_lengths(5, 64) == lognormal_lengths(5, 64), "the same for every way and every run"


def test_work_shares_prompts_within_groups() -> None:
    work = make_work("", [3] * (2 * GROUP + 1), 1000)
    assert len(work.prompts) == 3 and {len(p) for p in work.prompts} == {PROMPT_TOKENS}
    assert work.prompt(0) == work.prompt(GROUP - 1) != work.prompt(GROUP)
    assert (work.num_requests, work.num_tokens) == (17, 51)
    assert all(0 <= token < 1000 for prompt in work.prompts for token in prompt)
    again = work.with_other_prompts(1, 1000)
    assert again.lengths == work.lengths and not set(again.prompts) & set(work.prompts), "no cache has them"
    assert again == work.with_other_prompts(1, 1000), "the same for every way"


def test_passes() -> None:
    lengths = [1, 9, 2, 2, 4, 3]
    assert static_passes(lengths, 2) == 9 + 2 + 4
    assert least_passes(lengths, 2) == 11  # 21 tokens, 2 at a time
    assert least_passes(lengths, 4) == 9  # the longest


def test_bounds() -> None:
    machine = Machine(bytes_per_s=1e9, products_s=0.5)
    full, uneven = make_work("", [10] * 4, 1000), make_work("", [10, 1, 1, 1], 1000)
    assert machine.bounds(full, 4, 10**8) == pytest.approx((4 / 0.1, 4 / 0.5))
    assert machine.bounds(uneven, 4, 10**8) == pytest.approx((13 / (10 * 0.1), 4 / 0.5))
