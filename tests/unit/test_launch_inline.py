"""What the inline launcher holds and sets in its process, and that it gives all of it back. Without a model."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.config.settings import Config
from slipstream.errors import ModelError
from slipstream.launch import inline
from slipstream.launch.context import OpenRun
from slipstream.launch.inline import InlineRun, run_inline


class End:
    """Of weights that do not travel."""

    def close(self) -> None:
        pass


def descriptors() -> list[str]:
    return sorted(os.readlink(f"/proc/self/fd/{d}") for d in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{d}"))


def start(monkeypatch: pytest.MonkeyPatch, build_engine: Any, turns: Any = None) -> None:
    monkeypatch.setattr(inline, "build_engine", build_engine)
    monkeypatch.setattr(inline, "build_reader", lambda context, own, engine_id, slots: End())
    monkeypatch.setattr(inline, "InProcessClient", lambda engine: None)
    monkeypatch.setattr(inline, "build_trainer", lambda context, slots, load: (None, End()))
    if turns is not None:
        monkeypatch.setattr(inline, "take_turns", turns)
    config = Config.model_validate({"launch": "inline", "engine": {"threads": 3}})
    controller: Any = SimpleNamespace(core=SimpleNamespace(broker=SimpleNamespace(num_slots=3)))
    asyncio.run(run_inline([OpenRun(SimpleNamespace(config=config), controller)], ()))  # type: ignore[arg-type]


def test_a_model_that_does_not_load_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def fails(config: Config, load: Any) -> None:
        held.append(sum("slipstream-weights" in name for name in descriptors()))
        raise ModelError("no such model")

    threads = torch.get_num_threads()
    with pytest.raises(ModelError, match="no such model"):
        start(monkeypatch, fails)
    assert held == [3]
    assert not [name for name in descriptors() if "slipstream-weights" in name]
    assert torch.get_num_threads() == threads


def test_the_engine_is_proved_and_ticked_with_its_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    engine = SimpleNamespace(weights=None, engine_id="engine-0", has_work=lambda: True, tick=lambda: seen.append(torch.get_num_threads()))

    async def one_tick(runs: list[InlineRun], rewards: Any) -> None:
        (run,) = runs
        run._client = SimpleNamespace(feed=lambda frame: None)  # type: ignore[assignment]
        run._worker_task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[assignment]
        run._offer = asyncio.create_task(asyncio.Event().wait())  # type: ignore[assignment]
        assert await run.turn() == ()

    def build(config: Config, load: Any) -> Any:
        seen.append(torch.get_num_threads())  # the probe runs in here
        return engine

    try:
        start(monkeypatch, build, one_tick)
        assert seen == [3, 3]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
