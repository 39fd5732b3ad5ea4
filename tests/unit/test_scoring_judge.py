"""The reward "judge": what the judge is asked, what becomes of its marks, and of its failures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai_fake import Answer, refuses, says, server
from rollout_fakes import finished_group

from slipstream.cli import main as cli
from slipstream.config.load import load_config
from slipstream.config.settings import RewardSettings
from slipstream.errors import ConfigError, ScoringDeadline, ScoringError
from slipstream.scoring.score import start_scorers
from slipstream.scoring.scorers import make_scorers

TEXTS = ["ok", "no", "fine"]
ASKED = [{"role": "user", "content": "say it"}]


def judged(answer: Answer, *, texts: list[str] = TEXTS, timeout_s: float = 30.0, **options: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """The scores of a group, and what the judge was asked."""

    async def run() -> tuple[list[Any], list[dict[str, Any]]]:
        async with server(answer) as (url, bodies):
            settings = RewardSettings(function="judge", weight=0.5, timeout_s=timeout_s, options={"url": url, **options})
            [scorer] = make_scorers([settings])
            try:
                await start_scorers([scorer])
                scores = await scorer.score(msgspec.structs.replace(finished_group(texts), prompt=ASKED))
            finally:
                await scorer.close()
        return scores, bodies

    return asyncio.run(run())


def question(body: dict[str, Any]) -> str:
    return body["messages"][0]["content"]


def test_the_last_number_of_each_reply_over_the_best_mark_is_the_score():
    marks = {"ok": "It has 3 words less than asked.\n10", "no": "0", "fine": "So: 2.5"}
    scores, bodies = judged(lambda body: says(next(mark for text, mark in marks.items() if f"\n{text}\n" in question(body))))
    assert [(score.name, score.value, score.weight) for score in scores] == [("judge", 1.0, 0.5), ("judge", 0.0, 0.5), ("judge", 0.25, 0.5)]
    assert all("say it" in question(body) and "from 0 " in question(body) and "to 10 " in question(body) for body in bodies)
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in bodies} == {("m", 0.0, 512)}


def test_a_question_of_one_s_own_names_columns():
    scores, bodies = judged(lambda body: says("3"), question="Is {completion} the same as {answer}? 0 to {best}.", best=4, max_new_tokens=9)
    assert [score.value for score in scores] == [0.75] * 3
    assert sorted(map(question, bodies)) == [f"Is {text} the same as ok? 0 to 4." for text in sorted(TEXTS)]
    assert bodies[0]["max_tokens"] == 9


@pytest.mark.parametrize(
    ("answer", "options", "words"),
    [
        (lambda body: says("I cannot say."), {}, r"a mark from 0 to 10 .*'I cannot say\.'"),
        (lambda body: says("11"), {}, r"a mark from 0 to 10 .*'11'"),
        (lambda body: says("Let me", "length"), {}, r"cut off: more max_new_tokens"),
        (lambda body: refuses(400, "too long"), {}, "too long"),
        (lambda body: refuses(401), {"model": "m"}, "OPENAI_API_KEY"),
        (lambda body: says("1"), {"question": "{completion} {solution}"}, r"KeyError: 'solution'.*it may name: answer, best, completion"),
        (lambda body: says("1"), {"question": "{completion} {"}, "cannot be filled in"),
    ],
)
def test_what_gives_no_mark_fails_the_group_and_says_why(answer: Answer, options: dict[str, Any], words: str):
    with pytest.raises(ScoringError, match=words):
        judged(answer, **options)


def test_a_judge_that_does_not_answer_in_time_is_a_deadline_of_the_group():
    async def run() -> None:
        asked = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await reader.read()
            writer.close()

        listener = await asyncio.start_server(silent, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
        settings = RewardSettings(function="judge", timeout_s=0.2, options={"url": url, "model": "m"})
        [scorer] = make_scorers([settings])
        await start_scorers([scorer])
        with pytest.raises(ScoringDeadline, match=r"'judge': not every mark from http.* within 0\.2 s"):
            await scorer.score(msgspec.structs.replace(finished_group(TEXTS), prompt=ASKED))
        await scorer.close()
        listener.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "http://127.0.0.1:9/v1", "topic": "x"}, r"options\.topic: .*takes url, model, question, best, max_new_tokens"),
        ({"url": "http://127.0.0.1:9/v1", "best": 0}, r"options\.best: .*greater than 0"),
        ({"url": "http://127.0.0.1:9/v1", "question": "Well?"}, r"does not hold {completion}"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        make_scorers([RewardSettings(function="judge", options=options)])


def test_a_judge_without_a_server_is_refused_when_the_settings_are_loaded():
    with pytest.raises(ConfigError, match="a judge needs a server"):
        load_config([], ["--reward", "[{function = 'judge'}]"])


RUN_FILE = """
launch = "{launch}"
[model]
name = "builtin:tiny"
[data]
train = "builtin:sort_digits"
[rollout]
group_size = 2
max_new_tokens = 4
[trainer]
steps = 2
groups_per_step = 2
[[reward]]
function = "judge"
options = {{url = "{url}"}}
"""


def test_a_run_is_trained_by_a_judge_and_validate_says_when_it_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_file = tmp_path / "run.toml"

    async def run() -> None:
        marks = iter(range(10**6))
        async with server(lambda body: says(str(next(marks) % 11))) as (url, bodies):
            run_file.write_text(RUN_FILE.format(launch="inline", url=url))
            assert await asyncio.to_thread(cli.main, ["train", str(run_file), "--run.folder", str(tmp_path / "run"), "--json"]) == 0
            assert len(bodies) >= 2 * 2 * 2

    asyncio.run(run())
    capsys.readouterr()
    assert cli.main(["validate", str(run_file)]) != 0
    said = "".join(capsys.readouterr())
    assert "reward 'judge', options.url" in said and "is it running" in said
