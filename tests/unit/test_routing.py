"""Recorded choices of experts are replayed: in the forward pass, in the gradient, and with gradient checkpointing."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engine_harness import tiny_model
from mixture_models import MIXTURES, tiny_mixture

from slipstream.errors import ModelError
from slipstream.models.attention import attach
from slipstream.models.head import base_model, head_logits
from slipstream.models.layout import PackedLayout, Segment
from slipstream.models.routing import find_routers, kept_routers, record, replay
from slipstream.types import NOT_ROUTED

TOKENS = 24
every_kind = pytest.mark.parametrize("kind", MIXTURES)


def forward(model) -> torch.Tensor:
    """Logits [T, V] of a packed row of two sequences."""
    ids = torch.randint(3, 97, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    layout = PackedLayout((Segment(0, TOKENS // 2), Segment(TOKENS // 2, TOKENS // 2)))
    hidden = base_model(model)(input_ids=ids, position_ids=layout.position_ids(), layout=layout, use_cache=False).last_hidden_state
    return head_logits(model, hidden[0])


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def per_layer(recording) -> torch.Tensor:
    """[T, M, k]"""
    return recording.experts.unflatten(1, (2, 2))


def chosen_by_experts(model) -> list[torch.Tensor]:
    """What the expert modules are told, layer by layer, from now on."""
    seen: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[1].clone()))
    return seen


def perturbed(model):
    """The same model but for other routers: with the same tokens they choose other experts."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for router in find_routers(other).modules:
            router.weight += torch.randn(router.weight.shape, generator=generator) * router.weight.std()
    return other


@every_kind
def test_routers_are_found_in_layer_order(kind: str) -> None:
    model = tiny_mixture(kind, num_hidden_layers=3)
    routers = find_routers(model)
    assert [id(m) for m in routers.modules] == [id(layer.mlp.gate) for layer in model.model.layers]
    assert (routers.num_experts, routers.top_k, routers.width, routers.dtype) == (6, 2, 6, torch.int8)
    assert not any("forward" in vars(m) for m in model.modules())


def test_layers_without_experts_are_left_out() -> None:
    routers = find_routers(tiny_mixture("qwen2_moe", num_hidden_layers=4, decoder_sparse_step=2))
    assert len(routers.modules) == 2
    assert find_routers(tiny_mixture("qwen3_moe", num_experts=200)).dtype == torch.int16


@every_kind
def test_replaying_its_own_record_changes_nothing(kind: str) -> None:
    model = tiny_mixture(kind)
    routers, told = find_routers(model), chosen_by_experts(model)
    plain = forward(model)
    with record(routers) as seen:
        recorded = forward(model)
    assert torch.equal(recorded, plain)
    assert seen.experts.shape == (TOKENS, 2 * 2) and seen.experts.dtype == torch.int8
    assert all(torch.equal(seen.experts[:, 2 * layer : 2 * layer + 2].long(), told[layer]) for layer in range(2))
    with replay(routers, seen.experts) as replayed:
        again = forward(model)
    assert torch.equal(again, plain)
    assert (replayed.num_different, replayed.num_recorded, replayed.num_choices) == (0, 2 * TOKENS, 2 * TOKENS)
    assert not any("forward" in vars(m) for m in model.modules())


@every_kind
def test_other_routers_follow_the_record(kind: str) -> None:
    """What differs without replay is the same with it, and the disagreement is counted."""
    model = tiny_mixture(kind)
    with record(find_routers(model)) as seen:
        forward(model)
    other = perturbed(model)
    routers, told = find_routers(other), chosen_by_experts(other)
    with record(routers) as own:
        free = forward(other)
    different = (per_layer(own).sort(-1).values != per_layer(seen).sort(-1).values).any(-1)
    assert 0.2 < different.float().mean() < 1
    del told[:]
    with replay(routers, seen.experts) as replayed:
        held = forward(other)
    assert all(torch.equal(seen.experts[:, 2 * layer : 2 * layer + 2].long(), told[layer]) for layer in range(2))
    assert replayed.num_different >= different[:, 0].sum(), "of the first layer, whose input is the same"
    assert (held - free).abs().max() > 0.1


