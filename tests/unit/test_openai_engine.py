"""A server with the OpenAI API as an engine: what is asked, what becomes of the answer, and of the server's failures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from openai_fake import refuses, says, server

from slipstream.cli import main as cli
from slipstream.config.load import load_config
from slipstream.engines.openai import OpenAIClient
from slipstream.errors import ConfigError, EngineRefused, RunFailed
from slipstream.openai_api import find_model
from slipstream.protocols import Generation
from slipstream.types import GenerateRequest, Purpose, Sampling, StopReason

pytestmark = pytest.mark.anyio  # its plugin comes with the openai package
STOP = 0
REQUEST = GenerateRequest(
    group_id=0,
    sample=0,
    attempt=0,
    turn=0,
    purpose=Purpose.EVAL,
    token_ids=np.array([5], np.int32),
    prompt_length=1,
    num_sampled=0,
    sampling=Sampling(temperature=0.0, max_new_tokens=8),
    stop_token_ids=(STOP,),
    messages=({"role": "user", "content": "2 + 2 ="},),
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def ask(url: str, request: GenerateRequest = REQUEST, **options: Any) -> Generation:
    client = OpenAIClient(
        [url], "m", slots=4, timeout_s=30, encode=lambda text: [100 + ord(c) for c in text], stop_token_id=STOP, **options
    )
    into = Generation(len(request.token_ids))
    try:
        await client.generate(request, into)
    finally:
        await client.close()
    return into


async def test_a_conversation_goes_in_words_and_the_answer_gets_ids():
    async with server(lambda body: says("4")) as (url, bodies):
        into = await ask(url)
    assert bodies == [{"model": "m", "messages": [{"role": "user", "content": "2 + 2 ="}], "max_tokens": 8, "temperature": 0.0}]
    assert (into.token_ids, into.logprobs, into.stop_reason) == ([100 + ord("4"), STOP], [0.0, 0.0], StopReason.STOP)
    assert [(span.start, span.end) for span in into.spans] == [(1, 3)]


async def test_sampling_settings_are_sent_where_they_differ_from_the_defaults():
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, max_new_tokens=8, stop_strings=("</a>",))
    async with server(lambda body: says("<a>4", stop_reason="</a>")) as (url, bodies):
        into = await ask(url, msgspec.structs.replace(REQUEST, sampling=sampling))
    assert {key: bodies[0][key] for key in ("temperature", "top_p", "top_k", "min_p", "stop")} == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "stop": ["</a>"],
    }
    assert "".join(chr(token - 100) for token in into.token_ids[:-1]) == "<a>4</a>"  # the stop string that the server cut off is back


@pytest.mark.parametrize(("finish_reason", "expected"), [("length", StopReason.LENGTH), ("content_filter", StopReason.ABORT)])
async def test_an_answer_that_was_cut_off_has_no_end_token(finish_reason, expected):
    async with server(lambda body: says("4", finish_reason)) as (url, _):
        into = await ask(url)
    assert (into.token_ids, into.stop_reason) == ([100 + ord("4")], expected)


async def test_a_tool_s_answer_goes_as_the_user_s():
    """A message of role tool without a call that the API knows of is refused by servers."""
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "call"}, {"role": "tool", "content": "7"})
    async with server(lambda body: says("4")) as (url, bodies):
        await ask(url, msgspec.structs.replace(REQUEST, messages=messages))
    assert [message["role"] for message in bodies[0]["messages"]] == ["user", "assistant", "user"]


async def test_a_server_in_trouble_is_asked_again():
    answers = [refuses(500), refuses(429), says("4")]
    async with server(lambda body: answers.pop(0)) as (url, bodies):
        assert (await ask(url)).stop_reason is StopReason.STOP
    assert len(bodies) == 3


async def test_a_request_that_is_refused_fails_alone_and_is_not_tried_again():
    async with server(lambda body: refuses(400, "the prompt is too long")) as (url, bodies):
        with pytest.raises(EngineRefused, match="the prompt is too long"):
            await ask(url)
    assert len(bodies) == 1


@pytest.mark.parametrize(("status", "advice"), [(401, "OPENAI_API_KEY"), (403, "OPENAI_API_KEY"), (404, "base URLs")])
async def test_what_concerns_every_request_ends_it_all(status, advice):
    async with server(lambda body: refuses(status)) as (url, _):
        with pytest.raises(RunFailed, match=advice):
            await ask(url)


async def test_a_server_that_is_not_there_is_named():
    with pytest.raises(EngineRefused, match=r"127\.0\.0\.1:9"):
        await ask("http://127.0.0.1:9/v1", num_retries=0)
    with pytest.raises(ConfigError, match="is it running"):
        await find_model("http://127.0.0.1:9/v1", None, "engine.urls", "engine.model")


async def test_models_that_want_the_newer_name_of_the_limit_get_it():
    def answer(body: dict[str, Any]) -> web.Response | dict[str, Any]:
        if "max_tokens" in body:
            return refuses(400, "Unsupported parameter", param="max_tokens", code="unsupported_parameter")
        return says("4")

    async with server(answer) as (url, bodies):
        assert (await ask(url)).stop_reason is StopReason.STOP
    assert [body.get("max_completion_tokens") for body in bodies] == [None, 8]


async def test_the_only_model_of_a_server_needs_no_name():
    async with server(lambda body: says("")) as (url, _):
        assert await find_model(url, None, "engine.urls", "engine.model") == "m"
        assert await find_model(url, "other", "engine.urls", "engine.model") == "other"
    async with server(lambda body: says(""), models=("a", "b")) as (url, _):
        with pytest.raises(ConfigError, match=r"engine\.model.*2 models \(a, b\)"):
            await find_model(url, None, "engine.urls", "engine.model")


OVERRIDES = ["--engine.type", "openai", "--engine.urls", '["http://127.0.0.1:9/v1"]', "--reward", "[{function = 'exact'}]"]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ([], "cannot be trained"),
        (["--engine.server_args", '["--port"]'], "starts no server"),
        (["--engine.urls", '["unix:/x"]'], "is no base URL"),
        (["--engine.urls", "[]"], "needs urls"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(more, problem):
    with pytest.raises(ConfigError, match=problem):
        load_config([], [*OVERRIDES, *more])


def test_settings_for_sampling_alone_are_fine_and_its_model_is_its_alone():
    load_config([], OVERRIDES, trains=False)
    with pytest.raises(ConfigError, match=r"engine\.model"):
        load_config([], ["--engine.model", "m", "--reward", "[{function = 'exact'}]"])


RUN_FILE = """
[model]
name = "builtin:tiny"
[data]
train = "rows.jsonl"
eval = "rows.jsonl"
[rollout]
max_new_tokens = 8
[[reward]]
function = "exact"
"""


async def test_eval_scores_a_server_s_answers(tmp_path, capsys):
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(4)))
    async with server(lambda body: says("1")) as (url, bodies):
        arguments = ["eval", str(tmp_path / "run.toml"), "--engine.type", "openai", "--engine.urls", f'["{url}"]', "--json"]
        assert await asyncio.to_thread(cli.main, arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["reward_mean"], result["scored"], result["failed"]) == (0.25, 4, 0)
    assert result["model"] == f"the model at {url}"
    assert sorted(body["messages"][-1]["content"] for body in bodies) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("option", [["--untrained"], ["--version", "3"], ["--model", "x"]])
def test_eval_of_a_server_refuses_what_names_other_weights(option, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(RUN_FILE)
    assert cli.main(["eval", str(tmp_path / "run.toml"), *OVERRIDES[:4], *option]) == 2
    assert "the server has its own model" in capsys.readouterr().err
