"""Fixtures that several files use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bits are compared, so rows must not depend on their neighbours."""
    import torch  # here, because most files need none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
