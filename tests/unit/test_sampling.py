"""Counter-based sampling: the draws are uniform and independent, the tokens follow their distribution, the logprobs are theirs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.engines.embedded.sampling import choose, rollout_key, stream_key, uniforms
from slipstream.types import Purpose, Sampling


def draws(n: int, sample: int = 0) -> np.ndarray:
    return uniforms(np.full(n, rollout_key(0, 0, Purpose.TRAIN, 3, sample, 0)), np.arange(n))


def chi_square_is_plausible(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Within 5 standard deviations of its mean (k - 1, variance 2 (k - 1))."""
    expected = probabilities * counts.sum()
    statistic, dof = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    return abs(statistic - dof) < 5 * np.sqrt(2 * dof)


@pytest.mark.parametrize("vocabulary", [5, 128, 300])
def test_frequencies_match_the_softmax(vocabulary: int) -> None:
    n = 60_000
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 0.7
    for temperature in (1.0, 0.5):
        tokens = choose(logits.expand(n, -1), draws(n), [Sampling(temperature=temperature)] * n).tokens
        counts = np.bincount(tokens, minlength=vocabulary)
        assert chi_square_is_plausible(counts, torch.softmax(logits.double() / temperature, -1).numpy())
        assert not chi_square_is_plausible(counts, torch.softmax(logits.double() / temperature * 1.2, -1).numpy())


def test_uniforms_are_uniform_and_streams_are_unrelated() -> None:
    n = 100_000
    a, b = draws(n), draws(n, sample=1)
    assert a.min() >= 0 and a.max() < 1
    assert chi_square_is_plausible(np.histogram(a, 100, (0, 1))[0], np.full(100, 0.01))
    for x, y in ((a, b), (a[1:], a[:-1])):
        assert abs(np.corrcoef(x, y)[0, 1]) < 5 / np.sqrt(n)
    same_index = uniforms(np.array([stream_key(i) for i in range(5000)]), np.zeros(5000, dtype=np.int64))
    assert chi_square_is_plausible(np.histogram(same_index, 50, (0, 1))[0], np.full(50, 0.02))


def test_every_part_of_the_key_matters() -> None:
    base = (0, 0, Purpose.TRAIN, 3, 1, 0)
    others = [(1, 0, Purpose.TRAIN, 3, 1, 0), (0, 1, Purpose.TRAIN, 3, 1, 0), (0, 0, Purpose.EVAL, 3, 1, 0)]
    others += [
        (0, 0, Purpose.TRAIN, 4, 1, 0),
        (0, 0, Purpose.TRAIN, 3, 2, 0),
        (0, 0, Purpose.TRAIN, 3, 1, 1),
        (0, 0, Purpose.TRAIN, 1, 3, 0),
    ]
    assert len({int(rollout_key(*parts)) for parts in [base, *others]}) == 8


def test_the_stream_is_pinned() -> None:
    """Resumed runs draw what they would have drawn: the function may never change."""
    assert int(stream_key(1, 2, 3)) == 7041752555471512236
    assert uniforms(np.array([stream_key(1, 2, 3)]), np.array([7]))[0] == 0.6936934957021482


def test_logprobs_are_those_of_the_distribution_sampled_from() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)) * 2
    settings = [
        Sampling(),
        Sampling(temperature=0.3),
        Sampling(temperature=0.0),
        Sampling(top_k=4),
        Sampling(top_p=0.6),
        Sampling(min_p=0.2),
    ]
    tokens, logprobs, _ = choose(logits, draws(6), settings)
    at = torch.from_numpy(tokens.astype(np.int64))[:, None]
    full = torch.log_softmax(logits, -1)
    assert logprobs[0] == pytest.approx(full[0, tokens[0]].item(), abs=1e-6)
    assert logprobs[1] == pytest.approx(torch.log_softmax(logits[1] / 0.3, -1)[tokens[1]].item(), abs=1e-5)
    assert tokens[2] == logits[2].argmax() and logprobs[2] == pytest.approx(full[2].max().item(), abs=1e-6)
    assert (logprobs[3:] > full.gather(1, at)[3:, 0].numpy()).all(), "renormalised"


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_p=0.5), [0]),
        (Sampling(top_p=0.51), [0, 1]),
        (Sampling(top_p=0.85), [0, 1, 2]),
        (Sampling(min_p=0.3), [0, 1]),
        (Sampling(top_k=3, top_p=0.6), [0, 1]),
        (Sampling(top_k=1, min_p=0.1), [0]),
    ],
)
def test_cuts_keep_what_they_say(sampling: Sampling, kept: list[int]) -> None:
    probabilities = np.array([0.5, 0.3, 0.1, 0.06, 0.04])
    n = 4000
    tokens, logprobs, _ = choose(torch.from_numpy(probabilities).log().float().expand(n, -1), draws(n), [sampling] * n)
    assert sorted(set(tokens.tolist())) == kept
    expected = np.log(probabilities[tokens] / probabilities[kept].sum())
    assert np.abs(logprobs - expected).max() < 1e-5


def test_the_ends_of_the_unit_interval_give_possible_tokens() -> None:
    """Tokens of probability 0 are never chosen, whatever the draw; also at chunk borders of the vocabulary."""
    logits = torch.full((2, 400), float("-inf"))
    logits[:, [127, 128, 300]] = 0.0
    for u in (0.0, np.nextafter(1.0, 0.0), 1 / 3, 2 / 3):
        tokens, logprobs, _ = choose(logits, np.full(2, u), [Sampling()] * 2)
        assert set(tokens.tolist()) <= {127, 128, 300}
        assert logprobs == pytest.approx(np.log(1 / 3))


def test_certainty_has_logprob_zero() -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0]])
    tokens, logprobs, _ = choose(logits, np.array([0.5]), [Sampling()])
    assert (tokens[0], logprobs[0]) == (0, 0.0)


def test_rows_do_not_depend_on_each_other() -> None:
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(2))
    settings = [Sampling(temperature=0.2 + 0.05 * i, top_k=i % 3) for i in range(40)]
    u = draws(40)
    together = choose(logits, u, settings)
    for i in range(40):
        alone = choose(logits[i : i + 1], u[i : i + 1], settings[i : i + 1])
        assert (alone[0][0], alone[1][0]) == (together[0][i], together[1][i])
