"""A run with a logprob stage that loses it: killed, hung. Each ends the run in seconds with that cause; the run goes on, and in the end
every trained rollout has what the stage says of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from live_run import LiveRun, run_file
from test_run_killed import after, finish

from slipstream.launch.logprob_socket import ROLE

pytestmark = pytest.mark.timeout(600)


def test_the_logprob_stage_killed_then_hung_and_resumed(tmp_path: Path) -> None:
    file = run_file(tmp_path)
    file.write_text(file.read_text() + "\n[loss]\nkl_coefficient = 0.1\n")
    with LiveRun(file) as run:
        after(run, 2)
        pid = run.role(ROLE)
        os.kill(pid, signal.SIGKILL)
        assert run.ended() == 1
        assert run.message().startswith(f"{ROLE} (pid {pid}) was killed by SIGKILL"), run.output
    with LiveRun(file, "--trainer.step_timeout_s", "4") as run:
        after(run, 1)
        pid = run.freeze(ROLE, lambda: run.state(ROLE).phase == "logprobs")
        assert run.ended() == 1
        assert run.message().startswith(f"{ROLE} (pid {pid}) hangs: phase 'logprobs' is "), run.output
        assert "it owes group " in run.message()
    for rollout in (rollout for group in finish(file) for rollout in group.rollouts):
        array, sampled = rollout.arrays["reference_logprobs"], rollout.model_versions() >= 0
        assert np.isfinite(array).all() and (array[sampled] < 0).any() and (array[~sampled] == 0).all()
