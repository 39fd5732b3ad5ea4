"""A base in 4 bits: rounded once and alike in every role; held packed it computes, learns and merges as held whole."""

from __future__ import annotations

import logging
from pathlib import Path

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from engine_harness import Driver, make_engine
from engine_harness import tiny_model as engine_model
from test_engine_trainer import LENGTHS, SAMPLES, TEMPERATURES, sample_group
from test_lora import gradients, trainer_of
from trainer_models import make_batch, tiny_model

from slipstream.config.settings import LoraSettings, ModelSettings
from slipstream.errors import CheckpointError, ModelError
from slipstream.models.attention import attach
from slipstream.models.loading import load_model
from slipstream.models.lora import Adapter, find_targets
from slipstream.models.nf4 import Nf4Linear, base_tensors, check_saved, num_rounded, round_layers
from slipstream.models.one_base import over_same_tensors
from slipstream.trainer.checkpoint import load_checkpoint, write_checkpoint
from slipstream.trainer.packing import pack
from slipstream.trainer.token_table import token_table
from slipstream.types import Batch
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import WeightSet, checksum
from slipstream.weight_sync.shared_memory import MemoryPublisher

CPU = torch.device("cpu")
BASE = ModelSettings(device="cpu", quantize="nf4")
FLOOR = 1e-5  # nats: the gap of float32 passes over the same weights
VARIANTS = {"plain": {}, "dora": {"dora": True}, "some layers, norms": {"targets": ["q_proj"], "modules_to_save": ["input_layernorm"]}}


def adapted(model, packed: bool, **lora) -> Adapter:
    """The model rounded, with an adapter that is not 0; its trained numbers do not depend on `packed`."""
    round_layers(model, CPU if packed else None)
    torch.manual_seed(1)
    adapter = Adapter.of(model, LoraSettings(**{"rank": 4, **lora}), BASE)
    adapter.perturb()
    return adapter


def both(dtype: torch.dtype = torch.float32, **lora) -> tuple[Adapter, Adapter]:
    """(as the trainer holds it, as an engine does)"""
    return adapted(tiny_model("llama", 0, dtype), True, **lora), adapted(tiny_model("llama", 0, dtype), False, **lora)


# ---- rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_rounded_as_bitsandbytes_does_and_nothing_else_is(dtype: torch.dtype) -> None:
    given, whole, packed = (tiny_model("llama", 0, dtype) for _ in range(3))
    round_layers(whole)
    round_layers(packed, CPU)
    before, values = given.state_dict(), base_tensors(packed)
    assert list(values) == list(before)
    linear = [name for name in before if name.endswith("_proj.weight")]
    assert len(linear) == 2 * 7
    for name, weight in before.items():
        if name in linear:
            codes, scales = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
            weight = bnb.dequantize_4bit(codes, scales)
        assert torch.equal(whole.state_dict()[name], weight) and torch.equal(values[name], weight) and values[name].dtype == dtype, name
    assert num_rounded(given) == sum(before[name].numel() for name in linear)


def test_a_tensor_that_two_layers_share_is_rounded_once_and_stays_one() -> None:
    def model():
        made = tiny_model()
        first, second = made.model.layers
        second.mlp.up_proj.weight = first.mlp.up_proj.weight
        return made

    whole, packed = model(), model()
    round_layers(whole)
    round_layers(packed, CPU)
    codes, scales = bnb.quantize_4bit(model().model.layers[0].mlp.up_proj.weight, quant_type="nf4", compress_statistics=True)
    assert torch.equal(whole.model.layers[1].mlp.up_proj.weight, bnb.dequantize_4bit(codes, scales))
    assert checksum(base_tensors(packed)) == checksum(whole), "the ties differ"


def test_every_role_loads_the_same_base() -> None:
    trainers, _, info = load_model(BASE, keep_codes=True)
    engines, plain = load_model(BASE)[0], load_model(ModelSettings(device="cpu"), keep_codes=True)[0]
    assert checksum(base_tensors(trainers)) == checksum(engines) != checksum(plain)
    assert not any(isinstance(module, Nf4Linear) for module in (*engines.modules(), *plain.modules()))
    held = sum(p.nbytes for p in trainers.parameters()) + sum(m.matrix.nbytes for m in trainers.modules() if isinstance(m, Nf4Linear))
    assert held < 0.35 * sum(p.nbytes for p in engines.parameters())  # the embedding of a tiny model is not small
    assert info.num_parameters == sum(p.numel() for p in plain.parameters()) and not trainers.training


