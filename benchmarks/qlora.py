"""What a base in 4 bits (`model.quantize = "nf4"`) saves and costs the trainer of an adapter, and what rounding does to the model.

    python benchmarks/qlora.py [--short] [--json PATH]

SmolLM2-135M-Instruct, an adapter of rank 16 on every linear layer but the head, one thread, one process, processor seconds; not part of
`make bench`. Steps of both ways take turns. What rounding costs is told by the tokens of a text: their nats under the model as it is and
rounded, and the divergence of the two over the whole vocabulary.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from bench import Report, alternate, paired_ratios, spread, start
from smollm2 import MODEL
from train_step_ways import Shape, make_batch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slipstream.config.settings import Config, ModelSettings
from slipstream.models.loading import load_model
from slipstream.models.lora import Adapter
from slipstream.models.nf4 import Nf4Linear
from slipstream.trainer.trainer import Trainer

RANK = 16
SHAPE = Shape.equal(52, 24, 8, 4)  # prompt, completion, group size, groups: as in train_step.py
ROUNDS = {True: 5, False: 15}
TEXT = Path(__file__).parent.parent / "docs" / "architecture.md"
WINDOW, WINDOWS = 512, 4  # tokens
WAYS = {"whole": None, "4 bits": "nf4"}


def main() -> None:
    report, options = start("qlora", __doc__ or "")
    torch.set_num_threads(1)
    for dtype in ("float32",) if options.short else ("float32", "bfloat16"):
        measure(report, dtype, ROUNDS[options.short])
    rounding(report)
    report.finish(options.json)


def measure(report: Report, dtype: str, rounds: int) -> None:
    trainers, loads = {}, {}
    for way, quantize in WAYS.items():
        settings = ModelSettings(name=MODEL, dtype=dtype, device="cpu", quantize=quantize)
        began = time.process_time()
        model, _, _ = load_model(settings, keep_codes=True)
        loads[way] = time.process_time() - began
        trainers[way] = trainer_of(model, settings)
    batches = {way: make_batch(SHAPE, 40_000) for way in WAYS}
    seconds = alternate({way: (lambda way=way: step(trainers[way], batches[way])) for way in WAYS}, rounds + 1, clock=time.process_time)
    seconds = {way: values[1:] for way, values in seconds.items()}  # the first one makes AdamW's moments
    table = report.table(
        f"The trainer of an adapter of rank {RANK}, SmolLM2-135M in {dtype}, one thread",
        ("base", "MB held for it", "load, s", "step, s", "ratio"),
        note=f"{SHAPE.groups} groups of {len(SHAPE.lengths)} completions of {SHAPE.lengths[0]} tokens over prompts of {SHAPE.prompt}. "
        "Processor seconds, median [least, most]; the ratio is of each round.",
    )
    for way, trainer in trainers.items():
        ratios = paired_ratios(seconds[way], seconds["whole"])
        held = f"{held_bytes(trainer) / 1e6:.0f}"
        table.rows.append((way, held, f"{loads[way]:.1f}", spread(seconds[way]), "" if way == "whole" else spread(ratios)))
    report.data[dtype] = {"load_s": loads, "step_s": seconds}


def trainer_of(model: PreTrainedModel, settings: ModelSettings) -> Trainer:
    tables = {"model": settings.model_dump(), "lora": {"rank": RANK}, "trainer": {"steps": 1000, "threads": 1}}
    config = Config.model_validate(tables)
    torch.manual_seed(0)
    return Trainer(config, model, adapter=Adapter.of(model, config.lora, config.model))


def step(trainer: Trainer, batch) -> None:
    trainer.step = 0  # the same batch every time
    trainer.train_step(batch)


def held_bytes(trainer: Trainer) -> int:
    """Of the frozen weights: parameters, and codes with their scales."""
    matrices = [module.matrix for module in trainer.model.modules() if isinstance(module, Nf4Linear)]
    return sum(p.nbytes for p in trainer.model.parameters() if not p.requires_grad) + sum(matrix.nbytes for matrix in matrices)


@torch.no_grad()
def rounding(report: Report) -> None:
    found = {}
    for way, quantize in WAYS.items():
        model, tokenizer, _ = load_model(ModelSettings(name=MODEL, dtype="float32", device="cpu", quantize=quantize))
        tokens = text_tokens(tokenizer)
        model.set_attn_implementation("eager")
        found[way] = torch.cat([torch.log_softmax(model(input_ids=row[None], use_cache=False).logits[0, :-1], -1) for row in tokens])
    targets = tokens[:, 1:].reshape(-1, 1)
    whole, rounded = found["whole"], found["4 bits"]
    gap = (rounded - whole).gather(1, targets)
    divergence = (whole.exp() * (whole - rounded)).sum(-1)
    table = report.table(
        f"What rounding does to SmolLM2-135M, {len(targets)} tokens of docs/{TEXT.name}",
        ("", "nats per token"),
        note="In windows of 512 tokens, float32.",
    )
    table.rows += [(f"-log p, {way}", f"{-values.gather(1, targets).mean():.3f}") for way, values in found.items()]
    table.rows.append(("abs(log p - log p'), median", f"{statistics.median(gap.abs().flatten().tolist()):.3f}"))
    table.rows.append(("KL(whole, 4 bits), mean over the tokens", f"{divergence.mean():.3f}"))
    report.data["rounding"] = {row[0]: float(row[1]) for row in table.rows}


def text_tokens(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """int64[WINDOWS, WINDOW]: the beginning of the text."""
    ids = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][0]  # type: ignore[index]
    return ids[: WINDOWS * WINDOW].reshape(WINDOWS, WINDOW)


if __name__ == "__main__":
    main()
