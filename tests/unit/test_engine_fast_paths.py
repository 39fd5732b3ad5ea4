"""The engine's faster paths give what the simple ones give: keys and values in place of gathered ones, products turned over and packed."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_harness import Driver, make_engine, plain, prompt, request, tiny_model
from torch import nn

from slipstream import processor
from slipstream.engines.embedded import product_forms
from slipstream.engines.embedded import products as products_module
from slipstream.engines.embedded.product_forms import Form, Mkl, OneDnn, same_bits
from slipstream.engines.embedded.products import Products
from slipstream.models import dense_rows, memory
from slipstream.models.dense_rows import DenseRows

pytestmark = pytest.mark.usefixtures("one_thread")


def mixed_run(kind: str, **options) -> list[tuple[list[int], list[float]]]:
    """Sequences of all lengths that come and go, some of them interrupted between two weights."""
    driver = Driver(make_engine(tiny_model(kind), slots=6, **options))
    handles = []
    for i in range(30):
        if i % 2 == 0:
            handles += driver.submit(*(request(i, s, prompt(1 + 3 * i, i), 2 + 5 * s) for s in range(i % 5)))
        if i == 12:
            driver.engine.set_version(1, 1, "")
        driver.tick()
    driver.drain()
    return [(driver.generations[h].token_ids, driver.generations[h].logprobs) for h in handles]


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_rows_in_one_piece_give_the_same_bits_as_gathered_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_place = mixed_run(kind)
    monkeypatch.setattr(dense_rows, "MAX_BYTES", 0)
    assert mixed_run(kind) == in_place
    monkeypatch.setattr(dense_rows, "MAX_BYTES", 40_000)  # small passes fit, large ones do not
    assert mixed_run(kind) == in_place


def test_sequences_move_into_gaps_and_go_on() -> None:
    driver = Driver(make_engine(tiny_model(), slots=8))
    reference = plain(driver.engine.model)
    handles = driver.submit(*(request(g, 0, prompt(5 + g, g), 3 if g < 5 else 40) for g in range(8)))
    for _ in range(3):
        driver.tick()
    assert [s is not None for s in driver.engine._live._slots] == [False] * 5 + [True] * 3, "the short ones have ended"
    driver.tick()
    assert [s is not None for s in driver.engine._live._slots] == [True] * 3 + [False] * 5
    driver.drain()
    assert max(driver.gap(h, reference) for h in handles) < 1e-4
    assert driver.engine._live.cache.blocks.num_taken == 0


def test_room_doubles_and_ends_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = DenseRows(max_rows=8, max_positions=256)

    def absent(rows: int, positions: int) -> list[int] | None:
        made = dense.plan(torch.zeros(rows, dtype=torch.int64), positions, position_bytes=100)
        return None if made is None else made.absent.tolist()

    assert absent(2, 16) == [0, 1]
    assert absent(4, 32) == [2, 3], "there was room for twice as much"
    assert absent(4, 48) == [0, 1, 2, 3], "made anew: nothing is there yet"
    assert absent(4, 48) == []
    dense.forget(2)
    assert absent(3, 48) == [2]
    monkeypatch.setattr(dense_rows, "MAX_BYTES", 4 * 128 * 100)
    assert absent(4, 128) == [0, 1, 2, 3], "just fits, without room to grow"
    assert absent(4, 144) is None
    assert absent(4, 128) == [0, 1, 2, 3], "fits again"


def test_the_memory_estimate_knows_the_bounds() -> None:
    assert memory._DENSE_ROWS_BYTES == dense_rows.MAX_BYTES
    assert memory._PACKED_BYTES == products_module.PACKED_BYTES


class Layers(nn.Module):
    def __init__(self, bias: bool):
        super().__init__()
        self.up, self.down = nn.Linear(48, 160, bias=bias), nn.Linear(160, 48, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_columns(bias: bool, dtype: torch.dtype) -> None:
    """Equal to `nn.Linear`'s to rounding; a row has the same bits among 2 rows and among 64; weights are read, never copied."""
    torch.manual_seed(0)
    model = Layers(bias).to(dtype)
    products, x = Products(model), torch.randn(64, 1, 48, dtype=dtype)
    with torch.no_grad():
        simple = model(x)
        with products.fast():
            fast = model(x)
            for rows in (2, 3, 5, 16, 33):
                assert torch.equal(model(x[:rows]), fast[:rows])
            model.up.weight.mul_(2.0)
            changed = model(x)
        assert fast.shape == simple.shape
        assert torch.allclose(fast, simple, atol=1e-5 if dtype is torch.float32 else 2e-2)
        assert torch.allclose(changed, model(x), atol=1e-5 if dtype is torch.float32 else 2e-2)
        assert "forward" not in vars(model.up)


