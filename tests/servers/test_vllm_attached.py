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
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_harness import run_file, tables
from test_run_vllm import check_run
from transformers import AutoConfig
from vllm_server import ROOT, START_S, needs_vllm, tiny_model, vllm_python

from slipstream import train
from slipstream.config.load import load_config
from slipstream.engines.vllm import attach as attaching
from slipstream.engines.vllm import versions
from slipstream.engines.vllm.attach import KEY_VARIABLE, MODEL_KEYS, Needs, attach
from slipstream.engines.vllm.client import Refused
from slipstream.errors import ConfigError, ModelError

pytestmark = needs_vllm
MORE = "--dtype float32 --max-model-len 128 --max-num-seqs 16 --enforce-eager"


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


def ask(url: str, needs: Needs) -> str:
    async def main() -> str:
        found = await attach(url, needs, START_S)
        await found.client.close()
        assert found.notes == ()
        return found.model

    return asyncio.run(main())


def test_a_server_that_a_person_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, url = tiny_model(tmp_path / "model"), f"http://127.0.0.1:{(port := free_port())}"
    config = AutoConfig.from_pretrained(model)
    needs = Needs(128, 16, "slipstream_shared_memory", {key: getattr(config, key) for key in MODEL_KEYS})
    with started(command(model, port), tmp_path / "log") as shell:
        monkeypatch.setenv(KEY_VARIABLE, key_of(shell))
        assert ask(url, needs) == str(model)
        for wrong, error, words in (
            ({"max_context": 129}, ConfigError, "--max-model-len 128"),
            ({"slots": 17}, ConfigError, "--max-num-seqs"),
            ({"backend": "slipstream_files"}, ConfigError, "--weight-transfer-config slipstream_shared_memory"),
            ({"model": needs.model | {"hidden_size": 96}}, ModelError, "hidden_size 64 instead of 96"),
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
        settings: dict[str, Any] = tables(
            tmp_path / "run",
            launch="local",
            model={"name": str(model)},
            data={"eval": "builtin:sort_digits:eval"},
            engine={"type": "vllm", "urls": [url]},
            evaluation={"limit": 4, "every": 2},
            trainer={"steps": 4, "learning_rate": 1e-2},
            buffer={"max_staleness": 0},
        )
        train(load_config([run_file(tmp_path, settings)]))
        check_run(tmp_path / "run")
        assert ask(url, needs) == str(model), "the run has ended, the server has not"


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
            ask(url, Needs(128, 16, "slipstream_shared_memory", {}))
        monkeypatch.setattr(attaching, "_check_closed", lambda url: asyncio.sleep(0))
        with pytest.raises(ModelError, match="without slipstream's plugin"):
            ask(url, Needs(128, 16, "slipstream_shared_memory", {}))
