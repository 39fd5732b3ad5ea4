"""TRL's `GRPOTrainer`, unmodified, on the CPU: one side of `vs_trl_sync`. Runs in the peers' environment.

    python trl_sync.py '{"model": FOLDER, "rows": FILE.jsonl, "output": FOLDER, "steps": 9, ...}'

Prints one JSON line per step: tokens, reward. Who started it stops (SIGSTOP) and continues it between steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from chain_sum import score
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list, answer: list[str], **columns: object) -> list[float]:
    return [score(completion[0]["content"], expected) for completion, expected in zip(completions, answer, strict=True)]


class CountingTrainer(GRPOTrainer):
    """Notes what a step's one generation made: shapes and masks as the trainer itself uses them, and the mean reward it logs."""

    def _generate_and_score_completions(self, inputs: list) -> dict:
        made = super()._generate_and_score_completions(inputs)
        prompts, completions = made["prompt_mask"], made["completion_mask"]
        self.made = {
            "reward": self._metrics["train"]["reward"][-1],
            "samples": len(prompts),
            "prompt_tokens": int(prompts.sum()),
            "completion_tokens": int(completions.sum()),
            "padded_tokens": prompts.numel() + completions.numel(),  # rows x (longest prompt + longest completion)
        }
        return made


class StepLines(TrainerCallback):
    """Tells of every finished step."""

    trainer: CountingTrainer

    def on_step_end(self, args, state, control, **others) -> None:
        print(json.dumps({"step": state.global_step, **self.trainer.made}), flush=True)


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    rows = [json.loads(line) for line in Path(given["rows"]).read_text().splitlines()]
    arguments = GRPOConfig(
        # what the CPU needs
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        # the work, the same on every side
        num_generations=given["group_size"],
        per_device_train_batch_size=given["rows_per_pass"],
        gradient_accumulation_steps=given["groups"] * given["group_size"] // given["rows_per_pass"],
        max_completion_length=given["new_tokens"],
        temperature=1.0,
        loss_type="dapo",
        beta=0.0,
        epsilon=0.2,
        scale_rewards="group",
        learning_rate=given["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        # no more than the work
        max_steps=given["steps"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        output_dir=given["output"],
    )
    lines = StepLines()
    lines.trainer = CountingTrainer(
        model=given["model"], reward_funcs=reward, args=arguments, train_dataset=Dataset.from_list(rows), callbacks=[lines]
    )
    lines.trainer.train()


if __name__ == "__main__":
    main()
