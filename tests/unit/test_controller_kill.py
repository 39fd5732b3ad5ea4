"""kill -9 of a real controller process, at many moments: the next one takes the folder over and every group is accounted for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from slipstream.controller.accounts import check_accounts
from slipstream.controller.ledger import LedgerReader
from slipstream.controller.run_folder import RunFolder

CONTROLLER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from controller_fakes import Dying, Roles, config, start
from slipstream.controller.run_folder import RunFolder

async def main():
    folder = RunFolder.open(sys.argv[1]) if sys.argv[3] == "open" else RunFolder.create("t", sys.argv[1])
    controller = start(folder, config(launch="local", buffer={"filter_zero_variance": True}))
    print("start", controller.incarnation, controller.start_step, flush=True)
    flat = {"rewards": (1.0, 1.0)}
    flaky = lambda t: {"error": "x"} if (t.group_id % 5, t.attempt) == (2, 0) else flat if t.group_id % 5 == 4 else {}
    count = lambda c: print("call", flush=True)
    print(await Roles(Dying(controller, count), flaky, record=True).run(), flush=True)
    controller.close()

asyncio.run(main())
"""


def controller(path, mode: str) -> subprocess.Popen:
    command = [sys.executable, "-c", CONTROLLER, str(path), os.path.dirname(__file__), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("kills", [(7, 30, 55), (22, 41, 13)])
def test_a_run_killed_three_times_finishes_with_every_group_accounted_for(tmp_path, kills):
    path, steps = tmp_path / "run", []
    for number, calls in enumerate(kills):
        process = controller(path, "open" if number else "create")
        assert process.stdout is not None
        started = process.stdout.readline().split()
        assert started[:2] == ["start", str(number + 1)]
        steps.append(int(started[2]))
        seen = 0
        for line in process.stdout:
            seen += line == "call\n"
            if seen == calls:
                process.send_signal(signal.SIGKILL)
                break
        process.wait()
        assert process.returncode == -signal.SIGKILL, "the fault fired"
        with LedgerReader.open(path / "ledger.sqlite") as reader:
            check_accounts(reader)
    last = controller(path, "open")
    out, _ = last.communicate(timeout=60)
    assert last.returncode == 0 and out.endswith("finished\n")
    with LedgerReader.open(path / "ledger.sqlite") as reader:
        account = check_accounts(reader)
    trained = [g for ids in account.batches.values() for g in ids]
    assert len(trained) == len(set(trained)) == 12 and account.counts["trained"] == 12
    assert steps == sorted(steps), "each goes on from the newest checkpoint"
    assert (RunFolder.open(path).checkpoints / "step-6").is_dir()
