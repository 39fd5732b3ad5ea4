"""The model's own head on hidden states, in chunks, recomputed or not."""

import numpy as np
import pytest
import torch
from trainer_models import ARCHITECTURES, VOCABULARY, eager_twin, tiny_model

from slipstream.errors import ModelError
from slipstream.models.head import base_model, head_logits
from slipstream.trainer.logprobs import HeadRows, Teacher, _LogprobAndEntropy, token_logprobs

# Heads with soft caps and logit scales: lm_head alone is wrong for these.
HEADS = {**dict.fromkeys(ARCHITECTURES), "cohere": {"logit_scale": 0.5}, "granite": {"logits_scaling": 5.0}}


@pytest.fixture(params=HEADS)
def model(request):
    return eager_twin(tiny_model(request.param, **(HEADS[request.param] or {})))


def hidden_and_logits(model, num_tokens=20):
    ids = torch.randint(3, VOCABULARY, (1, num_tokens), generator=torch.Generator().manual_seed(1))
    output = model(input_ids=ids, output_hidden_states=True)
    return base_model(model)(input_ids=ids).last_hidden_state[0], output.logits[0]


@torch.no_grad()
def test_equals_the_models_own_logits(model):
    hidden, logits = hidden_and_logits(model)
    assert torch.equal(head_logits(model, hidden), logits)


@torch.no_grad()
def test_lm_head_alone_would_be_wrong():
    for kind in ("gemma2", "cohere", "granite"):
        model = eager_twin(tiny_model(kind, **(HEADS[kind] or {})))
        hidden, logits = hidden_and_logits(model)
        assert (model.lm_head(hidden) - logits).abs().max() > 0.1, kind


def head_rows(num_tokens=20, tokens_per_row=2, temperature=0.7):
    generator = torch.Generator().manual_seed(2)
    positions = torch.randperm(num_tokens, generator=generator)[: num_tokens // 2].sort().values
    row = torch.arange(len(positions)).repeat_interleave(tokens_per_row)
    targets = torch.randint(0, VOCABULARY, (len(row),), generator=generator)
    return HeadRows(positions, torch.full((len(positions),), temperature), row, targets)


@pytest.mark.parametrize("chunk_rows", [1, 3, 10, 100])
def test_chunks_equal_full_logits(model, chunk_rows):
    rows = head_rows()
    hidden, logits = hidden_and_logits(model)
    full = (logits / 0.7).log_softmax(-1)[rows.positions[rows.row]]
    expected = full.gather(1, rows.target_ids[:, None])[:, 0]
    weight = torch.linspace(-1, 1, len(expected))
    model.zero_grad()
    (expected * weight).sum().backward()
    reference = {name: p.grad.clone() for name, p in model.named_parameters()}

    hidden, _ = hidden_and_logits(model)
    logprob, entropy, _ = token_logprobs(model, hidden, rows, chunk_rows)
    assert not entropy.requires_grad
    model.zero_grad()
    (logprob * weight).sum().backward()
    assert torch.allclose(logprob, expected, atol=1e-5)
    assert torch.allclose(entropy, -(full.exp() * full).sum(-1), atol=1e-4)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, reference[name], rtol=1e-4, atol=1e-5 * reference[name].abs().max().item()), name


def test_no_more_rows_of_logits_than_a_chunk_at_once(monkeypatch):
    seen = []
    model = eager_twin(tiny_model("llama"))
    monkeypatch.setattr("slipstream.trainer.logprobs.head_logits", lambda m, h: (seen.append(len(h)), head_logits(m, h))[1])
    hidden, _ = hidden_and_logits(model)
    token_logprobs(model, hidden, head_rows(), 4).logprob.sum().backward()
    assert seen == [4, 4, 2, 2, 4, 4]  # forward, then again in the backward pass


@pytest.mark.parametrize("output", [0, 1], ids=["logprob", "entropy"])
def test_gradients_against_finite_differences(output):
    """The backward pass is written out by hand; several tokens of one row are the case to get wrong. It runs once per forward pass."""
    logits = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    row, targets = torch.tensor([0, 0, 0, 1, 3]), torch.tensor([2, 2, 5, 0, 6])
    weight = torch.linspace(-1, 2, 5 if output == 0 else 4, dtype=torch.float64)

    def value(x):
        return (_LogprobAndEntropy.apply(x, row, targets, True)[output] * weight).sum()

    leaf = logits.clone().requires_grad_()
    value(leaf).backward()
    step = 1e-6
    for index in np.ndindex(*logits.shape):
        moved = torch.zeros_like(logits)
        moved[index] = step
        slope = (value(logits + moved) - value(logits - moved)) / (2 * step)
        assert leaf.grad[index] == pytest.approx(slope.item(), abs=1e-8)


def test_entropy_gradient_of_a_certain_token_is_zero_not_nan():
    logits = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    _, entropy = _LogprobAndEntropy.apply(logits, torch.tensor([0]), torch.tensor([0]), True)
    entropy.sum().backward()
    assert torch.equal(logits.grad, torch.zeros(1, 3))


@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_divergence_from_a_teacher_equals_full_logits(chunk_rows):
    """Value and gradient, with the entropy's beside it; the teacher is another architecture with a longer, padded vocabulary."""
    model, other = eager_twin(tiny_model("llama")), eager_twin(tiny_model("gemma2", seed=3, vocab_size=VOCABULARY + 3))
    rows = head_rows()
    hidden, logits = hidden_and_logits(model)
    other_hidden, other_logits = hidden_and_logits(other)
    logs, other_logs = ((x[..., :VOCABULARY] / 0.7).log_softmax(-1)[rows.positions[rows.row]] for x in (logits, other_logits.detach()))
    expected, entropy = (logs.exp() * (logs - other_logs)).sum(-1), -(logs.exp() * logs).sum(-1)
    assert expected.min() > 0.01
    weight = torch.linspace(-1, 2, len(expected))
    model.zero_grad()
    (expected * weight + entropy * weight.flip(0)).sum().backward()
    reference = {name: p.grad.clone() for name, p in model.named_parameters()}

    hidden, _ = hidden_and_logits(model)
    teacher = Teacher(other, other_hidden.detach())
    found = token_logprobs(model, hidden, rows, chunk_rows, entropy_gradient=True, teacher=teacher)
    model.zero_grad()
    (found.divergence * weight + found.entropy * weight.flip(0)).sum().backward()
    assert torch.allclose(found.divergence, expected, atol=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, reference[name], rtol=1e-4, atol=1e-5 * reference[name].abs().max().item()), name
    assert all(p.grad is None for p in other.parameters())


def test_the_model_itself_is_left_alone():
    model = eager_twin(tiny_model("llama"))
    body = model.model
    head_logits(model, torch.zeros(3, 32))
    assert model.model is body and base_model(model) is body


def test_no_causal_lm():
    with pytest.raises(ModelError, match="no separate body"):
        base_model(torch.nn.Linear(2, 2))
