"""The routing that the engine reports is that of the keys and values its later tokens were sampled over, whatever happened to these."""

from __future__ import annotations

import asyncio
import copy

import msgspec
import numpy as np
import pytest
import torch
from engine_harness import Driver, change_weights, make_engine, prompt, request, run, tiny_model
from mixture_models import MIXTURES, tiny_mixture
from trainer_models import batch_of, make_group

from slipstream.config.settings import Config, RolloutSettings
from slipstream.engines.embedded import cache
from slipstream.engines.frames import FrameRouter
from slipstream.engines.interrupts import InterruptPolicy
from slipstream.errors import DataError
from slipstream.models.head import base_model
from slipstream.models.layout import PackedLayout, Segment
from slipstream.models.routing import find_routers, record
from slipstream.protocols import Generation
from slipstream.rollout.prefixes import Prefix
from slipstream.rollout.trajectory import Trajectory
from slipstream.trainer.packing import pack
from slipstream.trainer.token_table import token_table
from slipstream.trainer.trainer import Trainer
from slipstream.types import NOT_ROUTED, ROUTED_EXPERTS, Frame, PrefixChunk, Purpose, Rollout, StopReason, decode, encode, merge_chunks

WIDTH = 4  # two layers, two experts each


def routed_engine(model, **options):
    return make_engine(model, routers=find_routers(model), **options)


@torch.no_grad()
def own_routing(model, ids: list[int]) -> np.ndarray:
    """int8[n, WIDTH]: where the model routes these tokens in a forward pass over all of them."""
    layout = PackedLayout((Segment(0, len(ids)),))
    with record(find_routers(model)) as seen:
        base_model(model)(input_ids=torch.tensor([ids]), position_ids=layout.position_ids(), layout=layout, use_cache=False)
    return seen.experts.numpy()


def rollout_of(driver: Driver, handle: int) -> Rollout:
    r = driver.requests[handle]
    trajectory = Trajectory(r.group_id, r.sample, 0, Purpose.TRAIN)
    trajectory.add_prompt(r.token_ids)
    trajectory.add_generation(driver.generations[handle])
    trajectory.end_turn(len(r.token_ids), r.sampling, 0.0, "")
    return trajectory.rollout(0.0)


@pytest.mark.parametrize("kind", MIXTURES)
def test_every_token_but_the_last_is_recorded(kind: str) -> None:
    """Also with more prompts than slots, siblings that start later over a shared prompt, and prompts that end within and on a block."""
    model = tiny_mixture(kind)
    driver = Driver(routed_engine(model, slots=4))
    ids = [prompt(16, 1), prompt(21, 2), prompt(1, 3)]
    handles = driver.submit(*(request(g, s, ids[g], 5 + 9 * s) for g in range(3) for s in range(3)))
    driver.drain()
    for handle in handles:
        rollout = rollout_of(driver, handle)
        routing = rollout.arrays[ROUTED_EXPERTS]
        assert routing.shape == (len(rollout.token_ids), WIDTH) and routing.dtype == np.int8
        assert (routing[-1] == NOT_ROUTED).all()
        assert np.array_equal(routing[:-1], own_routing(model, rollout.token_ids.tolist())[:-1])


