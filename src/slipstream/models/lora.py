"""LoRA adapters: low-rank products beside the linear layers of a frozen model, made and stored by peft.

    y = W x + scale B (A x)        A [rank, inputs], B [outputs, rank]: trained;   W: frozen, the bytes that were loaded

peft puts its layers into the transformers model in place, so body, head, packing, routing and probe see the model that they know. An
engine that is sent the adapter alone has the same layers and computes the same sums as the trainer; `merged` folds the products into whole
weights for everything else (payload = "full", `slipstream export --merged`). The base is kept apart and merged weights are made from it
each time, so nothing drifts. Source: Hu et al. 2021, arXiv:2106.09685; DoRA: Liu et al. 2024, arXiv:2402.09353.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from slipstream.checkpoint_files import fsync, write_bytes
from slipstream.config.settings import LoraSettings, ModelSettings
from slipstream.errors import CheckpointError, ModelError
from slipstream.models.nf4 import base_tensors, check_saved
from slipstream.tensors import LazyTensors, Made, outline, overwrite
from slipstream.weight_sync.packing import OnBase, checksum

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import Linear as LoraLinear
    from transformers import PreTrainedModel

NAME = "default"  # peft's name for the one adapter
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # peft's names for the files
_LINEAR = (nn.Linear, Conv1D)


class Adapter:
    """The adapter in a model, whose weights it freezes. B starts at 0 (with DoRA, magnitudes at those of W): the model is still the base.

    `model` is the transformers model itself, changed in place.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig):
        from peft import get_peft_model, get_peft_model_state_dict

        self.model = model
        self.base = base_tensors(model)  # as before it had an adapter
        self.config = config
        self._peft = get_peft_model(model, config)
        self.frozen = tuple(p for p in model.parameters() if not p.requires_grad)
        state = get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        self.tensors: dict[str, Tensor] = {name: tensor.detach() for name, tensor in state.items()}  # live ones, by peft's names

    @classmethod
    def of(cls, model: PreTrainedModel, settings: LoraSettings, base: ModelSettings) -> Adapter:
        """A new one. ModelError where the settings name what the model does not have; A is drawn from torch's global generator."""
        return cls(model, peft_config(model, settings, base))

    @classmethod
    def read(cls, model: PreTrainedModel, folder: Path) -> Adapter:
        """The one in a folder that `write` or peft has written. CheckpointError where it cannot be read or does not fit."""
        from peft import LoraConfig

        try:
            config: LoraConfig = LoraConfig.from_pretrained(str(folder))  # pyright: ignore[reportAssignmentType]
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder / CONFIG} cannot be read: {error}") from error
        config.inference_mode = False
        adapter = cls(model, config)
        adapter.load(folder)
        return adapter

    @cached_property
    def base_checksum(self) -> str:
        """Of the frozen weights, read once: nothing writes them."""
        return checksum(self.base)

    @property
    def sent(self) -> OnBase:
        """What travels with payload = "adapter": the trained tensors, and which base they lie on."""
        return OnBase(self.tensors, self.base_checksum)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())

    def off(self) -> AbstractContextManager[None]:
        """Within, the model is its base."""
        return self._peft.disable_adapter()

    def merged(self) -> LazyTensors:
        """Whole weights under the base's names, in its dtypes: those with an adapter are computed when they are asked for, in float32; the
        others are the base's own."""
        from peft.tuners.lora import Linear as LoraLinear
        from peft.utils.other import ModulesToSaveWrapper

        out = dict(self.base.entries)
        outlines = self.base.outlines()
        for name, module in self.model.named_modules():
            if isinstance(module, LoraLinear):
                base = f"{name}.weight"
                like = outlines[base]
                out[base] = Made(outline(like.shape, like.dtype), partial(_merged_weight, module, self.base, base))
            elif isinstance(module, ModulesToSaveWrapper):
                out |= {f"{name}.{key}": tensor for key, tensor in module.modules_to_save[NAME].state_dict().items()}
        return LazyTensors(out)

    def remove(self) -> None:
        """Take peft's layers out again: the model is its base, as it was loaded."""
        from peft.utils.other import ModulesToSaveWrapper

        originals = {name: m.original_module for name, m in self.model.named_modules() if isinstance(m, ModulesToSaveWrapper)}
        self._peft.unload()  # which leaves the trained copies where they are
        for name, module in originals.items():
            self.model.set_submodule(name, module)

    @torch.no_grad()
    def perturb(self, seed: int = 0) -> None:
        """Small random numbers in every B: for proving that a model with this adapter runs right, which 0 would hide."""
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.tensors.items():
            if ".lora_B." in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.02)

    # ---- files, as peft has them

    def write(self, folder: Path) -> None:
        """A new folder that `peft.PeftModel.from_pretrained` loads, synced to disk. OSError where the disk refuses."""
        write_adapter(folder, self.config, self.tensors)
        fsync(folder / TENSORS)
        fsync(folder)

    def load(self, folder: Path) -> None:
        """Take the tensors of such a folder; CheckpointError, before any is touched, where they do not fit."""
        try:
            given = load_file(folder / TENSORS)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{folder / TENSORS} cannot be read: {error}") from error
        overwrite(self.tensors, given, folder / TENSORS)