@every_kind
def test_the_weights_of_the_experts_are_this_models_own(kind: str) -> None:
    """Permuted within its k, a choice is the same choice: weights move with their experts."""
    model = tiny_mixture(kind)
    routers = find_routers(model)
    with record(routers) as seen:
        plain = forward(model)
    with replay(routers, per_layer(seen).flip(-1).flatten(1)) as replayed:
        flipped = forward(model)
    assert replayed.num_different == 0
    assert (flipped - plain).abs().max() < 1e-5


@every_kind
def test_the_gradient_is_that_of_the_same_choice(kind: str) -> None:
    model = tiny_mixture(kind)
    routers = find_routers(model)
    with record(routers) as seen:
        forward(model).log_softmax(-1)[:, 5].sum().backward()
    expected = gradients(model)
    model.zero_grad()
    with replay(routers, seen.experts):
        forward(model).log_softmax(-1)[:, 5].sum().backward()
    found = gradients(model)
    assert found.keys() == expected.keys() and any("gate.weight" in name for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert expected["model.layers.0.mlp.gate.weight"].abs().max() > 0


@every_kind
def test_tokens_without_a_record_choose_for_themselves(kind: str) -> None:
    model = tiny_mixture(kind)
    with record(find_routers(model)) as seen:
        forward(model)
    other = perturbed(model)
    routers = find_routers(other)
    free = forward(other)
    nothing = torch.full_like(seen.experts, NOT_ROUTED)
    with replay(routers, nothing) as replayed:
        assert torch.equal(forward(other), free)
    assert (replayed.num_recorded, replayed.num_different) == (0, 0)
    partly = torch.cat([seen.experts[: TOKENS // 2], nothing[TOKENS // 2 :]])  # the second sequence of the row has no record
    with replay(routers, partly) as replayed:
        half = forward(other)
    assert (half[TOKENS // 2 :] - free[TOKENS // 2 :]).abs().max() < 1e-5
    assert (half[: TOKENS // 2] - free[: TOKENS // 2]).abs().max() > 0.1
    assert replayed.num_recorded == TOKENS


@every_kind
def test_gradient_checkpointing_replays_in_the_backward_pass(kind: str) -> None:
    """Also in another thread, as autograd's are where the model is on a GPU."""
    model = tiny_mixture(kind)
    with record(find_routers(model)) as seen:
        forward(model)
    gradient, count = {}, {}
    for checkpointing in (False, True):
        other = perturbed(model)
        if checkpointing:
            other.activation_checkpointing_enable({"use_reentrant": False})
            other.train()
        routers, calls = find_routers(other), chosen_by_experts(other)
        with replay(routers, seen.experts) as replayed, ThreadPoolExecutor(1) as thread:
            loss = forward(other).log_softmax(-1)[:, 5].sum()
            thread.submit(loss.backward).result(timeout=60)
        gradient[checkpointing], count[checkpointing] = gradients(other), replayed.num_different
        assert len(calls) == (4 if checkpointing else 2)
    assert all(torch.equal(gradient[True][name], gradient[False][name]) for name in gradient[False])
    assert count[True] == count[False] > 0


def test_what_cannot_be_kept_is_refused() -> None:
    grouped = tiny_model(
        "deepseek_v3", n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=0
    )
    attach(grouped)
    with pytest.raises(ModelError, match=r"DeepseekV3TopkRouter calls topk more than once, or over groups .*keep_routing = false"):
        kept_routers(grouped, None)
    assert not any("forward" in vars(m) for m in grouped.modules())
    attach(sampled := tiny_model("phimoe", num_local_experts=4))
    with pytest.raises(ModelError, match="PhimoeTopKRouter never calls topk"):
        kept_routers(sampled, None)
    assert kept_routers(sampled, False) is None


def test_a_dense_model_keeps_nothing() -> None:
    attach(dense := tiny_model("llama"))
    assert kept_routers(dense, None) is None
    assert kept_routers(dense, False) is None
    with pytest.raises(ModelError, match="keep_routing = true, but LlamaForCausalLM has no experts"):
        kept_routers(dense, True)


def test_a_record_of_another_shape_is_refused() -> None:
    routers = find_routers(tiny_mixture("mixtral"))
    with (
        pytest.raises(ValueError, match=r"shape \(5, 6\); the model's routers choose 4 for each token"),
        replay(routers, torch.zeros(5, 6)),
    ):
        pass
