"""What can be checked of a run before it starts: everything that would stop it later, found at once.

Each check stands on the settings, or on what an earlier one found (rows, tokenizer); one that fails leaves the others to go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config.settings import Config, LossSettings, RewardSettings
from slipstream.errors import ConfigError, DataError, ModelError, RunFolderError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.config.frozen_models import FrozenModel
    from slipstream.config.load import LoadedConfig
    from slipstream.data import Data
    from slipstream.models.loading import ModelInfo
    from slipstream.models.memory import MemoryNeed

Row = dict[str, Any]


@dataclass(slots=True)
class Findings:
    """What the checks found. A fact that could not be found out is absent from `facts`."""

    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[SlipstreamError] = field(default_factory=list)

    @contextmanager
    def collect(self, where: str = "") -> Iterator[None]:
        """One check: its error is a problem beside the others."""
        try:
            yield
        except ConfigError as error:
            self.problems.append(ConfigError([f"{where}{problem}" for problem in error.problems]))
        except SlipstreamError as error:
            self.problems.append(type(error)(f"{where}{error}") if where else error)


def preflight(loaded: LoadedConfig, *, resumes: bool = False) -> Findings:
    """Check data, model, prompts, tools, rewards, loss, sinks, devices, memory and the run folder. `resumes`: the run is there already."""
    from slipstream.observe.sinks import check_installed

    config, found = loaded.config, Findings()
    with found.collect():
        check_installed(list(config.metrics.sinks))
    with found.collect():
        check_run_folder(config, resumes)
    data = _data(loaded, found)
    _check_devices(config, found)
    _check_server(config, found)
    _check_loss(config, found)
    _check_model(config, data, found)
    asyncio.run(_check_rewards(config, data, found))
    return found


def check_together(loaded: LoadedConfig, each: Sequence[Findings], *, resumes: bool = False) -> Findings:
    """What can be checked only of all experiments of a file: their memory, with one copy of the model, and the folder that holds theirs."""
    from slipstream.models.memory import check_memory

    found = Findings()
    with found.collect():
        check_run_folder(loaded.config, resumes)
    with found.collect():
        longest = max(findings.facts.get("longest_prompt_tokens", 0) for findings in each)
        found.facts |= memory_facts(check_memory(*(run.config for run in loaded.experiments), prompt_tokens=longest))
    return found


def memory_facts(memory: MemoryNeed | None) -> dict[str, Any]:
    return {"memory_bytes": None if memory is None else memory.parts, "memory": None if memory is None else str(memory)}


def check_run_folder(config: Config, resumes: bool = False) -> None:
    """The run folder's disk can hold a run; it is made only when the run starts, so its nearest existing parent is tried."""
    from slipstream.controller.run_folder import LEDGER, check_place, holds_experiments

    folder = Path(config.run.folder or "runs").absolute()
    if not resumes and ((folder / LEDGER).exists() or holds_experiments(folder)):
        raise RunFolderError(f"run.folder = {folder} already holds a run; resume it with --resume {folder}, or name another folder")
    check_place(next(path for path in (folder, *folder.parents) if path.exists()))


def _data(loaded: LoadedConfig, found: Findings) -> Data | None:
    from slipstream.data import load_data

    with found.collect():
        data = load_data(loaded.config, loaded.base_folder)
        found.facts |= {"train_rows": len(data.train), "eval_rows": len(data.eval)}
        found.notes += data.notes()
        return data
    return None


def _check_devices(config: Config, found: Findings) -> None:
    """The devices of engine and trainer are there."""
    from slipstream.models.loading import resolve_device

    named = {"engine.device": config.engine.device, "trainer.device": config.trainer.device}
    devices = {(key if device else "model.device"): device or config.model.device for key, device in named.items()}
    for key, device in devices.items():
        with found.collect(f"{key}: "):
            resolve_device(device)


def _check_server(config: Config, found: Findings) -> None:
    """The environment that a server is to be started from has a vLLM that was tested. Running servers are asked when the run starts."""
    if config.engine.type != "vllm" or config.engine.urls:
        return
    from slipstream.engines.vllm.environment import check_routing, find_environment

    with found.collect('engine.type = "vllm": '):
        environment = asyncio.run(find_environment(config.engine.python))
        found.facts["vllm"] = f"{environment.version} of {environment.python}"
        check_routing(config.rollout.keep_routing, environment)


