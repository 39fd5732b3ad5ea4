"""Layouts refuse what cannot be; the shared attention function refuses to guess."""

from __future__ import annotations

import pytest
import torch
from engine_harness import tiny_model

from slipstream.errors import ModelError
from slipstream.models.attention import attach
from slipstream.models.layout import PackedLayout, Segment


def test_positions_and_families_of_a_forest() -> None:
    layout = PackedLayout((Segment(0, 3), Segment(3, 2, 0), Segment(5, 2, 1), Segment(7, 1, 0), Segment(8, 2)))
    assert layout.position_ids().tolist() == [[0, 1, 2, 3, 4, 5, 6, 3, 0, 1]]
    assert layout.children == {-1: (0, 4), 0: (1, 3), 1: (2,)}
    assert [layout.ancestors(i) for i in range(5)] == [(), (0,), (0, 1), (0,), ()]
    assert layout.num_tokens == 10


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ((Segment(1, 3),), "expected at least one token from 0 on"),
        ((Segment(0, 3), Segment(4, 1)), "from 3 on"),
        ((Segment(0, 0),), "at least one token"),
        ((Segment(0, 3), Segment(3, 1, 1)), "parent is an earlier segment"),
        ((Segment(0, 3), Segment(3, 1, -2)), "parent -2"),
    ],
)
def test_impossible_layouts_are_refused(segments: tuple[Segment, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PackedLayout(segments)


def test_a_call_without_a_layout_is_refused() -> None:
    model = tiny_model()
    attach(model)
    with pytest.raises(ModelError, match="called without a layout"):
        model(input_ids=torch.tensor([[3, 4, 5]]))


def test_a_mask_is_refused() -> None:
    """transformers builds no mask for this implementation; one that a caller brings contradicts the layout."""
    model = tiny_model("gemma2")
    attach(model)
    layout = PackedLayout((Segment(0, 3),))
    ids = torch.tensor([[3, 4, 5]])
    assert model(input_ids=ids, use_cache=False, layout=layout).logits.shape == (1, 3, 97)
    with pytest.raises(ModelError, match="its own attention mask"):
        model(input_ids=ids, attention_mask=torch.zeros(1, 1, 3, 3), use_cache=False, layout=layout)


def test_attention_dropout_is_refused() -> None:
    model = tiny_model(attention_dropout=0.1)
    attach(model.train())
    with pytest.raises(ModelError, match=r"dropout 0\.1"):
        model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False, layout=PackedLayout((Segment(0, 3),)))