def test_evaluation_and_dense_models_record_nothing(monkeypatch) -> None:
    model = tiny_mixture("mixtral")
    engine = routed_engine(model)
    engine.pin()
    driver = Driver(engine)
    handles = driver.submit(request(0, 0, prompt(9), purpose=Purpose.EVAL), request(0, 0, prompt(9)))
    driver.drain()
    assert [driver.generations[h].routing is None for h in handles] == [True, False]
    monkeypatch.setattr(cache, "record", lambda routers: pytest.fail("a dense model's forward pass was watched"))
    assert run(make_engine(tiny_model("llama")), request(0, 0, prompt(9)))[0].routing is None


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_after_a_swap_it_is_the_routing_of_the_keys_that_later_tokens_saw(kv: str) -> None:
    model = tiny_mixture("qwen3_moe")
    old = copy.deepcopy(model)
    driver = Driver(routed_engine(model, policy=InterruptPolicy.of(RolloutSettings(kv=kv))))
    (handle,) = driver.submit(request(0, 0, prompt(20), 16))
    for _ in range(6):
        driver.tick()
    num_old = len(driver.ids(handle)) - 1  # positions that the old weights have seen
    change_weights(model)
    driver.engine.set_version(1, 1, "new")
    driver.drain()
    ids, found = driver.ids(handle), driver.generations[handle].routing
    by_old, by_new = own_routing(old, ids)[:-1], own_routing(model, ids)[:-1]
    assert (by_old[:num_old] != by_new[:num_old]).any(axis=1).mean() > 0.3, "the weights differ where it matters"
    expected = by_old if kv == "keep" else by_new
    assert np.array_equal(found[:num_old], expected[:num_old])
    if kv == "recompute":
        assert np.array_equal(found, by_new)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_an_interrupted_generation_that_goes_on_reports_all_of_it(kv: str) -> None:
    """Over its saved keys and values the old routing stays; made again, it is the new weights' throughout."""
    model = tiny_mixture("qwen2_moe")
    old = copy.deepcopy(model)
    policy = InterruptPolicy.of(RolloutSettings(interrupt="abort_resume", kv=kv))
    driver = Driver(routed_engine(model, policy=policy))
    (handle,) = driver.submit(request(0, 0, prompt(20), 16))
    for _ in range(6):
        driver.tick()
    ids = driver.ids(handle)
    change_weights(model)
    driver.engine.set_version(1, 1, "new")
    frame = driver.tick()
    assert driver.generations[handle].stop_reason is StopReason.INTERRUPT and not frame.routing
    going_on = request(0, 0, np.array(ids, dtype=np.int32), 10, prompt_length=20, num_sampled=6, state=dict(frame.saved).get(handle))
    (again,) = driver.submit(going_on)
    driver.drain()
    whole, found = driver.ids(again), driver.generations[again].routing
    assert len(found) == len(whole) - 1
    expected = own_routing(old if kv == "keep" else model, whole)
    assert np.array_equal(found[: len(ids) - 1], expected[: len(ids) - 1])


def test_a_fork_has_the_routing_of_what_it_shares() -> None:
    model = tiny_mixture("mixtral")
    old = copy.deepcopy(model)
    driver = Driver(routed_engine(model))
    (origin,) = driver.submit(request(0, 0, prompt(20), 16))
    for _ in range(6):
        driver.tick()
    ids, state = driver.ids(origin), driver.engine.save(origin)
    change_weights(model)
    driver.engine.set_version(1, 1, "new")
    fork = request(0, 1, np.array(ids, dtype=np.int32), 10, prompt_length=20, num_sampled=6, state=state)
    (handle,) = driver.submit(fork)
    driver.drain()
    shared = len(ids) - 1
    assert np.array_equal(driver.generations[handle].routing[:shared], own_routing(old, ids)[:shared])


def test_a_resumed_rollout_keeps_its_routing() -> None:
    """The chunk that ends a rollout carries it whole, through the ledger's bytes; one that goes on has it made anew with its keys."""
    model = tiny_mixture("mixtral")
    driver = Driver(routed_engine(model))
    (handle,) = driver.submit(request(0, 0, prompt(9), 12))
    generation = driver.generations[handle]
    prefix = Prefix((0, 0, 0), 9, 0, generation)
    for _ in range(5):
        driver.tick()
    first = prefix.chunk()
    assert first.routing is None
    prefix.num_recorded += len(first.token_ids)
    driver.drain()
    chunks = [decode(encode(c), PrefixChunk) for c in (first, prefix.chunk())]
    whole = rollout_of(driver, handle)

    ended = Trajectory(0, 0, 0, Purpose.TRAIN)
    ended.add_prompt(prompt(9))
    ended.add_recorded(merge_chunks(chunks))
    assert np.array_equal(ended.rollout(0.0).arrays[ROUTED_EXPERTS], whole.arrays[ROUTED_EXPERTS])

    cut = Trajectory(0, 0, 0, Purpose.TRAIN)
    cut.add_prompt(prompt(9))
    cut.add_recorded(merge_chunks(chunks[:1]))
    going_on = request(0, 0, np.array(cut.token_ids, dtype=np.int32), 7, prompt_length=9, num_sampled=5)
    (generation,) = run(routed_engine(tiny_mixture("mixtral")), going_on)
    cut.add_generation(generation)
    assert cut.token_ids == whole.token_ids.tolist()
    assert np.array_equal(cut.rollout(0.0).arrays[ROUTED_EXPERTS], whole.arrays[ROUTED_EXPERTS])


