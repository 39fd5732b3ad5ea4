"""LoRA adapters against closed forms and peft: gradients, merging, the base as reference, what is sent, what is stored, what is refused."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from engine_harness import Driver, make_engine
from engine_harness import tiny_model as engine_model
from peft import PeftModel
from test_engine_trainer import LENGTHS, SAMPLES, TEMPERATURES, TOLERANCE, sample_group
from trainer_models import config, eager_twin, make_batch, tiny_model

from slipstream.config.settings import LoraSettings, ModelSettings
from slipstream.errors import CheckpointError, DataError, ModelError, WeightSyncError
from slipstream.logprobs.stage import LogprobStage
from slipstream.models.attention import attach
from slipstream.models.lora import CONFIG, TENSORS, Adapter, find_targets, num_trained
from slipstream.models.probe import probe
from slipstream.models.routing import kept_routers
from slipstream.trainer.checkpoint import load_checkpoint, write_checkpoint
from slipstream.trainer.packing import pack
from slipstream.trainer.token_table import token_table
from slipstream.trainer.trainer import Trainer
from slipstream.types import Batch
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import WeightSet, checksum
from slipstream.weight_sync.shared_memory import MemoryPublisher

BASE = ModelSettings(device="cpu")
VARIANTS = {
    "plain": ("llama", {"rank": 4}),
    "rank 1, rslora": ("qwen3", {"rank": 1, "rslora": True}),
    "transposed weights": ("gpt2", {"rank": 4}),
    "dora": ("llama", {"rank": 4, "dora": True}),
    "named, with norms": ("gemma2", {"rank": 2, "targets": ["q_proj", "down_proj"], "modules_to_save": ["input_layernorm"]}),
}


def adapted(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, moved: bool = True, **lora) -> Adapter:
    """A tiny model with an adapter; `moved`: away from where it is still the base."""
    model = tiny_model(kind, seed, dtype)
    torch.manual_seed(seed + 1)
    adapter = Adapter.of(model, LoraSettings(**{"rank": 4, **lora}), BASE)
    if moved:
        adapter.perturb(seed)
    return adapter


def trainer_of(adapter: Adapter, loss: dict | None = None, **settings) -> Trainer:
    tables = {"trainer": {"learning_rate": 1e-2, "steps": 20, **settings}, "loss": loss or {}, "lora": {"rank": 4}}
    return Trainer(config(**tables), adapter.model, adapter=adapter)


def logits(model, batch: Batch | None = None) -> torch.Tensor:
    """By transformers alone: no packing, no attention of slipstream's."""
    ids = (batch or make_batch()).groups[0].rollouts[1].token_ids.astype(np.int64)
    with torch.no_grad():
        return eager_twin(model)(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]


