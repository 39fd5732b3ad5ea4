"""What a vLLM server tells of tokens beside their logprobs: how they were routed and what sampling kept; read, checked, refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import NUM_EXPERTS, NUM_LAYERS, TOP_K, routed
from mixture_models import tiny_mixture
from vllm_bench import VOCABULARY, Bench, manifest, request, run

from slipstream.engines.interrupts import InterruptPolicy
from slipstream.engines.vllm.arrays import Routing, Tells, Wants, kept_sets, num_logprobs, what_it_tells
from slipstream.engines.vllm.environment import PLUGIN, VllmEnvironment, check_routing
from slipstream.errors import ConfigError, RunFailed
from slipstream.models.routing import find_routers
from slipstream.sampling_mask import decode_kept
from slipstream.types import Purpose, Sampling, StopReason

CUT = Sampling(top_k=5, top_p=0.9, max_new_tokens=4)
ROUTING = Routing(layers=(0, 2), num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K)
STOP = ("<103>",)  # the fake's second token after a prompt of two


def kept_by(into: Any) -> list[list[int]]:
    return [decode_kept(kept).tolist() for kept in into.kept]


def routes(num_tokens: int) -> list[list[int]]:
    """Of the layers that have experts."""
    return routed(num_tokens)[:, [0, 2]].reshape(num_tokens, -1).tolist()


def npy(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


# ---- what truncated sampling kept


@pytest.mark.parametrize("masks", [False, True], ids=["of logprobs", "of the server's masks"])
@pytest.mark.parametrize("failures", [[], ["merge 3"], ["cut 2"]], ids=["a token at a time", "several", "over a break"])
def test_what_sampling_kept_comes_with_each_token(tmp_path: Path, masks: bool, failures: list[str]) -> None:
    async def body(bench: Bench) -> None:
        bench.fake.tells_masks, bench.fake.failures = masks, list(failures)
        await bench.publish(0)
        into, ended, _ = bench.open(request(sampling=CUT))
        await bench.until(ended)
        assert kept_by(into) == [[7, 9, token] for token in (102, 103, 104, 105)]
        asked = bench.fake.requests[-1]["sampling_params"]
        assert (asked["top_k"], asked["top_p"], asked["min_p"]) == (5, 0.9, 0.0)
        assert asked["logprobs"] == (0 if masks else num_logprobs(5, VOCABULARY))

    run(tmp_path, body, tells=Tells(masks=masks))


def test_what_is_not_truncated_asks_for_nothing_more(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        into, ended, _ = bench.open(request())
        await bench.until(ended)
        asked = bench.fake.requests[0]["sampling_params"]
        assert not into.kept and asked["logprobs"] == 0 and not {"top_k", "top_p", "min_p"} & set(asked)

    run(tmp_path, body)


def test_a_server_that_tells_masks_is_greedy_by_keeping_one_token(tmp_path: Path) -> None:
    """It refuses temperature 0 and requests without a top-k, those of the probe as well."""

    async def body(bench: Bench) -> None:
        bench.fake.tells_masks = True
        await bench.publish(0)
        bench.engine.pin()
        into, ended, _ = bench.open(request(purpose=Purpose.EVAL, sampling=Sampling(temperature=0.0, max_new_tokens=2)))
        await bench.until(ended)
        asked = bench.fake.requests[0]["sampling_params"]
        assert (asked["temperature"], asked["top_k"]) == (1.0, 1) and into.token_ids == [102, 103] and not into.kept

    run(tmp_path, body, tells=Tells(masks=True))


def entries(*logprobs: float) -> dict[str, Any]:
    """A chunk of one token, 100, and the entries that the server names for it: 100, 101, ..."""
    told = [{"token_id": 100 + at, "logprob": value} for at, value in enumerate(logprobs)]
    return {"logprobs": {"content": [{"token_id": 100, "logprob": -1.0, "top_logprobs": told}]}}


@pytest.mark.parametrize(
    ("choice", "tells", "words"),
    [
        (entries(-9999.0, -1.0, -1.0), Tells(), "sampled token 100, and says that 2 of 1000"),
        ({"sampling_mask": None}, Tells(masks=True), "for 0 of 1 tokens"),
        ({"sampling_mask": [[100], [101]]}, Tells(masks=True), "for 2 of 1 tokens"),
        ({"sampling_mask": [[]]}, Tells(masks=True), "says that 0 of"),
        ({"sampling_mask": [[7, 9]]}, Tells(masks=True), "it is not among them"),
        ({"sampling_mask": [[100, VOCABULARY]]}, Tells(masks=True), f"not all in the vocabulary.*{VOCABULARY}"),
        ({"sampling_mask": [[-1, 100]]}, Tells(masks=True), "not all in the vocabulary"),
    ],
)
def test_what_cannot_have_been_kept_is_not_taken(choice: dict[str, Any], tells: Tells, words: str) -> None:
    with pytest.raises(RunFailed, match=words):
        kept_sets(choice, [100], tells, VOCABULARY)


def test_a_whole_vocabulary_that_was_kept_is_whole() -> None:
    assert num_logprobs(990, 1000) == 1000
    told = [{"token_id": token, "logprob": -1.0} for token in range(1000)]
    (kept,) = kept_sets({"logprobs": {"content": [{"top_logprobs": told}]}}, [100], Tells(), 1000)
    assert kept is not None and decode_kept(kept).tolist() == list(range(1000))


@pytest.mark.parametrize("failures", [[], ["merge 3"]], ids=["a token at a time", "several"])
def test_a_token_that_was_drawn_from_more_than_the_server_named_is_drawn_anew(tmp_path: Path, failures: list[str]) -> None:
    """In bfloat16 many tokens are equally likely, and all that are as likely as the k-th are kept."""

    async def body(bench: Bench) -> None:
        bench.fake.failures, bench.fake.kept_at = list(failures), {104: list(range(300, 350))}
        await bench.publish(0)
        into, ended, _ = bench.open(request(sampling=CUT))
        await bench.until(ended)
        assert into.token_ids == [102, 103, 104, 105]
        assert kept_by(into) == [[7, 9, 102], [7, 9, 103], [104, *range(300, 350)], [7, 9, 105]]
        named = [asked["sampling_params"]["logprobs"] for asked in bench.fake.requests]
        assert named == [23, 46, 92] and [len(asked["token_ids"]) for asked in bench.fake.requests] == [2, 4, 4]

    run(tmp_path, body, tells=Tells(max_logprobs=VOCABULARY))


def test_a_server_that_cannot_name_more_says_so(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        bench.fake.kept = list(range(300, 350))
        await bench.publish(0)
        _, ended, _ = bench.open(request(sampling=CUT))
        with pytest.raises(RunFailed, match=r"more than the 40 tokens.*top_k = 5.*--max-logprobs 1000"):
            await bench.until(ended)

    run(tmp_path, body, tells=Tells(max_logprobs=40))


# ---- how tokens were routed


@pytest.mark.parametrize("failures", [[], ["merge 3"], ["cut 2"], ["finish abort"]])
def test_routing_comes_with_the_end_for_all_tokens_but_the_last(tmp_path: Path, failures: list[str]) -> None:
    async def body(bench: Bench) -> None:
        bench.fake.has_experts, bench.fake.failures = True, list(failures)
        await bench.publish(0)
        into, ended, _ = bench.open(request())
        await bench.until(ended)
        assert into.routing is not None and into.routing.dtype == np.int8 and into.routing.tolist() == routes(5)
        by_token, ended, _ = bench.open(request(1, stop_token_ids=(103,)))
        await bench.until(ended)
        assert by_token.routing is not None and by_token.routing.tolist() == routes(3)
        assert "abort_requests" not in bench.fake.calls

    run(tmp_path, body, tells=Tells(routing=ROUTING))


def test_a_stop_string_ends_it_on_the_server_too(tmp_path: Path) -> None:
    """The server does not know of the string: it is told to end, and what it sampled beyond is left."""

    async def body(bench: Bench) -> None:
        bench.fake.has_experts = True
        await bench.publish(0)
        into, ended, _ = bench.open(request(sampling=Sampling(max_new_tokens=60, stop_strings=STOP)))
        await bench.until(ended)
        assert into.token_ids == [102, 103] and into.stop_reason is StopReason.STOP
        assert into.routing is not None and into.routing.tolist() == routes(3)
        assert bench.fake.calls.count("abort_requests") == 1 and len(bench.fake.requests) == 1

    run(tmp_path, body, tells=Tells(routing=ROUTING))


def test_a_stream_that_breaks_off_between_the_last_token_and_its_end_is_routed_anew(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        bench.fake.has_experts, bench.fake.failures = True, ["cut 2"]
        await bench.publish(0)
        into, ended, _ = bench.open(request(sampling=Sampling(max_new_tokens=60, stop_strings=STOP)))
        await bench.until(ended)
        assert into.token_ids == [102, 103] and into.stop_reason is StopReason.STOP
        assert into.routing is not None and into.routing.tolist() == routes(3)
        again = bench.fake.requests[-1]
        assert again["token_ids"] == [1, 2, 102] and again["sampling_params"]["max_tokens"] == 1

    run(tmp_path, body, tells=Tells(routing=ROUTING))


def test_what_new_weights_stop_is_routed_whole_when_it_has_gone_on(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        bench.fake.has_experts = True
        await bench.fake.allow(3)
        await bench.publish(0)
        into, ended, _ = bench.open(request(sampling=Sampling(max_new_tokens=8)))
        await bench.until_sampled(into, 3)
        bench.controller.publish(manifest(1))
        await bench.until(ended)
        assert into.stop_reason is StopReason.INTERRUPT and into.routing is None
        await bench.until(bench.controller.until_confirmed(1))
        await bench.fake.allow(float("inf"))
        tokens = np.array([1, 2, *into.token_ids], np.int32)
        handle = bench.engine.submit(request(token_ids=tokens, num_sampled=3, oldest_version=0, sampling=Sampling(max_new_tokens=5)))
        await bench.until(bench.router.open(handle, into))
        assert into.routing is not None and into.routing.tolist() == routes(9)

    run(tmp_path, body, InterruptPolicy("abort_resume", "recompute"), tells=Tells(routing=ROUTING))


def test_what_has_ended_is_not_stopped_by_new_weights_while_its_routing_is_awaited(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        bench.fake.has_experts, bench.fake.heeds_aborts = True, False
        await bench.fake.allow(2)
        await bench.publish(0)
        into, ended, _ = bench.open(request(sampling=Sampling(max_new_tokens=60, stop_strings=STOP)))
        await bench.until_sampled(into, 2)
        await bench.publish(1)
        assert not ended.done()
        bench.fake.heeds_aborts = True
        await bench.fake.allow(1)
        await bench.until(ended)
        assert into.stop_reason is StopReason.STOP and into.token_ids == [102, 103]
        assert into.prefill_version == (1, 0) and not into.recomputed
        assert into.routing is not None and into.routing.tolist() == routes(3)

    run(tmp_path, body, InterruptPolicy("abort_resume", "recompute"), tells=Tells(routing=ROUTING))


def test_evaluations_are_not_routed(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        bench.fake.has_experts = True
        await bench.publish(0)
        bench.engine.pin()
        into, ended, _ = bench.open(request(purpose=Purpose.EVAL, sampling=Sampling(max_new_tokens=4, stop_strings=STOP)))
        await bench.until(ended)
        assert into.routing is None and "abort_requests" not in bench.fake.calls

    run(tmp_path, body, tells=Tells(routing=ROUTING))


@pytest.mark.parametrize(("text", "words"), [("", "without telling where it routed"), ("?", "no array")])
def test_routing_that_does_not_come_ends_the_engine(tmp_path: Path, text: str, words: str) -> None:
    async def body(bench: Bench) -> None:
        bench.fake.has_experts, bench.fake.failures = True, [f"routing {text}"]
        await bench.publish(0)
        _, ended, _ = bench.open(request())
        with pytest.raises(RunFailed, match=words):
            await bench.until(ended)

    run(tmp_path, body, tells=Tells(routing=ROUTING))


def test_many_experts_take_two_bytes_as_the_embedded_engines_do() -> None:
    many = replace(ROUTING, num_experts=300)
    told = np.full((4, NUM_LAYERS, TOP_K), 299, dtype=np.uint16)
    assert many.read(npy(told), 4).dtype == np.int16
    assert many.read(npy(told), 3).tolist() == [[299] * 4] * 3, "what lies beyond the tokens is left"


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (np.zeros((3, NUM_LAYERS, TOP_K), np.uint8), r"\(3, 3, 2\); at least integers \(4, 3, 2\)"),
        (np.zeros((4, NUM_LAYERS, TOP_K + 1), np.uint8), r"\(4, 3, 3\)"),
        (np.zeros((4, NUM_LAYERS), np.uint8), r"\(4, 3\)"),
        (np.zeros((4, NUM_LAYERS, TOP_K), np.float32), "float32"),
        (np.full((4, NUM_LAYERS, TOP_K), NUM_EXPERTS, np.uint8), "expert 6 of 6"),
    ],
)
def test_routing_of_another_form_is_not_taken(told: np.ndarray, words: str) -> None:
    with pytest.raises(RunFailed, match=words):
        ROUTING.read(npy(told), 4)


def test_an_array_that_would_be_unpickled_is_not_taken() -> None:
    with pytest.raises(RunFailed, match="no array"):
        ROUTING.read(npy(np.array([[[print]]], dtype=object)), 1)


def test_the_trainers_routers_are_as_wide() -> None:
    routers = find_routers(tiny_mixture("qwen3_moe"))
    assert routers is not None
    experts = Routing(tuple(range(len(routers.modules))), len(routers.modules), routers.num_experts, routers.top_k)
    read = experts.read(npy(np.zeros((3, len(routers.modules), routers.top_k), np.uint8)), 3)
    assert read.shape == (3, routers.width) and torch.from_numpy(read).dtype == routers.dtype


# ---- what a server tells, and what a run wants

ABOUT = {"max_logprobs": 20, "sampling_mask": False, "routing": None}
EXPERTS = {"layers": [0, 2], "num_layers": NUM_LAYERS, "num_experts": NUM_EXPERTS, "top_k": TOP_K}
WANTS = Wants(keep_routing=None, top_k=0, vocab_size=VOCABULARY, samples_evaluations=False)


@pytest.mark.parametrize(
    ("about", "wants", "tells"),
    [
        ({}, {}, Tells()),
        ({"routing": EXPERTS}, {}, Tells(routing=ROUTING)),
        ({"routing": EXPERTS}, {"keep_routing": True}, Tells(routing=ROUTING)),
        ({"routing": EXPERTS}, {"keep_routing": False}, Tells()),
        ({"max_logprobs": 23}, {"top_k": 5}, Tells(max_logprobs=23)),
        ({"max_logprobs": -1}, {"top_k": 500}, Tells(max_logprobs=VOCABULARY)),
        ({"max_logprobs": VOCABULARY}, {"top_k": VOCABULARY - 1}, Tells(max_logprobs=VOCABULARY)),
        ({"sampling_mask": True}, {"top_k": 5}, Tells(masks=True)),
    ],
)
def test_what_a_server_tells(about: dict[str, Any], wants: dict[str, Any], tells: Tells) -> None:
    assert what_it_tells(ABOUT | about, replace(WANTS, **wants), "it") == tells


@pytest.mark.parametrize(
    ("about", "wants", "words"),
    [
        ({}, {"keep_routing": True}, ("keep_routing = true", "the server at x", "--enable-return-routed-experts", "routes by itself")),
        ({}, {"top_k": 5}, ("rollout.top_k = 5", "names 20", f"--max-logprobs {VOCABULARY}")),
        ({"sampling_mask": True}, {}, ("--return-sampling-mask", "set rollout.top_k")),
        ({"sampling_mask": True}, {"top_k": 5, "samples_evaluations": True}, ("evaluation.temperature = 0",)),
    ],
)
def test_a_server_that_tells_too_little_is_refused(about: dict[str, Any], wants: dict[str, Any], words: Sequence[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        what_it_tells(ABOUT | about, replace(WANTS, **wants), "the server at x")
    assert all(word in str(caught.value) for word in words), caught.value


def test_routing_is_not_asked_of_the_cpu_build() -> None:
    environment = VllmEnvironment(Path("/x/python"), "0.32.0", True, "cpython-311", True, True)
    with pytest.raises(ConfigError, match="/x/python has vLLM's CPU build"):
        check_routing(True, environment)
    check_routing(None, environment)
    check_routing(True, replace(environment, on_cpu=False))


def test_the_plugin_tells_which_layers_have_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    from slipstream_vllm.worker import WorkerExtension

    class MoERunner(torch.nn.Module):
        """Named as vLLM's, which `bind_routed_experts_capturer` looks for."""

        def __init__(self, layer_id: int):
            super().__init__()
            self.layer_id = layer_id

    worker, sizes = WorkerExtension(), {"get_total_num_hidden_layers": 3, "get_num_experts": 6, "get_num_experts_per_tok": 2}
    text = SimpleNamespace(model_type="qwen3_moe")
    model_config = SimpleNamespace(
        hf_text_config=text, logprobs_mode="processed_logprobs", max_logprobs=20, return_sampling_mask=False,
        **{name: (lambda value=value: value) for name, value in sizes.items()},
    )  # fmt: skip
    options = SimpleNamespace(enable_return_routed_experts=True)
    worker.vllm_config = SimpleNamespace(
        weight_transfer_config=None,
        model_config=model_config,
        aux_output_config=options,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        device_config=SimpleNamespace(device_type="cuda"),
        lora_config=None,
    )
    worker.model_runner = SimpleNamespace(get_model=lambda: torch.nn.ModuleList([MoERunner(2), torch.nn.Linear(1, 1), MoERunner(0)]))
    about = worker.slipstream_about()
    assert about["routing"] == EXPERTS and about["max_logprobs"] == 20 and about["sampling_mask"] is False
    options.enable_return_routed_experts = False
    assert worker.slipstream_about()["routing"] is None
