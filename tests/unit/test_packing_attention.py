"""Packed attention against a dense mask: trees, windows, soft caps, sinks, grouped heads, and any batching of rows."""

import pytest
import torch

from slipstream.models import packed_attention as module
from slipstream.models.layout import PackedLayout, Segment
from slipstream.models.packed_attention import packed_attention

LAYOUTS = {
    "shared prompt": (Segment(0, 9), Segment(9, 4, 0), Segment(13, 1, 0), Segment(14, 7, 0)),
    "deep tree": (
        Segment(0, 13),
        Segment(13, 3, 0),
        Segment(16, 5, 0),
        Segment(21, 1),
        Segment(22, 9, 3),
        Segment(31, 4, 2),
        Segment(35, 2, 5),
    ),
    "no tree": (Segment(0, 3), Segment(3, 11), Segment(14, 6)),
    "one": (Segment(0, 17),),
}


def dense_attention(query, key, value, layout, scaling, window, softcap, sinks):
    """The definition: every token sees its ancestors and its own segment up to itself, at most `window` positions back."""
    positions = layout.position_ids()[0]
    owner = torch.repeat_interleave(torch.arange(len(layout.segments)), torch.tensor([s.length for s in layout.segments]))
    related = torch.zeros(len(layout.segments), len(layout.segments), dtype=torch.bool)
    for index in range(len(layout.segments)):
        related[index, [*layout.ancestors(index), index]] = True
    distance = positions[:, None] - positions[None, :]
    seen = related[owner[:, None], owner[None, :]] & (distance >= 0)
    if window is not None:
        seen &= distance < window
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


@pytest.mark.parametrize("slack", [0, 2048, 10**9], ids=["small batches", "as is", "one batch"])
@pytest.mark.parametrize("segments", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("window", [None, 5, 1])
def test_equals_dense_attention(segments, window, slack, monkeypatch):
    monkeypatch.setattr(module, "_SLACK", slack)
    layout, generator = PackedLayout(segments), torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)

    for heads, softcap, sinks in ((2, None, None), (4, None, None), (2, 3.0, None), (2, 3.0, random(4)), (4, None, random(4))):
        tensors = random(1, 4, layout.num_tokens, 8), random(1, heads, layout.num_tokens, 8), random(1, heads, layout.num_tokens, 8)
        inputs = tensors if sinks is None else (*tensors, sinks)
        options = {"scaling": 0.5, "softcap": softcap, "sinks": sinks}
        found = packed_attention(torch.nn.Identity(), *tensors, layout, sliding_window=window, **options)
        expected = dense_attention(*tensors, layout, window=window, **options)
        weight = torch.randn(found.shape, dtype=torch.float64, generator=generator)
        tolerance = 1e-12 if softcap is None and sinks is None else 1e-5  # the plain softmax is in float32
        for a, b in zip(
            (found, *torch.autograd.grad((found * weight).sum(), inputs)),
            (expected, *torch.autograd.grad((expected * weight).sum(), inputs)),
            strict=True,
        ):
            assert (a - b).abs().max() < tolerance


def test_far_apart_numbers_of_ancestors_in_one_batch():
    """699 keys that a row must not see come before the one it may: the fused kernel must not make NaN of them."""
    layout = PackedLayout((Segment(0, 700), Segment(700, 1, 0), Segment(701, 1), Segment(702, 2, 2)))
    query, key, value = (torch.randn(1, 2, 704, 16, requires_grad=True) for _ in range(3))
    out = packed_attention(torch.nn.Identity(), query, key, value, layout, scaling=0.25)
    batches = module._plan(layout, None, torch.float32, query.device).batches
    assert any(b.mask is not None and len(b.mask) > 1 for b in batches)
    expected = dense_attention(query, key, value, layout, 0.25, None, None, None)
    assert torch.allclose(out, expected, atol=1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (query, key, value)))


def sibling_layout(groups, prompt, samples, length):
    segments = []
    for _ in range(groups):
        parent = len(segments)
        at = segments[-1].end if segments else 0
        segments.append(Segment(at, prompt))
        segments += [Segment(at + prompt + s * length, length, parent) for s in range(samples)]
    return PackedLayout(tuple(segments))


@pytest.mark.parametrize("window", [None, 32])
def test_no_mask_of_all_tokens(window):
    layout = sibling_layout(groups=8, prompt=100, samples=8, length=50)
    plan = module._plan(layout, window, torch.float32, torch.device("cpu"))
    assert sum(b.mask.numel() for b in plan.batches if b.mask is not None) < layout.num_tokens**2 / 100


def test_siblings_share_a_call_and_layers_share_a_plan():
    layout = sibling_layout(groups=1, prompt=100, samples=8, length=50)
    plan = module._plan(layout, None, torch.float32, torch.device("cpu"))
    assert sorted(b.num_rows for b in plan.batches) == [1, 8]
    assert module._plan(layout, None, torch.float32, torch.device("cpu")) is plan


def test_padding_stays_cheap():
    """One long completion among many short ones does not make all of them long."""
    segments = [Segment(0, 50)]
    for length in [900, *[40] * 15]:
        segments.append(Segment(segments[-1].end, length, 0))
    batches = module._plan(PackedLayout(tuple(segments)), None, torch.float32, torch.device("cpu")).batches
    scores = sum(len(b.query_index) * len(b.key_index) // b.num_rows for b in batches)
    assert scores < 1.3 * (50 * 50 + 900 * 950 + 15 * 40 * 90) + 2048
