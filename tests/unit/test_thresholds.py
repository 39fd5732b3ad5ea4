"""Limits on diagnostics: what counts as a violation, when a limit acts, and that its count survives where the run is to be bit-exact."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from controller_fakes import Notes, abandon, config, make_step, publish, serve_engine, start, write_checkpoint

from slipstream.config.settings import ThresholdSettings
from slipstream.controller.run_folder import RunFolder
from slipstream.controller.thresholds import STEPS_TO_APPEAR, judge, name
from slipstream.errors import RunFailed


def limit(metric: str = "kl_k3", **more: Any) -> ThresholdSettings:
    return ThresholdSettings.model_validate({"metric": metric, **({} if more.keys() & {"above", "below"} else {"above": 0.5}), **more})


def acts_at(limits: list[ThresholdSettings], *values: Any, look_away: int = 0) -> list[tuple[int, str]]:
    """(step, action) of everything that acts over lines with these values of kl_k3 ("absent": a line without it)."""
    counts: dict[str, int] = {}
    acted = []
    for step, value in enumerate(values):
        line = {"step": step} | ({} if value == "absent" else {"kl_k3": value})
        counts, crossed = judge(limits, counts, line, look_away)
        acted += [(step, c.action) for c in crossed]
    return acted


@pytest.mark.parametrize(
    ("settings", "values", "steps"),
    [
        ({"above": 0.5}, (0.4, 0.5, 0.6, 0.7), [2, 3]),
        ({"below": 0.5}, (0.6, 0.5, 0.4), [2]),
        ({"above": 0.5, "steps": 3}, (1, 1, 0, 1, 1, 1, 1, 1, 1), [5, 8]),
        ({"above": 0.5, "steps": 2}, (1, "absent", None, 1), [3]),
        ({"above": 0.5, "steps": 2}, (1, "absent", 0, 1), []),
        ({"above": 0.5}, (math.nan, math.inf, -math.inf), [0, 1]),
        ({"below": 0.5}, (math.nan, math.inf, -math.inf), [0, 2]),
        ({"above": 0.5}, ("why the update was skipped",), []),
        ({"below": 0.0}, (0.0, -0.1), [1]),
    ],
)
def test_when_a_limit_acts(settings, values, steps):
    assert [step for step, _ in acts_at([limit(**settings)], *values)] == steps


def test_limits_on_one_metric_count_apart():
    limits = [limit(above=0.5, steps=2, action="lower_max_staleness"), limit(above=0.5, steps=4), limit(below=-1)]
    assert acts_at(limits, 1, 1, 1, 1, -2) == [(1, "lower_max_staleness"), (3, "stop"), (3, "lower_max_staleness"), (4, "stop")]
    assert len({name(one) for one in limits}) == 3


def test_after_lowering_it_looks_away_while_older_data_is_trained():
    lower = limit(above=0.5, action="lower_max_staleness")
    assert [step for step, _ in acts_at([lower], *[1] * 8, look_away=2)] == [0, 3, 6]
    assert acts_at([lower, limit(above=0.6, action="lower_max_staleness")], 1, 1, 1, 1, look_away=2) == [
        (0, "lower_max_staleness"),
        (3, "lower_max_staleness"),
    ], "one line lowers once"
    assert [s for s, a in acts_at([lower, limit(above=0.5)], 1, 1, look_away=2) if a == "stop"] == [0, 1], "a stop never looks away"


# ---- the controller ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create("t", tmp_path / "run")


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


async def begin(controller) -> None:
    await publish(controller, controller.start_step)
    await serve_engine(controller)


def test_a_run_beyond_its_limit_ends_and_says_what_to_try(folder):
    async def main():
        controller = start(folder, config(threshold=[{"metric": "kl_k3", "above": 0.25, "steps": 2}]))
        await begin(controller)
        await make_step(controller, 0, metrics={"kl_k3": 0.2})
        await make_step(controller, 1, metrics={"kl_k3": 0.3})
        expected = (
            r"kl_k3 is 0\.31 at step 2; the threshold is above 0\.25 for 2 steps in a row\. What can help: lower trainer\.learning_rate "
            r"or buffer\.max_staleness\. --resume goes on from the newest checkpoint"
        )
        with pytest.raises(RunFailed, match=expected):
            await make_step(controller, 2, metrics={"kl_k3": 0.31})
        with pytest.raises(RunFailed, match="kl_k3"):
            await controller.wait_finished()
        assert controller.core.state.step == 3, "the step that crossed it is made"
        controller.close()

    run(main())


def test_max_staleness_is_lowered_once_per_cause_and_the_person_is_told(folder):
    async def main():
        observer = Notes()
        lower = {"metric": "reward_mean", "above": 0.25, "action": "lower_max_staleness"}  # the fakes' groups have 0.5
        controller = start(folder, config(threshold=[lower], trainer={"steps": 12}, evaluation={"every": 100}), observer)
        state = lambda: controller.core.state  # noqa: E731
        await begin(controller)
        await make_step(controller, 0)
        assert state().max_staleness == 0
        for step in range(1, 8):
            await make_step(controller, step)
        told = [text for text in observer.notes if "reward_mean" in text]
        assert "buffer.max_staleness is 0 from now on: reward_mean is 0.5 at step 0; the threshold is above 0.25" in told
        assert len([text for text in told if "cannot be lowered further" in text]) == 1 and len(told) == 2
        controller.close()

    run(main())


def test_a_name_that_never_comes_up_is_told_with_those_that_are_near(folder):
    async def main():
        observer = Notes()
        limits = [{"metric": "rewards_mean", "below": -1.0}, {"metric": "kl_k1", "above": 9.0}, {"metric": "skipped", "above": 1.0}]
        settings = config(threshold=limits, trainer={"steps": 14}, evaluation={"every": 100})
        controller = start(folder, settings, observer)
        await begin(controller)
        for step in range(12):
            assert not any("judges nothing" in text for text in observer.notes) or step >= STEPS_TO_APPEAR
            await make_step(controller, step, metrics={"kl_k1": 0.0} if step == 3 else {})
        (told,) = [text for text in observer.notes if "judges nothing" in text]
        assert '"rewards_mean"' in told and "reward_mean" in told.split("did you mean")[1]
        controller.close()

    run(main())


def test_such_a_name_is_told_at_the_end_of_a_short_run_too(folder):
    async def main():
        observer = Notes()
        settings = config(threshold=[{"metric": "kl_k4", "above": 9.0}], trainer={"steps": 2}, evaluation={"every": 100})
        controller = start(folder, settings, observer)
        await begin(controller)
        for step in range(2):
            assert not any("judges nothing" in text for text in observer.notes)
            await make_step(controller, step)
        assert [text for text in observer.notes if "no step line so far (there were 2) has such a metric" in text]
        controller.close()

    run(main())


KL = [0.1, 0.9, 0.9, 0.9, 0.1, 0.1]


@pytest.mark.parametrize(("deterministic", "counts"), [(True, {"kl_k3 above 0.5: stop": 1}), (False, {})])
def test_a_deterministic_resume_goes_on_with_the_counts_of_its_checkpoint(folder, deterministic, counts):
    async def main():
        settings = config(
            run={"deterministic": deterministic}, threshold=[{"metric": "kl_k3", "above": 0.5, "steps": 3}], evaluation={"every": 100}
        )
        controller = start(folder, settings)
        await begin(controller)
        for step in range(2):
            await make_step(controller, step, metrics={"kl_k3": KL[step]})
        place = controller.folder.checkpoints / ".tmp-2"
        await controller.commit_checkpoint(place.name, write_checkpoint(place, 2, *await controller.checkpoint_context()))
        await make_step(controller, 2, metrics={"kl_k3": KL[2]})
        assert controller.core.state.threshold_counts == {"kl_k3 above 0.5: stop": 2}
        abandon(controller)

        again = start(folder, settings)
        assert again.start_step == 2 and again.core.state.threshold_counts == counts
        await begin(again)
        await make_step(again, 2, metrics={"kl_k3": KL[2]})
        if deterministic:
            with pytest.raises(RunFailed, match="at step 3"):
                await make_step(again, 3, metrics={"kl_k3": KL[3]})
        else:
            await make_step(again, 3, metrics={"kl_k3": KL[3]})
        again.close()

    run(main())