def test_frames_carry_it_through_the_wire() -> None:
    """A frame's bytes and back, then to whoever awaits that handle."""
    routing = np.arange(12, dtype=np.int8).reshape(3, 4)
    empty = np.zeros(0, dtype=np.int32)
    frame = Frame(
        tick=1,
        engine_id="e",
        incarnation=1,
        version=0,
        handles=empty,
        token_ids=empty,
        logprobs=np.zeros(0, dtype=np.float32),
        finished=((7, StopReason.LENGTH),),
        routing={7: routing, 8: routing},
    )

    async def feed() -> Generation:
        router, generation = FrameRouter(), Generation(3)
        ended = router.open(7, generation)
        router.feed(decode(encode(frame), Frame))
        await ended
        return generation

    assert np.array_equal(asyncio.run(feed()).routing, routing)


# ---- in the trainer


def sampled_groups(model, num_samples: int = 6):
    """Two groups that the engine sampled, version 0, with 3 kinds of reward."""
    driver = Driver(routed_engine(model, slots=16))
    handles = driver.submit(*(request(g, s, prompt(14 + g, g), 4 + 5 * s) for g in range(2) for s in range(num_samples)))
    driver.drain()
    rollouts = [msgspec.structs.replace(rollout_of(driver, h), reward=float(i % 3)) for i, h in enumerate(handles)]
    return [make_group(rollouts[:num_samples]), make_group(rollouts[num_samples:])]


def step(model, groups, keep: bool | None = None, **trainer) -> dict[str, float]:
    """Metrics of one step on these groups."""
    settings = Config(rollout={"keep_routing": keep}, trainer={"learning_rate": 0.0, **trainer})
    return Trainer(settings, model).train_step(batch_of(0, groups)).metrics


def without_routing(groups):
    return [msgspec.structs.replace(g, rollouts=tuple(msgspec.structs.replace(r, arrays={}) for r in g.rollouts)) for g in groups]


@pytest.mark.parametrize("kind", MIXTURES)
def test_with_the_same_weights_the_gap_is_rounding_and_no_choice_differs(kind: str) -> None:
    model = tiny_mixture(kind)
    metrics = step(copy.deepcopy(model), sampled_groups(model))
    assert metrics["logprob_gap_max"] < 1e-4
    assert (metrics["router_disagreement"], metrics["routing_recorded_fraction"]) == (0, 1)