def test_a_model_of_another_kind_of_layer_is_left_alone() -> None:
    """gpt2's layers are no nn.Linear; its head is one."""
    model = tiny_model("gpt2")
    before = {name: vars(module).get("forward") for name, module in model.named_modules()}
    driver = Driver(make_engine(model))
    handles = driver.submit(*(request(0, s, prompt(9), 5) for s in range(3)))
    driver.drain()
    assert np.isfinite([driver.gap(h, plain(model)) for h in handles]).all()
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == before


def test_a_layer_with_a_forward_of_its_own_keeps_it() -> None:
    model, x = Layers(False), torch.randn(4, 1, 48)
    plain_up = model.up.forward
    products = Products(model)
    model.up.forward = lambda x: plain_up(x) + 100.0  # as hooks of other libraries do
    with torch.no_grad():
        expected = model(x)
        with products.fast():
            assert torch.allclose(model(x), expected, rtol=1e-4, atol=1e-3)
        assert torch.equal(model(x), expected)


# ---- packed weights ---------------------------------------------------------------------------------------------------------------

OWN = product_forms.form()
OTHERS = [kind() for kind in (Mkl, OneDnn) if kind.available() and not isinstance(OWN, kind)]
FORMS = [form for form in (OWN, *OTHERS) if form.packs(torch.float32) and same_bits(form, 576, 576, torch.float32, 1)]


@pytest.fixture(params=FORMS, ids=lambda form: type(form).__name__)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    """This machine's own, and others that would do."""
    monkeypatch.setattr(product_forms, "form", lambda: request.param)
    return request.param


def packed_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module.weight in products_module._packs]


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "qwen2"])
def test_packed_weights_give_the_same_bits(kind: str, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before all are packed, after, and across a change of the weights."""
    made: list[torch.Size] = []
    pack = form.pack
    monkeypatch.setattr(form, "pack", lambda weight: made.append(weight.shape) or pack(weight))
    packed = mixed_run(kind)
    assert len(made) > 10
    monkeypatch.setattr(products_module, "PACKED_BYTES", 0)
    assert mixed_run(kind) == packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_what_is_packed_by_now(threads: int, dtype: torch.dtype, form: Form) -> None:
    """Layers as wide as real ones, whose sums the library takes in pieces; with so many inputs in one that MKL's form is never used."""
    torch.manual_seed(0)
    first = (nn.Linear(576, 576) for _ in range(6))  # packed before the others are
    layers = [*first, nn.Linear(576, 1536), nn.SiLU(), nn.Linear(1536, 576), nn.Linear(576, 2048), nn.SiLU(), nn.Linear(2048, 96)]
    model, x = nn.Sequential(*layers).requires_grad_(False).to(dtype), torch.randn(300, 576).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        products = Products(model)
        for rows in (5, 32, 48, 80, 200, 300):
            products.forget()
            outputs = []
            for _ in range(9):
                with products.fast():
                    outputs.append(model(x[:rows]))
            assert all(torch.equal(out, outputs[0]) for out in outputs), rows
            assert bool(packed_layers(model)) == (rows in form.rows and form.packs(dtype))
    finally:
        torch.set_num_threads(before)


def test_packing_is_spread_over_passes(form: Form) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16))).requires_grad_(False)
    products, x = Products(model), torch.randn(8, 64)
    counts = []
    for _ in range(9):
        with products.fast():
            model(x)
        counts.append(len(packed_layers(model)))
    assert counts == [2, 4, 6, 8, 10, 12, 14, 16, 16]