def gradients(trainer: Trainer, batch: Batch) -> dict[str, torch.Tensor]:
    """What one step gives to the optimizer."""
    out: dict[str, torch.Tensor] = {}
    named = dict(trainer.model.named_parameters())
    trainer.optimizer.update = lambda step, norm: out.update({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
    trainer.train_step(batch)
    return out


# ---- training


@pytest.mark.parametrize("chunk", [16, 1024])
def test_the_gradient_is_that_of_the_whole_weights_through_the_product(chunk: int) -> None:
    """dA = s Bᵀ dW and dB = s dW Aᵀ, with dW the gradient of the merged weights."""
    adapter, settings = adapted(rank=4, alpha=12.0), {"learning_rate": 1e-2, "steps": 20, "logprob_chunk_tokens": chunk}
    whole = tiny_model()
    whole.load_state_dict(adapter.merged())
    reference = gradients(Trainer(config(trainer=settings), whole), make_batch())
    found = gradients(trainer_of(adapter, logprob_chunk_tokens=chunk), make_batch())
    assert found.keys() == {n for n, _ in adapter.model.named_parameters() if ".lora_" in n}, "the base has a gradient"
    for name in [n for n in found if ".lora_A." in n]:
        a, b = adapter.model.get_parameter(name), adapter.model.get_parameter(name.replace("lora_A", "lora_B"))
        dw = reference[name.replace(".lora_A.default", "")]
        assert torch.allclose(found[name], 3.0 * b.T @ dw, rtol=1e-3, atol=1e-6)
        assert torch.allclose(found[name.replace("lora_A", "lora_B")], 3.0 * dw @ a.T, rtol=1e-3, atol=1e-6)
        assert found[name].abs().max() > 1e-4, "gradients of nothing but 0 would hide an error"


@pytest.mark.parametrize(("kind", "lora"), VARIANTS.values(), ids=list(VARIANTS))
def test_only_the_adapter_learns(kind: str, lora: dict) -> None:
    adapter = adapted(kind, moved=False, **lora)
    before, sent = checksum(adapter.base), checksum(adapter.tensors)
    trainer = trainer_of(adapter, gradient_checkpointing=True)
    for step in range(2):
        assert trainer.train_step(make_batch(step)).skipped is None
    assert checksum(adapter.base) == before == adapter.base_checksum and checksum(adapter.tensors) != sent
    state = trainer.optimizer.state_tensors()
    assert sum(t.numel() for name, t in state.items() if name.endswith(".exp_avg")) == adapter.num_parameters
    assert num_trained(tiny_model(kind), LoraSettings(**lora)) == adapter.num_parameters


def test_checkpointed_activations_give_the_same_gradient() -> None:
    plain, checkpointed = (
        gradients(trainer_of(adapted(), gradient_checkpointing=on, max_tokens_per_micro_batch=40), make_batch()) for on in (False, True)
    )
    assert all(torch.allclose(plain[name], checkpointed[name], atol=1e-7) for name in plain) and plain.keys() == checkpointed.keys()


def test_an_adapter_of_the_head_alone_is_trained() -> None:
    adapter = adapted(targets=["lm_head"])
    assert len(gradients(trainer_of(adapter), make_batch())) == 2


# ---- the base as reference


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_reference_is_the_base_as_a_second_model_would_be(where: str) -> None:
    """Bit for bit what the logprob stage makes of a model of its own, and so is the step."""
    adapter, alone = adapted(), tiny_model()
    loss = {"kl_coefficient": 0.1, "kl_in": where}
    trainer, batch = trainer_of(adapter, loss), make_batch(temperature=0.7)
    stage = LogprobStage({"reference_logprobs": alone}, 8192, 1024)
    expected = msgspec.structs.replace(batch, groups=tuple(stage.annotated(g) for g in batch.groups))
    assert trainer.reference is not None
    found = trainer.reference.annotated(batch)
    for ours, theirs in zip(found.groups, expected.groups, strict=True):
        for one, other in zip(ours.rollouts, theirs.rollouts, strict=True):
            assert one.arrays["reference_logprobs"].tobytes() == other.arrays["reference_logprobs"].tobytes()
    metrics = trainer.train_step(batch).metrics
    assert metrics["reference_kl"] > 1e-3
    given = trainer_of(adapted(), loss)
    given.reference = None
    assert given.train_step(expected).metrics == metrics


def test_a_base_that_gives_no_logprobs_is_named() -> None:
    adapter = adapted(moved=False)
    adapter.base["model.norm.weight"].fill_(float("nan"))
    with pytest.raises(DataError, match=r"batch 0: group 0 sample 0: bad logprob: reference_logprobs"):
        trainer_of(adapter, {"kl_coefficient": 0.1}).train_step(make_batch())


# ---- merging


@pytest.mark.parametrize(("kind", "lora"), VARIANTS.values(), ids=list(VARIANTS))
def test_merged_weights_compute_what_base_and_adapter_do(kind: str, lora: dict) -> None:
    adapter = adapted(kind, **lora)
    trainer = trainer_of(adapter)
    trainer.train_step(make_batch())
    merged, expected = adapter.merged(), logits(adapter.model)
    whole = tiny_model(kind, seed=5)
    whole.load_state_dict(merged)
    assert (logits(whole) - expected).abs().max() < 1e-4 and (logits(tiny_model(kind)) - expected).abs().max() > 1e-2
    again = adapter.merged()
    assert all(torch.equal(tensor, again[name]) for name, tensor in merged.items()), "merging twice is not merging once"
    if not lora.get("dora"):  # whose norms peft rounds in another order
        by_peft = copy.deepcopy(adapter)._peft.merge_and_unload().state_dict()
        assert by_peft.keys() == merged.keys() and all(torch.equal(tensor, by_peft[name]) for name, tensor in merged.items())
    adapter.remove()
    assert torch.equal(logits(adapter.model), logits(tiny_model(kind))), "the base is not what it was"


def test_a_merged_weight_is_rounded_once() -> None:
    """bfloat16: the sum is made in float32, so it is the nearest bfloat16 to W + s B A."""
    adapter = adapted(dtype=torch.bfloat16)
    name = "model.layers.1.mlp.up_proj"
    a, b = (adapter.tensors[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB")
    exact = adapter.base[f"{name}.weight"].double() + 8.0 * b @ a
    merged = adapter.merged()[f"{name}.weight"]
    assert merged.dtype == torch.bfloat16
    assert ((merged.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    assert (merged != adapter.base[f"{name}.weight"]).any()


# ---- engine and sync


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "mixtral"])
def test_the_trainer_computes_the_logprobs_that_the_engine_recorded(kind: str) -> None:
    """The same adapter, sent from the trainer's model to the engine's; both over a base of their own."""
    sides = []
    for seed in (3, 4):
        model = engine_model(kind)
        attach(model)
        torch.manual_seed(seed)
        sides.append(Adapter.of(model, LoraSettings(rank=3), BASE))
    ours, theirs = sides
    ours.perturb()
    slots = [MemoryFile.create("adapter")]
    manifest = MemoryPublisher(ours.sent, slots).pack(0, 1, 0)
    driver = Driver(make_engine(theirs.model.requires_grad_(False), routers=kept_routers(theirs.model, None), adapter=theirs))
    assert WeightSet(driver.engine.weights).apply(slots[0].map(), manifest) == manifest.checksum == checksum(ours.sent)
    assert manifest.total_bytes < 0.5 * sum(t.nbytes for t in ours.base.values())
    groups = tuple(sample_group(driver, number) for number in TEMPERATURES)
    batch = Batch(step=0, groups=groups, num_loss_tokens=len(TEMPERATURES) * sum(map(sum, LENGTHS)))
    trainer = trainer_of(ours)
    width = trainer.routers.width if trainer.routers else 0
    for micro_batch in pack(token_table(batch, np.zeros(len(TEMPERATURES) * SAMPLES), routing_width=width), 10_000):
        with torch.no_grad(), trainer._routed(micro_batch):
            assert (trainer.forward(micro_batch).logprob - micro_batch.sampler_logprob).abs().max() < TOLERANCE
            with ours.off():
                assert (trainer.forward(micro_batch).logprob - micro_batch.sampler_logprob).abs().max() > 100 * TOLERANCE


def test_a_model_with_an_adapter_is_proved() -> None:
    model = engine_model()
    attach(model)
    adapter = Adapter.of(model, LoraSettings(rank=1), BASE)
    adapter.perturb()
    proof = probe(adapter.model, slots=8, max_context=128)
    assert proof.engine_gap < 1e-4 and proof.packed_gap < 1e-4


def test_an_adapter_on_another_base_is_refused_before_anything_is_touched() -> None:
    ours, other = adapted(), adapted(seed=7)
    slots = [MemoryFile.create("adapter")]
    manifest = MemoryPublisher(ours.sent, slots).pack(0, 1, 0)
    before = checksum(other.tensors)
    with pytest.raises(WeightSyncError, match=f"weights 1.0 lie on a base that hashes to {ours.base_checksum}.*{other.base_checksum}"):
        WeightSet(other.sent).apply(slots[0].map(), manifest)
    assert checksum(other.tensors) == before


def test_a_pinned_copy_shares_the_base_and_keeps_its_adapter() -> None:
    adapter = adapted()
    engine = make_engine(adapter.model.requires_grad_(False), adapter=adapter)
    engine.set_version(1, 0, "x")
    engine.pin()
    assert engine._pinned is not None
    copied, before = engine._pinned.stream.model, logits(adapter.model)
    own = {p.data_ptr() for p in adapter.model.parameters()}
    apart = [name for name, p in copied.named_parameters() if p.data_ptr() not in own]
    assert len(apart) == len(adapter.tensors) and all(".lora_" in name for name in apart)
    adapter.perturb(seed=9)
    assert torch.equal(logits(copied), before) and not torch.equal(logits(adapter.model), before)


# ---- checkpoints


@pytest.mark.parametrize(("dtype", "lora"), [(torch.float32, {}), (torch.bfloat16, {"modules_to_save": ["input_layernorm"]})])
def test_going_on_from_a_checkpoint_gives_the_same_bits(dtype: torch.dtype, lora: dict, tmp_path: Path) -> None:
    trainer = trainer_of(adapted(dtype=dtype, moved=False, **lora))
    for step in range(2):
        trainer.train_step(make_batch(step))
    assert trainer.adapter is not None
    name, manifest = write_checkpoint(
        tmp_path, trainer, run_id="r", incarnation=1, ledger_seq=0, weights_checksum=checksum(trainer.adapter.sent)
    )
    assert {file.split("/")[0] for file in manifest.files} == {"adapter", "optimizer", "trainer.json"}, "the base is stored, too"
    other = trainer_of(adapted(dtype=dtype, **lora))
    load_checkpoint(tmp_path / name, other)
    assert other.adapter is not None and checksum(other.adapter.sent) == manifest.weights_checksum
    for step in range(2, 4):
        assert trainer.train_step(make_batch(step)).metrics == other.train_step(make_batch(step)).metrics
    assert checksum(other.adapter.sent) == checksum(trainer.adapter.sent) != manifest.weights_checksum
    elsewhere = trainer_of(adapted(seed=3, dtype=dtype, **lora))
    with pytest.raises(CheckpointError, match="the files of the model have changed"):
        load_checkpoint(tmp_path / name, elsewhere)


@pytest.mark.parametrize(("kind", "lora"), VARIANTS.values(), ids=list(VARIANTS))
def test_peft_reads_what_is_written_and_so_do_we(kind: str, lora: dict, tmp_path: Path) -> None:
    adapter = adapted(kind, **lora)
    trainer_of(adapter).train_step(make_batch())
    adapter.write(tmp_path / "adapter")
    expected = logits(adapter.model)
    by_peft = PeftModel.from_pretrained(eager_twin(tiny_model(kind)), str(tmp_path / "adapter"))
    assert torch.allclose(logits(by_peft.base_model.model), expected, atol=1e-6)
    ours = Adapter.read(tiny_model(kind), tmp_path / "adapter")
    assert torch.equal(logits(ours.model), expected) and checksum(ours.tensors) == checksum(adapter.tensors)


def test_a_damaged_adapter_is_named(tmp_path: Path) -> None:
    adapted().write(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"float32\[4, 32\], this model has float32\[2, 32\]"):
        adapted(rank=2).load(tmp_path / "adapter")
    (tmp_path / "adapter" / TENSORS).write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=f"{TENSORS} cannot be read"):
        adapted().load(tmp_path / "adapter")
    (tmp_path / "adapter" / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=f"{CONFIG} cannot be read"):
        Adapter.read(tiny_model(), tmp_path / "adapter")


# ---- what is refused


@pytest.mark.parametrize(
    ("kind", "lora", "words"),
    [
        ("llama", {"targets": ["q_prj"]}, ('"q_prj" is no linear layer of LlamaForCausalLM', 'did you mean "q_proj"?')),
        ("llama", {"targets": ["q_proj", "norm"]}, ('"norm" is a LlamaRMSNorm', "modules_to_save")),
        ("llama", {"targets": ["embed_tokens"]}, ('"embed_tokens" is a Embedding', "modules_to_save")),
        ("qwen3", {"targets": ["lm_head"]}, ('"lm_head" and the embedding are one tensor',)),
        ("qwen3", {"modules_to_save": ["embed_tokens"]}, ('"model.embed_tokens"', "take them apart")),
        ("llama", {"modules_to_save": ["input_layernrm"]}, ('"input_layernrm" is no module', 'did you mean "input_layernorm"?')),
        ("llama", {"targets": ["q_proj"], "modules_to_save": ["q_proj"]}, ("in lora.targets and in lora.modules_to_save",)),
        ("mixtral", {"targets": ["experts"]}, ('"experts" is of the experts', "one tensor each", '"all-linear"')),
        ("mixtral", {"targets": ["gate_up_proj"]}, ('"gate_up_proj" is of the experts',)),
    ],
)
def test_what_the_model_does_not_have_is_refused(kind: str, lora: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as raised:
        find_targets(tiny_model(kind), LoraSettings(rank=2, **lora))
    for word in words:
        assert re.search(re.escape(word), str(raised.value)), (word, str(raised.value))


def test_all_linear_is_every_linear_layer_but_the_head() -> None:
    found = find_targets(tiny_model(), LoraSettings(rank=2))
    assert len(found) == 2 * 7 and not any("lm_head" in name for name in found)
    assert all(".self_attn." in name for name in find_targets(tiny_model("mixtral"), LoraSettings(rank=2)))
