"""The asynchronous controller end to end, with fake roles: fresh run, resume, stop, deadlines."""

from __future__ import annotations

import asyncio

from controller_fakes import Notes, Roles, config, start

from slipstream.controller.run_folder import RunFolder


def test_a_run_from_the_first_admission_to_the_last_evaluation(tmp_path):
    async def main():
        observer = Notes()
        controller = start(RunFolder.create("t", tmp_path / "run"), config(), observer)
        assert await Roles(controller).run() == "finished"
        totals = controller.totals()
        controller.close()
        assert [line["step"] for line, _ in observer.steps] == list(range(6))
        assert [line["step"] for line in observer.evaluations] == [0, 3, 6]
        assert totals["trained_samples"] == 24 and totals["staleness_max"] <= 1
        assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-4", "step-6"]

    asyncio.run(main())
