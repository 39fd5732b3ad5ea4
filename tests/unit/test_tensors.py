"""Tied storage is one tensor under one name; dtypes go by name and back."""

from __future__ import annotations

import pytest
import torch

from slipstream.tensors import distinct, dtype_name, dtype_of


def test_the_same_view_of_the_same_memory_is_tied_and_nothing_else_is():
    weight = torch.arange(12.0).reshape(3, 4)
    given = {
        "embedding": weight,
        "head": weight.detach(),
        "transposed": weight.T,
        "first row": weight[0],
        "copy": weight.clone(),
        "empty": torch.empty(0),
        "other empty": torch.empty(0),
    }
    tensors, aliases = distinct(given)
    assert aliases == {"head": "embedding"}
    assert list(tensors) == [name for name in given if name != "head"]
    assert all(tensors[name] is given[name] for name in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_dtypes_by_name(dtype):
    assert dtype_of(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("name", ["float33", "nn", ""])
def test_a_name_that_is_no_dtype(name):
    with pytest.raises(ValueError, match="is not a dtype"):
        dtype_of(name)
