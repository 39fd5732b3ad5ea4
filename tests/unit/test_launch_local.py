"""Which error ends a run of processes. Without processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config.settings import Config
from slipstream.errors import RoleFailed
from slipstream.launch import role
from slipstream.launch.context import OpenRun, RunContext
from slipstream.launch.local import LocalRun
from slipstream.launch.processes import ASKED_TO_LEAVE


class Controller:
    """Has trained every step; its first error counts."""

    def __init__(self) -> None:
        self.core = SimpleNamespace(broker=SimpleNamespace(num_slots=3), check=self.check)
        self.error: BaseException | None = None

    async def wait_finished(self) -> str:
        return "finished"

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error

    def check(self) -> None:
        if self.error is not None:
            raise self.error


async def nothing(*_: Any, **options: object) -> None:
    pass


@pytest.mark.parametrize("own", [LookupError("the caller's"), None], ids=["the controller's own", "the role's"])
def test_what_a_role_only_echoes_does_not_hide_the_error_of_the_last_step(
    own: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller: Any = Controller()

    async def echoes(*_: Any) -> None:
        if own is not None:
            controller.fail(own)
        raise RoleFailed("engine", "the controller failed")

    async def stays(*_: Any) -> None:
        await asyncio.Event().wait()

    context = RunContext(Config(), tmp_path, tmp_path, 1, 0, "run")
    run = LocalRun([OpenRun(context, controller)], [[]], tmp_path)
    monkeypatch.setattr(run, "_start", nothing)
    monkeypatch.setattr(run.supervisor, "left", stays)
    monkeypatch.setattr(run.supervisor, "watch", echoes)
    try:
        with pytest.raises(RoleFailed if own is None else LookupError):
            asyncio.run(run.run(()))
    finally:
        run.close()


@pytest.mark.parametrize(("message", "code"), [((ASKED_TO_LEAVE,), 0), ((), None)])
def test_a_role_that_was_asked_to_leave_has_not_failed(message: tuple[str, ...], code: int | None, monkeypatch) -> None:
    """Any other cancellation is nobody's wish."""

    async def cancelled(child: object) -> None:
        raise asyncio.CancelledError(*message)

    monkeypatch.setattr(role, "play", cancelled)
    child: Any = SimpleNamespace(others=[])
    if code is None:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(role.run_role(child))
    else:
        assert asyncio.run(role.run_role(child)) == code