@pytest.mark.parametrize("kind", MIXTURES)
def test_choices_that_rounding_decides_are_replayed(kind: str) -> None:
    """Experts 0 and 1 score alike to the last bits, so which of them the k best include is an accident of each forward pass."""
    model = tiny_mixture(kind)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for router in find_routers(model).modules:
            router.weight[1] = router.weight[0] * (1 + 1e-7 * torch.randn(router.weight.shape[1], generator=generator))
    groups = sampled_groups(model)
    free = step(copy.deepcopy(model), groups, keep=False)
    assert free["logprob_gap_max"] > 0.01 and "router_disagreement" not in free
    held = step(copy.deepcopy(model), groups)
    assert held["logprob_gap_max"] < 1e-4
    assert held["router_disagreement"] > 0.01, "what the trainer would have chosen is told nevertheless"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_trainer_with_other_routers_sends_each_token_where_it_was(checkpointing: bool) -> None:
    model = tiny_mixture("qwen3_moe")
    groups = sampled_groups(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for router in find_routers(model).modules:
            router.weight += torch.randn(router.weight.shape, generator=generator) * router.weight.std() / 2
    trainer = Trainer(Config(trainer={"gradient_checkpointing": checkpointing}), model)
    told: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeExperts":
            module.register_forward_pre_hook(lambda _, args: told.append(args[1]))
    metrics = trainer.train_step(batch_of(0, groups)).metrics
    assert 0.1 < metrics["router_disagreement"] < 1
    (m,) = pack(trainer._read(batch_of(0, groups))[0], 10_000)
    layers = [m.routing[:, :2], m.routing[:, 2:]]
    assert len(told) == 2 + 2 * checkpointing
    assert all(any(torch.equal(t, layer.long()) for layer in layers) for t in told)


def test_rollouts_share_a_prompt_only_where_it_was_routed_alike() -> None:
    """One sibling's prompt was prefilled by newer weights: its hidden states differ, so it is computed for itself."""
    (group, _) = sampled_groups(tiny_mixture("mixtral"), num_samples=3)
    length = group.rollouts[0].prompt_length
    routing = group.rollouts[1].arrays[ROUTED_EXPERTS].copy()
    routing[2] = (routing[2] + 1) % 6
    other = msgspec.structs.replace(group.rollouts[1], arrays={ROUTED_EXPERTS: routing})
    packed = []
    for rollouts in (group.rollouts, (group.rollouts[0], other, group.rollouts[2])):
        sequences = token_table(batch_of(0, [make_group(list(rollouts))]), np.zeros(3), routing_width=WIDTH)
        (m,) = pack(sequences, 10_000)
        packed.append(m)
    assert packed[1].layout.num_tokens == packed[0].layout.num_tokens + length
    plain = pack(token_table(batch_of(0, [group]), np.zeros(3)), 10_000)[0]
    assert plain.routing is None and plain.layout.num_tokens == packed[0].layout.num_tokens


def test_packed_routing_is_each_tokens_own() -> None:
    groups = sampled_groups(tiny_mixture("mixtral"))
    for m in pack(token_table(batch_of(0, groups), np.zeros(12), routing_width=WIDTH), 60):
        by_path = {}
        for group in groups:
            for rollout in group.rollouts:
                ids, routing = rollout.token_ids.tolist(), rollout.arrays[ROUTED_EXPERTS]
                by_path |= {tuple(ids[: at + 1]): tuple(routing[at]) for at in range(len(ids))}
        for index, segment in enumerate(m.layout.segments):
            before = [m.layout.segments[a] for a in m.layout.ancestors(index)]
            ids = [t for s in before for t in m.input_ids[0, s.start : s.end].tolist()]
            for at in range(segment.start, segment.end):
                ids.append(int(m.input_ids[0, at]))
                assert tuple(m.routing[at].tolist()) == by_path[tuple(ids)]


def test_rollouts_without_a_record_are_routed_by_the_trainer() -> None:
    model = tiny_mixture("mixtral")
    groups = sampled_groups(model)
    metrics = step(copy.deepcopy(model), without_routing(groups))
    assert metrics["routing_recorded_fraction"] == 0 and "router_disagreement" not in metrics
    mixed = step(copy.deepcopy(model), [groups[0], *without_routing(groups[1:])])
    assert 0 < mixed["routing_recorded_fraction"] < 1 and mixed["logprob_gap_max"] < 1e-4


def test_a_record_of_another_model_is_refused() -> None:
    groups = sampled_groups(tiny_mixture("mixtral"))
    with pytest.raises(DataError, match=r"group 0 sample 0 has routed_experts of shape \(18, 4\); the model routes 18 tokens x 6"):
        step(tiny_mixture("mixtral", num_hidden_layers=3), groups)
