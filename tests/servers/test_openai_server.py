"""`engine.type = "openai"` and a real server: vLLM's chat API, asked in words, answers as the embedded engine does; and what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from test_vllm_attached import command, free_port, key_of, started
from vllm_server import START_S, needs_vllm

from slipstream.cli.main import main
from slipstream.engines.vllm.client import Client
from slipstream.models.tiny import tiny_folder

pytestmark = needs_vllm

SERVER_CONTEXT = 128  # tokens, of `test_vllm_attached.command`
PROMPTS = ["sort 7391", "sort 4132", "sort 9506", "sort 8240", "sort 1234", "hello", "sort", "ünïcode 漢字"]


@pytest.fixture(scope="module")
def key_and_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A server of the built-in model, with its trained weights, its tokenizer and its chat template; the key it wants."""
    port = free_port()
    with started(command(tiny_folder(), port), tmp_path_factory.mktemp("server") / "log") as shell:
        key = key_of(shell)
        asyncio.run(_until_healthy(f"http://127.0.0.1:{port}", key))
        yield key, f"http://127.0.0.1:{port}/v1"


async def _until_healthy(address: str, key: str) -> None:
    client = Client(address, key=key)
    try:
        async with asyncio.timeout(START_S):
            await client.until_healthy(0.2)
    finally:
        await client.close()


@pytest.fixture
def over_server(key_and_url: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that ask it."""
    key, url = key_and_url
    monkeypatch.setenv("OPENAI_API_KEY", key)
    return ["--engine.type", "openai", "--engine.urls", json.dumps([url])]


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    settings = {
        "model": {"name": "builtin:tiny"},
        "data": {"train": "builtin:sort_digits", "eval": "builtin:sort_digits:eval"},
        "reward": [{"function": "exact"}],
        "rollout": {"max_new_tokens": 12},
        "engine": {"slots": 8, "max_context": 2 * SERVER_CONTEXT},
    }
    path.write_text(tomli_w.dumps(settings))
    return str(path)


def test_its_greedy_answers_are_the_embedded_engines(run_file: str, over_server: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    def answers(*settings: str) -> str:
        capfd.readouterr()
        assert main(["generate", run_file, *(word for prompt in PROMPTS for word in ("--prompt", prompt)), *settings]) == 0
        return capfd.readouterr().out

    inside = answers()
    assert answers(*over_server) == inside and len(set(inside.splitlines())) > len(PROMPTS) / 2


def test_an_evaluation_comes_to_the_same_numbers(run_file: str, over_server: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    def numbers(*settings: str) -> dict[str, object]:
        capfd.readouterr()
        assert main(["eval", run_file, "--limit", "40", "--json", *settings]) == 0
        return json.loads(capfd.readouterr().out.splitlines()[-1])

    inside, outside = numbers(), numbers(*over_server)
    assert 0 < inside["reward_mean"] < 1, "all answers are alike: equal numbers show nothing"
    assert outside == inside | {"model": outside["model"]}


@pytest.mark.parametrize(
    ("settings", "prompt", "words"),
    [
        (["--engine.model", "another"], "sort 7391", ("`another` does not exist", "engine.model a name that the server lists")),
        ([], "9" * SERVER_CONTEXT, (f"maximum context length is {SERVER_CONTEXT} tokens",)),
    ],
    ids=["a model that it does not have", "too long a prompt"],
)
def test_what_it_refuses_is_said_in_its_words(
    settings: list[str], prompt: str, words: tuple[str, ...], run_file: str, over_server: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", run_file, "--prompt", prompt, *over_server, *settings]) == 1
    said = capfd.readouterr().err
    assert all(each in said for each in words), said


def test_without_its_key_the_variable_is_named(
    run_file: str, over_server: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    assert main(["generate", run_file, "--prompt", "sort 7391", *over_server]) != 0
    assert "OPENAI_API_KEY" in capfd.readouterr().err
