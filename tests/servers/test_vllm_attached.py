"""A run attaches to a vLLM server that a person started as docs/vllm.md says; what is said of one that will not do."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_run import LiveRun
from run_harness import run_file, tables
from test_engine_killed import engines
from test_run_vllm import check_run
from test_vllm_killed import check_pool, half_generated, vllm_run
from transformers import AutoConfig
from vllm_server import LABELS, ROOT, START_S, needs_vllm, tiny_model, vllm_python

from slipstream import train
from slipstream.config.load import load_config
from slipstream.controller.controller import COMMIT_WITHIN_S
from slipstream.controller.ledger import LedgerReader
from slipstream.engines.vllm import attach as attaching
from slipstream.engines.vllm import versions
from slipstream.engines.vllm.arrays import Wants
from slipstream.engines.vllm.attach import KEY_VARIABLE, MODEL_KEYS, Needs, attach
from slipstream.engines.vllm.client import Refused
from slipstream.errors import ConfigError, ModelError

pytestmark = needs_vllm
MORE = "--dtype float32 --max-model-len 128 --max-num-seqs 17 --enforce-eager"


def command(model: Path, port: int) -> str:
    """The block of docs/vllm.md that starts a server."""
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "vllm serve" in block]
    python = vllm_python()
    assert python is not None
    block = block.replace(".venv-vllm/bin", str(Path(python).parent)).replace("MODEL", str(model)).replace("8000", str(port))
    return f"set -e\n{block.rstrip()} {MORE}\n"


@contextmanager
def started(script: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server as a person's shell starts it; its key is in the shell alone."""
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with log.open("wb") as output:
        environment = {**os.environ, "PATH": paths, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
        shell = subprocess.Popen(["bash", "-c", script], stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        yield shell
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def with_key(script: str, key: str) -> str:
    """The script with this key instead of one that is made up."""
    assert "$(openssl rand -hex 32)" in script
    return script.replace("$(openssl rand -hex 32)", key)


def key_of(shell: subprocess.Popen[bytes]) -> str:
    """The key that the shell made, from the server's environment."""
    deadline = time.monotonic() + START_S
    while True:
        assert shell.poll() is None and time.monotonic() < deadline
        for pid in [shell.pid, *children(shell.pid)]:
            found = re.search(rb"SLIPSTREAM_VLLM_KEY=(\w+)", Path(f"/proc/{pid}/environ").read_bytes())
            if found:
                return found[1].decode()
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def needs_of(model: Path) -> Needs:
    config = AutoConfig.from_pretrained(model)
    wants = Wants(keep_routing=None, top_k=0, vocab_size=config.vocab_size, samples_evaluations=False)
    return Needs(128, 16, "slipstream_shared_memory", {key: getattr(config, key) for key in MODEL_KEYS}, wants)


def ask(url: str, needs: Needs, note: str = "") -> str:
    async def main() -> str:
        found = await attach(url, needs, LABELS, wait_s=START_S)
        await found.client.close()
        assert len(found.notes) == bool(note) and note in "".join(found.notes)
        return found.model

    return asyncio.run(main())


def test_a_server_that_a_person_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, url = tiny_model(tmp_path / "model"), f"http://127.0.0.1:{(port := free_port())}"
    needs = needs_of(model)
    with started(command(model, port), tmp_path / "log") as shell:
        monkeypatch.setenv(KEY_VARIABLE, key_of(shell))
        assert ask(url, needs) == str(model)
        for wrong, error, words in (
            ({"max_context": 129}, ConfigError, "--max-model-len 128"),
            ({"slots": 17}, ConfigError, "--max-num-seqs"),
            ({"backend": "slipstream_files"}, ConfigError, "--weight-transfer-config slipstream_shared_memory"),
            ({"model": needs.model | {"hidden_size": 96}}, ModelError, "hidden_size 64 instead of 96"),
            ({"wants": replace(needs.wants, top_k=20)}, ConfigError, f"--max-logprobs {needs.wants.vocab_size}"),
            ({"wants": replace(needs.wants, keep_routing=True)}, ConfigError, "--enable-return-routed-experts"),
        ):
            with pytest.raises(error, match=words):
                ask(url, replace(needs, **wrong))
        with monkeypatch.context() as patch:
            patch.setenv(KEY_VARIABLE, "another")
            with pytest.raises(Refused, match="wants another key"):
                ask(url, needs)
        with monkeypatch.context() as patch:
            patch.setattr(versions, "TESTED", {"0.1.0": "none"})
            with pytest.raises(ModelError, match=r"has vLLM 0\.32\.0; slipstream was tested with 0\.1\.0"):
                ask(url, needs)
        for name, sync in (("direct", {}), ("copied", {"transport": "collective", "payload": "delta"})):
            settings: dict[str, Any] = tables(
                tmp_path / name,
                launch="local",
                model={"name": str(model)},
                data={"eval": "builtin:sort_digits:eval"},
                engine={"type": "vllm", "urls": [url]},
                evaluation={"limit": 4, "every": 2},
                trainer={"steps": 4, "learning_rate": 1e-2},
                buffer={"max_staleness": 0},
                weight_sync=sync,
            )
            train(load_config([run_file(tmp_path, settings)]))
            check_run(tmp_path / name)
        assert ask(url, needs, "was engine-0 of run") == str(model), "the runs have ended, the server has not"


def test_a_server_that_is_open_and_without_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command would be without its last options, with vLLM's own key, and with nothing but what vllm-cpu lacks on the path."""
    model, port = tiny_model(tmp_path / "model"), free_port()
    script = command(model, port)
    for option in ("--weight-transfer-config '.*?'", r"--worker-extension-cls \S+", r"--middleware \S+"):
        script, count = re.subn(option, "", script)
        assert count == 1
    script = script.replace("export SLIPSTREAM", "export PYTHONPATH=${PYTHONPATH#*:} SLIPSTREAM").rstrip() + " --api-key sesame\n"
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    url = f"http://127.0.0.1:{port}"
    with started(script, tmp_path / "log"):
        with pytest.raises(ConfigError, match="/is_paused without a key"):
            ask(url, Needs(128, 16, "slipstream_shared_memory", {}, Wants(None, 0, 1, False)))
        monkeypatch.setattr(attaching, "_check_closed", lambda url: asyncio.sleep(0))
        with pytest.raises(ModelError, match="without slipstream's plugin"):
            ask(url, Needs(128, 16, "slipstream_shared_memory", {}, Wants(None, 0, 1, False)))


def stop_amid_generation(run: LiveRun, shell: subprocess.Popen[bytes]) -> None:
    """Have the server of engine-0 stand still while rollouts have tokens of it: what it had sent has been read then."""
    while True:
        run.until(lambda: half_generated(run, "engine-0"))
        os.killpg(shell.pid, signal.SIGSTOP)
        time.sleep(2 * COMMIT_WITHIN_S)
        if half_generated(run, "engine-0"):
            return
        os.killpg(shell.pid, signal.SIGCONT)


def test_a_server_is_added_another_is_killed_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are somebody else's: the run goes on at the one, and waits for the other."""
    model, ports = tiny_model(tmp_path / "model"), (free_port(), free_port())
    first, second = (f"http://127.0.0.1:{port}" for port in ports)
    scripts = [with_key(command(model, port), "sesame") for port in ports]
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    with started(scripts[1], tmp_path / "second.log"), ExitStack() as held:
        shell = held.enter_context(started(scripts[0], tmp_path / "first.log"))
        for url in (first, second):
            assert ask(url, needs_of(model)) == str(model)
        with LiveRun(vllm_run(tmp_path, urls=[first], slots=8)) as run:
            run.until(lambda: run.steps() >= 1, START_S)
            with pytest.raises(AssertionError, match="name it with --url"):
                engines(run, "add")
            assert engines(run, "add", "--url", second).startswith("engine-1 serves at version ")
            stop_amid_generation(run, shell)
            held.close()
            run.until(lambda: run.state("engine-0").phase.startswith("wait for the server"))
            steps = run.steps()
            run.until(lambda: run.steps() >= steps + 2)
            held.enter_context(started(scripts[0], tmp_path / "first-again.log"))
            run.until(lambda: engines(run, "list").startswith("engine-0  at version"), START_S)
            steps = run.steps()
            run.until(lambda: run.steps() >= steps + 4)
            run.process.send_signal(signal.SIGINT)
            assert run.ended() == 0, run.output
    check_pool(tmp_path / "run" / "ledger.sqlite", dead="engine-0", alive="engine-1")


def run_id(run: LiveRun) -> str:
    with LedgerReader.open(run.folder / "ledger.sqlite") as ledger:
        return ledger.last_start.run_id


def test_a_server_that_a_second_run_takes_ends_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next token, and without trying to get it back: no token of the one run's weights is taken for one of the other's."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    files = [vllm_run(tmp_path / name, urls=[url], slots=8) for name in ("first", "second")]
    script = with_key(command(tmp_path / "first" / "model", port), "sesame")
    with started(script, tmp_path / "server.log"), LiveRun(files[0]) as first:
        first.until(lambda: first.steps() >= 1, START_S)
        with LiveRun(files[1]) as second:
            second.until(lambda: first.process.poll() is not None, START_S)
            assert first.ended() == 1
            second.until(lambda: second.steps() >= 2, START_S)
            second.process.send_signal(signal.SIGINT)
            assert second.ended() == 0, second.output
            ids = [run_id(run) for run in (first, second)]
            assert f"the server has been taken by engine-0 of run {ids[1]}" in first.output
            assert f"was engine-0 of run {ids[0]} before" in second.output