def _check_loss(config: Config, found: Findings) -> None:
    """A person's own policy loss is imported and tried on a few tokens."""
    from slipstream.config.losses import resolve
    from slipstream.trainer.losses import policy_loss

    with found.collect():
        policy_loss(resolve(config.loss))


def _check_model(config: Config, data: Data | None, found: Findings) -> None:
    """Tokenizer and configuration are read, no weights; then the prompts are measured, and with them the memory."""
    from transformers import AutoConfig

    from slipstream.models.loading import load_tokenizer
    from slipstream.models.memory import check_memory
    from slipstream.models.support import check_supported

    with found.collect():
        tokenizer, info = load_tokenizer(config.model)
        found.notes += info.notes
        found.facts["vocabulary"] = info.vocab_size
        with found.collect(f"model.name = '{config.model.name}': "):
            model_config = AutoConfig.from_pretrained(info.source, trust_remote_code=False)
            check_supported(model_config)
            _check_routing(config, model_config)
            with found.collect():
                found.facts["adapter"] = _check_adapter(config, model_config)
        _check_frozen_models(config, found)
        longest = _check_prompts(config, data, tokenizer, info, found)
        found.facts |= memory_facts(check_memory(config, folder=info.source, prompt_tokens=longest))
        _check_weight_directory(config, Path(info.source), found)


def _check_weight_directory(config: Config, model: Path, found: Findings) -> None:
    """Weights that travel as files fit where they are to lie; the directory is made only when the run starts."""
    from slipstream.models.memory import weight_file_bytes
    from slipstream.weight_sync.weight_directory import check_room

    if config.weight_sync.transport == "files":
        needed = found.facts["weight_file_bytes"] = weight_file_bytes(config, model)
        place = Path(config.weight_sync.directory or config.run.folder or "runs").absolute()
        check_room(next(path for path in (place, *place.parents) if path.exists()), needed)


def _check_routing(config: Config, model_config: Any) -> None:
    """Routing that is asked for by name is there. Whether it can be replayed shows when the engine runs the model."""
    import torch
    from transformers import AutoModelForCausalLM

    from slipstream.models.routing import check_has_experts

    if config.rollout.keep_routing:
        with torch.device("meta"):
            check_has_experts(AutoModelForCausalLM.from_config(model_config))


def _check_adapter(config: Config, model_config: Any) -> str | None:
    """The layers that `[lora]` names are there; what is trained, in words."""
    if not config.lora.on:
        return None
    import torch
    from transformers import AutoModelForCausalLM

    from slipstream.models.lora import num_trained
    from slipstream.models.nf4 import check_saved, num_rounded

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    total = sum(p.numel() for p in model.parameters())
    words = f"adapter of rank {config.lora.rank}: {num_trained(model, config.lora):,} parameters are trained, {total:,} stay as they are"
    if config.model.quantize is None:
        return words
    check_saved(model, config.lora.modules_to_save)
    return f"{words}, {num_rounded(model):,} of them rounded to 4 bits"


def _check_frozen_models(config: Config, found: Findings) -> None:
    """The reference and the teacher speak of the same tokens; who will compute with them."""
    from slipstream.config.frozen_models import base_is_reference, frozen_models
    from slipstream.logprobs.loading import check_frozen_model

    stage = "read by the logprob stage" + ("" if config.launch == "inline" else ", a process of its own")
    if base_is_reference(config):
        words = f"loss.reference: the start model, {_reference_term(config.loss)}, the trainer's own base with the adapter off"
        found.facts.setdefault("frozen_models", []).append(words)
    for frozen in frozen_models(config):
        with found.collect():
            if frozen.settings != config.model:
                check_frozen_model(frozen, config)
            name = "the start model" if frozen.settings == config.model else frozen.settings.name
            who = "held by the trainer, which compares every logit" if frozen.array is None else stage
            found.facts.setdefault("frozen_models", []).append(f"{frozen.key}: {name}, {_learned_from(frozen, config.loss)}, {who}")


