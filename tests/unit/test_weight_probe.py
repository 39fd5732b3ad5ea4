"""The weight probe: what it tells apart, and that the trainer's side is the model's own logprobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trainer_models import tiny_model
from transformers import AutoModelForCausalLM

from slipstream.trainer.probe import ProbedPublisher, probe_logprobs
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.probe import NUM_TOKENS, TELLS, ProbeRecord, probe_tokens
from slipstream.weight_sync.shared_memory import MemoryPublisher

RNG = np.random.default_rng(0)
TRAINER = RNG.normal(-3, 1, NUM_TOKENS - 1)


def noise(size: float) -> np.ndarray:
    return np.where(np.arange(NUM_TOKENS - 1) % 2, size, -size)


def after(*shifts: float, size: float = 0.01) -> tuple[ProbeRecord, np.ndarray]:
    """A record that has read good versions, the trainer's logprobs moved by each shift in turn; and the newest of them."""
    record, trainer = ProbeRecord(), TRAINER
    for shift in (0.0, *shifts):
        trainer = trainer + shift
        assert record.read(trainer + noise(size), trainer).problem is None
    return record, trainer


def test_distance_noise_shift_and_power() -> None:
    record, trainer = after(0.001, 0.002)
    reading = record.read(trainer + 0.004 + noise(0.01), trainer + 0.004)
    assert reading.distance == pytest.approx(0.01) and reading.noise == pytest.approx(0.01) and reading.shift == pytest.approx(0.004)
    assert reading.updates_told == pytest.approx(TELLS * 0.01 / 0.004)
    assert record.read(trainer + 0.004 + noise(0.01), trainer + 0.004).updates_told is None, "nothing moved"


def test_a_missed_update_is_seen_where_it_is_larger_than_the_noise_and_only_there() -> None:
    record, trainer = after(0.001)
    assert record.read(trainer + noise(0.01), trainer + 0.1).problem == "the engine still computes with the version before"
    record, trainer = after(0.001)
    assert record.read(trainer + noise(0.01), trainer + 0.01).problem is None


def test_weights_that_are_wrong() -> None:
    record, trainer = after(0.001, 0.001)
    problem = record.read(trainer + noise(0.06), trainer).problem
    assert problem is not None and "0.01 is usual" in problem
    assert record.read(trainer + noise(0.04), trainer).problem is None
    assert "not finite" in str(ProbeRecord().read(TRAINER * np.nan, TRAINER).problem)
    assert "nats apart" in str(ProbeRecord().read(TRAINER + 2, TRAINER).problem)


def test_float32_noise_may_vary() -> None:
    record, trainer = after(0.001, size=1e-6)
    assert record.read(trainer + noise(5e-5), trainer).problem is None


def test_the_trainers_side() -> None:
    model = tiny_model()
    tokens = torch.from_numpy(probe_tokens(model.config.vocab_size))
    reference = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").eval()
    reference.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = torch.log_softmax(reference(tokens[None]).logits[0, :-1], -1).gather(1, tokens[1:, None])[:, 0]
    assert np.allclose(probe_logprobs(model), expected.numpy(), atol=1e-4)


def test_a_probed_publisher_adds_to_the_manifest_and_changes_nothing_else() -> None:
    model, slots = tiny_model(), [MemoryFile.create("a"), MemoryFile.create("b")]
    publisher = MemoryPublisher(model, slots, torch.float32)
    plain, probed = publisher.pack(0, 1, 2), ProbedPublisher(publisher, model).pack(1, 1, 2)
    assert probed.probe == probe_logprobs(model) and not plain.probe
    assert (probed.checksum, probed.entries, probed.version) == (plain.checksum, plain.entries, plain.version)