def write_adapter(folder: Path, config: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
    """A new folder as peft has it. OSError where the disk refuses."""
    folder.mkdir()
    settings = {**config.to_dict(), "inference_mode": True}
    settings = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
    write_bytes(folder / CONFIG, json.dumps(settings, indent=2, sort_keys=True).encode())
    try:
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, folder / TENSORS, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, as safetensors says it
        raise OSError(f"{folder / TENSORS}: {error}") from error


@torch.no_grad()
def _merged_weight(layer: LoraLinear, tensors: LazyTensors, name: str) -> Tensor:
    """W + scale B A, with DoRA scaled to its magnitudes: computed in float32, rounded once to the base's dtype."""
    base = tensors[name]
    weight = base.float() + layer.get_delta_weight(NAME).float()
    if layer.use_dora.get(NAME):
        magnitude = layer.lora_magnitude_vector[NAME].weight.float()
        outputs = 1 if layer.fan_in_fan_out else 0
        weight *= (magnitude / weight.norm(dim=1 - outputs)).unsqueeze(1 - outputs)  # pyright: ignore[reportOperatorIssue]
    return weight.to(base.dtype)


# ---- from settings to what peft is asked for -----------------------------------------------------------------------------------


def peft_config(model: PreTrainedModel, settings: LoraSettings, base: ModelSettings) -> LoraConfig:
    """ModelError where the settings name what the model does not have. The model may be without weights, on the meta device."""
    from peft import LoraConfig

    targets = find_targets(model, settings)
    if base.quantize is not None:
        check_saved(model, settings.modules_to_save)
    named = base.name if "/" in base.name and not Path(base.name).exists() else model.config.name_or_path
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=named,
        revision=base.revision,
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  a factor
        target_modules=_short(model, targets),
        modules_to_save=list(settings.modules_to_save) or None,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        fan_in_fan_out=all(isinstance(model.get_submodule(name), Conv1D) for name in targets),
    )