def test_the_noise_of_the_import_is_not_heard_and_only_that(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    log.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please", "no module")
    log.warning("something else: %s", 1)
    assert [record.getMessage() for record in caplog.records] == ["something else: 1"]


# ---- computing


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_the_trainer_computes_the_logprobs_that_the_engine_recorded(kind: str) -> None:
    ours, theirs = (adapted(engine_model(kind), packed) for packed in (True, False))
    attach(ours.model)
    attach(theirs.model)
    assert ours.base_checksum == theirs.base_checksum
    slots = [MemoryFile.create("adapter")]
    manifest = MemoryPublisher(ours.sent, slots).pack(0, 1, 0)
    trainer, driver = trainer_of(ours), Driver(make_engine(theirs.model.requires_grad_(False), adapter=theirs))
    WeightSet(driver.engine.weights).apply(slots[0].map(), manifest)
    groups = tuple(sample_group(driver, number) for number in TEMPERATURES)
    micro_batches = pack(token_table(Batch(step=0, groups=groups, num_loss_tokens=0), np.zeros(len(TEMPERATURES) * SAMPLES)), 10_000)
    assert sum(len(m.sampler_logprob) for m in micro_batches) == len(TEMPERATURES) * sum(map(sum, LENGTHS))
    for m in micro_batches:
        with torch.no_grad():  # where bitsandbytes' own layer computes in bfloat16
            assert (trainer.forward(m).logprob - m.sampler_logprob).abs().max() < FLOOR
            with ours.off():
                assert (trainer.forward(m).logprob - m.sampler_logprob).abs().max() > 100 * FLOOR
        assert torch.equal(trainer.forward(m).logprob, trainer.forward(m).logprob)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", VARIANTS.values(), ids=list(VARIANTS))
def test_it_learns_what_it_would_over_the_rounded_weights_held_whole(lora: dict, checkpointing: bool) -> None:
    """With a reference, which is computed first, without a gradient."""
    packed, whole = both(**lora)
    trainers = [trainer_of(adapter, {"kl_coefficient": 0.1}, gradient_checkpointing=checkpointing) for adapter in (packed, whole)]
    found, expected = (gradients(trainer, make_batch()) for trainer in trainers)
    assert found.keys() == expected.keys() and len(found) >= 4
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], atol=1e-7) and gradient.abs().max() > 1e-5, name
    assert checksum(packed.base) == packed.base_checksum == checksum(whole.base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", VARIANTS.values(), ids=list(VARIANTS))
def test_merged_weights_are_made_of_the_rounded_ones(lora: dict, dtype: torch.dtype) -> None:
    packed, whole = both(dtype, **lora)
    assert checksum(packed.merged) == checksum(whole.merged) != checksum(whole.base)
    name = "model.layers.1.self_attn.q_proj"
    if not lora.get("dora"):
        a, b = (packed.tensors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        exact = whole.base[f"{name}.weight"].double() + 8.0 * b.double() @ a.double()
        assert torch.allclose(packed.merged()[f"{name}.weight"].double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    packed.remove()
    assert checksum(base_tensors(packed.model)) == packed.base_checksum and not hasattr(packed.model.get_submodule(name), "lora_A")


def test_going_on_from_a_checkpoint_gives_the_same_bits(tmp_path: Path) -> None:
    trainer = trainer_of(both()[0])
    trainer.train_step(make_batch(0))
    assert trainer.adapter is not None
    name, _ = write_checkpoint(tmp_path, trainer, run_id="r", incarnation=1, ledger_seq=0, weights_checksum="")
    other = trainer_of(both()[0])
    load_checkpoint(tmp_path / name, other)
    assert trainer.train_step(make_batch(1)).metrics == other.train_step(make_batch(1)).metrics
    unrounded = Adapter.of(tiny_model(), LoraSettings(rank=4), ModelSettings())
    with pytest.raises(CheckpointError, match="lies on a base of checksum"):
        load_checkpoint(tmp_path / name, trainer_of(unrounded))


def test_experiments_share_the_codes() -> None:
    model = tiny_model()
    round_layers(model, CPU)
    copied = over_same_tensors(model)
    name = "model.layers.0.mlp.up_proj"
    one, other = model.get_submodule(name), copied.get_submodule(name)
    assert one is not other and isinstance(one, Nf4Linear) and isinstance(other, Nf4Linear) and other.matrix is one.matrix
    Adapter.of(copied, LoraSettings(rank=2), BASE)
    assert isinstance(model.get_submodule(name), Nf4Linear), "the adapter of one is in the other"


# ---- what is refused


def test_a_model_without_layers_to_round_is_refused() -> None:
    with pytest.raises(ModelError, match=r'model.quantize = "nf4" rounds nn.Linear layers, and those of GPT2LMHeadModel .* Conv1D'):
        round_layers(tiny_model("gpt2"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("saved", ["q_proj", "mlp"])
def test_a_rounded_layer_is_not_trained_whole(saved: str, packed: bool) -> None:
    with pytest.raises(ModelError, match=rf'lora.modules_to_save: "{saved}" would train model.layers.0.*lora.targets'):
        adapted(tiny_model(), packed, modules_to_save=[saved], targets=["o_proj"])
    check_saved(tiny_model(), ["input_layernorm", "lm_head", "proj"])


def test_experts_are_not_rounded() -> None:
    model, before = tiny_model("mixtral"), tiny_model("mixtral").state_dict()
    round_layers(model)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"{name}.weight" for name in find_targets(model, LoraSettings(rank=1))} and len(changed) == 2 * 4


def test_codes_stay_on_devices_that_bitsandbytes_knows() -> None:
    with pytest.raises(ModelError, match="not on mps; set trainer"):
        round_layers(tiny_model(), torch.device("mps"))