def _learned_from(frozen: FrozenModel, loss: LossSettings) -> str:
    if frozen.key == "loss.reference":
        return _reference_term(loss)
    return f"{loss.teacher_coefficient:g} x {loss.teacher_kl} KL"


def _reference_term(loss: LossSettings) -> str:
    return f"{loss.kl_coefficient:g} x {loss.reference_estimator} in the {loss.kl_in}"


def _check_prompts(config: Config, data: Data | None, tokenizer: Any, info: ModelInfo, found: Findings) -> int:
    """The longest prompt in tokens, 0 where none could be rendered."""
    from slipstream.launch.assemble_worker import context_limit
    from slipstream.rollout.rendering import Renderer

    longest = 0
    with found.collect():
        limit = found.facts["context_tokens"] = context_limit(config, info)
        renderer = Renderer(tokenizer, limit)
        schemas = _check_tools(config, renderer)
        if data is not None:
            longest = found.facts["longest_prompt_tokens"] = measure_prompts(config, data, renderer, schemas, found)
    return longest


def _check_tools(config: Config, renderer: Any) -> tuple[dict[str, Any], ...]:
    """The tools load, and the chat template takes their answers; their schemas, which stand in every prompt."""
    from slipstream.environments.tools import load_tools

    if config.rollout.environment != "tools":
        return ()
    tools = load_tools(tuple(config.rollout.tools))
    schemas = tuple(tool.schema for tool in tools)
    renderer.continuation(-1, [{"role": "tool", "content": "4", "name": tools[0].name}], schemas)
    return schemas


def measure_prompts(config: Config, data: Data, renderer: Any, schemas: tuple[dict[str, Any], ...], found: Findings) -> int:
    """Render every prompt; the longest in tokens. DataError where no training prompt can be used; a note where some cannot."""
    from slipstream.data import render_messages

    longest = 0
    for name, rows in (("data.train", data.train), ("data.eval", data.eval)):
        unusable = []
        for number, row in enumerate(rows, start=1):
            try:
                messages = render_messages(row, config.data, f"row {number}")
                longest = max(longest, len(renderer.prompt(messages, config.rollout.max_new_tokens, schemas)))
            except (DataError, ModelError) as error:
                text = str(error)
                unusable.append(text if text.startswith("row ") else f"row {number}: {text}")
        if unusable and len(unusable) == len(rows):
            raise DataError(f"{name}: no prompt fits or can be rendered, e.g. {unusable[0]}. {_REMEDY}")
        if unusable:
            found.notes.append(f"{name}: {len(unusable)} of {len(rows)} prompts cannot be used and would be skipped, e.g. {unusable[0]}")
    return longest


_REMEDY = "Raise engine.max_context, lower rollout.max_new_tokens, or mend the data"


async def _check_rewards(config: Config, data: Data | None, found: Findings) -> None:
    """Import every reward in the process that would run it."""
    results = await asyncio.gather(*(_load_reward(reward) for reward in config.reward), return_exceptions=True)
    for index, result in enumerate(results):
        with found.collect(f"reward.{index}: "):
            if result is not None:
                raise result
            if data is not None and data.train:
                _check_answer_column(config.reward[index], data.train[0])


async def _load_reward(reward: RewardSettings) -> None:
    from slipstream.scoring.score import close_scorers, start_scorers
    from slipstream.scoring.scorers import make_scorers

    scorers = make_scorers([reward])
    try:
        await start_scorers(scorers)
    finally:
        await close_scorers(scorers)


def _check_answer_column(reward: RewardSettings, row: Row) -> None:
    """What a built-in compares with is a column of the data; without it every group would fail."""
    default = {"exact": "answer", "number": "answer", "regex": None}.get(reward.function)
    column = reward.options.get("column", default) if reward.function in ("exact", "number", "regex") else None
    if column is not None and column not in row:
        raise ConfigError(
            f"'{reward.function}' compares with the column '{column}', which the first row does not have; it has: "
            f"{', '.join(sorted(row))}. Set options.column of the reward, or data.columns"
        )