def find_targets(model: PreTrainedModel, settings: LoraSettings) -> list[str]:
    """The whole names of the linear layers that get an adapter, in the model's order. ModelError that says what is wrong with a name."""
    linear = [name for name, module in model.named_modules() if isinstance(module, _LINEAR)]
    head, tied = _head_name(model), _tied_names(model)
    for name in settings.modules_to_save:
        _check_saved(model, name, tied)
    if settings.targets == "all-linear":
        found = [name for name in linear if name != head and not _any_matches(settings.modules_to_save, name)]
        if not found:
            raise ModelError(f'lora.targets = "all-linear", but {type(model).__name__} has no linear layer beside its head')
        return found
    for target in settings.targets:
        if not any(_matches(target, name) for name in linear):
            raise ModelError(f'lora.targets: "{target}" {_why_not(model, target, linear)}')
    found = [name for name in linear if _any_matches(settings.targets, name)]
    if shared := [name for name in found if name in tied]:
        raise ModelError(
            f'lora.targets: "{shared[0]}" and the embedding are one tensor in this model, and a merged adapter would change both'
        )
    if twice := [name for name in found if _any_matches(settings.modules_to_save, name)]:
        raise ModelError(f'"{twice[0]}" is in lora.targets and in lora.modules_to_save; it is trained either way, leave it out of one')
    return found


def num_trained(model: PreTrainedModel, settings: LoraSettings) -> int:
    """Parameters of the adapter that the settings ask for. ModelError as `find_targets`."""
    total = 0
    for name in find_targets(model, settings):
        shape = model.get_parameter(f"{name}.weight").shape
        outputs = shape[1 if isinstance(model.get_submodule(name), Conv1D) else 0]
        total += settings.rank * sum(shape) + (outputs if settings.dora else 0)
    saved = [module for name, module in model.named_modules() if _any_matches(settings.modules_to_save, name)]
    return total + sum(p.numel() for module in saved for p in module.parameters())


def _check_saved(model: PreTrainedModel, name: str, tied: Sequence[str]) -> None:
    found = [whole for whole, _ in model.named_modules() if _matches(name, whole)]
    if not found:
        near = _nearest(name, [whole for whole, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))])
        raise ModelError(f'lora.modules_to_save: "{name}" is no module of {type(model).__name__}; {near}')
    if shared := [whole for whole in found if any(inside == whole or inside.startswith(f"{whole}.") for inside in tied)]:
        reason = "embedding and head are one tensor, and a copy of one would take them apart"
        raise ModelError(f'lora.modules_to_save: "{shared[0]}": in this model {reason}; leave it out')


def _why_not(model: PreTrainedModel, target: str, linear: Sequence[str]) -> str:
    """Why the name is no linear layer, as the end of a sentence."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts") and (_matches(target, name) or target in dict(module.named_parameters())):
            return (
                f"is of the experts ({name}), which are one tensor each for all of them here: an adapter needs linear layers. "
                'Leave it out; "all-linear" adapts attention and whatever else is linear'
            )
        if _matches(target, name):
            return f"is a {type(module).__name__}, not a linear layer; lora.modules_to_save trains it whole"
    return f"is no linear layer of {type(model).__name__}; {_nearest(target, linear)}"


def _nearest(name: str, names: Sequence[str]) -> str:
    last = list(dict.fromkeys(whole.rpartition(".")[2] for whole in names if whole))
    near = difflib.get_close_matches(name, last, n=1)
    hint = f', did you mean "{near[0]}"?' if near else ""
    return f"it has {', '.join(last)}{hint}"


def _matches(name: str, whole: str) -> bool:
    return whole == name or whole.endswith(f".{name}")


def _any_matches(names: Sequence[str], whole: str) -> bool:
    return any(_matches(name, whole) for name in names)


def _short(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """The last parts of the names where they name the same layers and no others, else the whole names."""
    last = sorted({name.rpartition(".")[2] for name in targets})
    named = [name for name, module in model.named_modules() if isinstance(module, _LINEAR) and _any_matches(last, name)]
    return last if named == list(targets) else list(targets)


def _head_name(model: PreTrainedModel) -> str | None:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def _tied_names(model: PreTrainedModel) -> list[str]:
    """Embedding and head where they share one tensor."""
    head, lookup = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or getattr(head, "weight", None) is not getattr(lookup, "weight", None):
        return []
    return [name for name, module in model.named_modules() if module in (head, lookup)]
