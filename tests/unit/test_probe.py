"""Models are proved at load, or refused with the reason."""

from __future__ import annotations

import pytest
import torch
from engine_harness import ARCHITECTURES, tiny_model
from transformers import AutoConfig

from slipstream.errors import ModelError
from slipstream.models import packed_attention, paged_attention
from slipstream.models.attention import NAME
from slipstream.models.probe import probe
from slipstream.models.support import check_supported, context_limit

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_supported_architectures_pass(kind: str) -> None:
    model = tiny_model(kind)
    result = probe(model, slots=8, max_context=128)
    assert result.num_tokens == 12
    assert max(result.engine_gap, result.packed_gap) < 2e-5
    assert model.config._attn_implementation == NAME
    experts = kind in ("mixtral", "gpt_oss")  # how many rows share an expert's product depends on the neighbours: reported, not hidden
    assert result.row_invariant or experts
    assert result.min_rows == 4, "what no padding mends is not padded"
    assert len(result.notes) == (not result.row_invariant)


def test_bfloat16_passes_with_its_own_tolerance() -> None:
    result = probe(tiny_model(initializer_range=0.1).to(torch.bfloat16), max_context=128)
    assert 1e-4 < max(result.engine_gap, result.packed_gap) < 0.5


def without_window(f):
    return lambda *args, **options: f(*args, **{**options, "sliding_window": None})


@pytest.mark.parametrize(
    ("module", "name", "says"), [(paged_attention, "paged_attention", "engine"), (packed_attention, "packed_attention", "packed")]
)
def test_a_path_that_ignores_the_window_is_caught(monkeypatch, module, name: str, says: str) -> None:
    monkeypatch.setattr(module, name, without_window(getattr(module, name)))
    probe(tiny_model("llama"), max_context=128)  # has none
    with pytest.raises(ModelError, match=r"does not give the same logprobs .* at most 0\.0001 is allowed in float32") as caught:
        probe(tiny_model("mistral"), max_context=128)
    assert says in str(caught.value)


def test_a_window_larger_than_a_prompt_still_binds(monkeypatch) -> None:
    """The first prompt is longer than the window wherever the context lets it bind."""
    monkeypatch.setattr(paged_attention, "paged_attention", without_window(paged_attention.paged_attention))
    with pytest.raises(ModelError, match="does not give the same logprobs"):
        probe(tiny_model("mistral", sliding_window=100), max_context=200)
    probe(tiny_model("mistral", sliding_window=100), max_context=90)


def test_rows_that_depend_on_neighbours_are_reported(monkeypatch) -> None:
    """A head that computes differently for few rows: padding to all slots makes rows independent again."""
    import slipstream.engines.embedded.stream as stream

    real = stream.head_logits
    monkeypatch.setattr(stream, "head_logits", lambda model, hidden: real(model, hidden) * (1 + 1e-6 * (len(hidden) < 8)))
    result = probe(tiny_model(), slots=8, max_context=128)
    assert result.min_rows == 8 and result.row_invariant
    monkeypatch.setattr(stream, "head_logits", lambda model, hidden: real(model, hidden) * (1 + 1e-6 * (len(hidden) < 12)))
    assert probe(tiny_model(), slots=32, max_context=128).min_rows == 16


def test_a_model_that_drops_the_layout_is_refused() -> None:
    with pytest.raises(ModelError, match="does not pass its keyword arguments on"):
        probe(tiny_model("stablelm"), max_context=128)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("mamba", {}, "recurrent"),
        ("rwkv", {}, "recurrent"),
        ("xlstm", {}, "recurrent"),
        ("bamba", {}, "recurrent"),
        ("jamba", {}, "recurrent"),
        ("recurrent_gemma", {}, "recurrent"),
        ("qwen3_next", {}, "recurrent"),
        ("lfm2", {}, "recurrent"),
        ("minimax", {}, "recurrent"),
        ("falcon_h1", {}, "hybrid"),
        ("zamba2", {}, "hybrid"),
        ("bloom", {}, "alibi"),
        ("mpt", {}, "alibi"),
        ("falcon", {"alibi": True}, "alibi"),
        ("llama4_text", {}, "chunked attention"),
        ("llama4", {}, "chunked attention"),
        ("t5", {}, "encoder"),
    ],
)
def test_what_the_attention_function_cannot_express_is_refused_by_configuration(kind: str, options: dict, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        check_supported(AutoConfig.for_model(kind, **options))
    assert kind in str(caught.value)


def test_refused_before_any_forward() -> None:
    model = tiny_model("bloom", n_layer=1, n_head=4)
    with pytest.raises(ModelError, match="alibi"):
        probe(model, max_context=64)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "gpt2", "mixtral", "gpt_oss", "olmo2", "phi3", "granite"]
)
def test_supported_configurations_are_not_refused(kind: str) -> None:
    check_supported(AutoConfig.for_model(kind))


def test_dynamic_rope_limits_the_context_to_where_it_does_not_scale() -> None:
    assert context_limit(AutoConfig.for_model("llama", max_position_embeddings=4096)) == 4096
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 1024}
    assert context_limit(AutoConfig.for_model("llama", max_position_embeddings=4096, rope_parameters=rope)) == 1024
    assert context_limit(AutoConfig.for_model("gpt2", n_positions=512)) == 512