def test_a_packed_form_never_outlives_its_weight(form: Form) -> None:
    """Weights arrive as bytes, which torch does not see: `forget` is for that. Frozen ones stay packed."""
    torch.manual_seed(0)
    model, x = Layers(False).requires_grad_(False), torch.randn(8, 48)
    products = Products(model, frozen=[model.down.weight])
    for _ in range(8):
        with products.fast():
            model(x)
    assert packed_layers(model) == ["up", "down"]
    model.up.weight.numpy()[:] *= 2
    products.forget()
    assert packed_layers(model) == ["down"]
    with products.fast():
        assert torch.allclose(model(x), Layers.forward(model, x), atol=1e-5)
    weights = [id(model.up.weight), id(model.down.weight)]
    del model, products
    gc.collect()
    assert not set(weights) & {id(weight) for weight in products_module._packs}


def test_new_weights_reach_packed_layers(form: Form) -> None:
    """They are written as bytes, as weight sync does."""
    engine, other = make_engine(tiny_model()), tiny_model(seed=1)
    driver = Driver(engine)
    driver.submit(*(request(0, s, prompt(9), 12) for s in range(4)))
    driver.drain()
    assert packed_layers(engine.model)
    for mine, new in zip(engine.model.parameters(), other.parameters(), strict=True):
        mine.detach().numpy()[...] = new.detach().numpy()
    engine.set_version(0, 1, "")
    again = driver.submit(*(request(1, s, prompt(9), 12) for s in range(4)))
    driver.drain()
    assert max(driver.gap(h, plain(other)) for h in again) < 1e-4


def test_checking_bits_draws_nothing(form: Form) -> None:
    """A checkpoint stores the state of torch's generator."""
    same_bits.cache_clear()
    before = torch.get_rng_state()
    assert same_bits(form, 32, 48, torch.float32, torch.get_num_threads())
    assert torch.equal(torch.get_rng_state(), before)


def test_where_bits_differ_nothing_is_packed(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "packed", lambda rows, packed, linear: torch.nn.functional.linear(rows, linear.weight) + 1e-6)
    monkeypatch.setattr(form, "plain", lambda rows, linear: torch.nn.functional.linear(rows, linear.weight))
    same_bits.cache_clear()
    model, x = Layers(False).requires_grad_(False), torch.randn(8, 48)
    with Products(model).fast():
        model(x)
    assert packed_layers(model) == []
    same_bits.cache_clear()


@pytest.mark.parametrize(("vendor", "kind"), [("GenuineIntel", Mkl), ("AuthenticAMD", OneDnn), ("", Mkl)])
def test_the_form_goes_by_who_made_the_processor(vendor: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by a stopwatch: the forms differ in their last bits, and a run is to be repeated."""
    monkeypatch.setattr(processor, "vendor", lambda: vendor)
    assert type(product_forms.form.__wrapped__()) is (kind if OneDnn.available() else Mkl)


def test_what_the_kernel_says_of_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f avx512f_other\n\nprocessor\t: 1\nvendor_id\t: Other\n"
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    processor._fields.cache_clear()
    assert (processor.vendor(), processor.vector_units()) == (processor.AMD, ["avx2", "avx512f"])
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "none")
    processor._fields.cache_clear()
    assert (processor.vendor(), processor.vector_units()) == ("", [])
    processor._fields.cache_clear()
