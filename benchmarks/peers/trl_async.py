"""TRL's `AsyncGRPOTrainer` on the CPU: one side of `vs_trl_async`. Runs in the peers' environment.

    python trl_async.py '{"url": "http://127.0.0.1:8123", "model": FOLDER, "rows": FILE.jsonl, "step_s": 0.2, ...}'

TRL wants CUDA, NCCL, FlashAttention 3 and vLLM. So that it runs here at all, four things are replaced, and nothing else:

    peak FLOPS       of the device, which it would ask CUDA for: unknown (it is only reported)
    attention        FlashAttention's variable-length kernel by torch's, with the same causal mask
    vLLM             its check that vLLM is installed: the server is another process anyway
    weight transfer  NCCL by a file and a call of /_reload, through TRL's own argument `weight_transfer`

Prints one JSON line per step: samples trained and samples dropped as stale so far.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path

import torch
import torch.nn.functional as F
import trl.experimental.async_grpo.async_grpo_trainer as async_grpo_trainer
import trl.experimental.async_grpo.async_rollout_worker as async_rollout_worker
import trl.experimental.async_grpo.packing as packing
from count_a import count_a
from datasets import Dataset
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

REQUEST_S = 60.0


def reward(completions: list, **columns: object) -> list[float]:
    return [count_a(completion[0]["content"]) for completion in completions]


class TorchVarlen:
    """`flash_attn_varlen_func` in torch: causal from the bottom right, as FlashAttention has it."""

    @staticmethod
    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=None, causal=True, window_size=(-1, -1), **others):
        outputs, ends_q, ends_k, repeats = [], cu_q.tolist(), cu_k.tolist(), q.shape[1] // k.shape[1]
        for i in range(len(ends_q) - 1):
            query = q[ends_q[i] : ends_q[i + 1]].transpose(0, 1)[None]
            key, value = (x[ends_k[i] : ends_k[i + 1]].repeat_interleave(repeats, 1).transpose(0, 1)[None] for x in (k, v))
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
            outputs.append(F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=softmax_scale)[0].transpose(0, 1))
        return torch.cat(outputs)


class FileTransfer:
    """`WeightTransferProtocol` with a file in place of NCCL."""

    def __init__(self, url: str, file: Path):
        self._url, self._file = url, file

    def init_weight_transfer(self) -> None:
        urllib.request.urlopen(self._url + "/health", timeout=REQUEST_S).close()

    def pause(self) -> None:
        self._post("/pause")

    def send_weights(self, iterator) -> None:
        torch.save({name: tensor.clone() for name, tensor in iterator}, self._file)
        self._post("/_reload")

    def resume(self) -> None:
        self._post("/resume")

    def destroy(self) -> None: ...

    def _post(self, path: str) -> None:
        urllib.request.urlopen(self._url + path, data=b"", timeout=REQUEST_S).close()  # HTTPError unless it is fine


class Steps(TrainerCallback):
    """Makes each step take longer, and tells of it."""

    trainer: AsyncGRPOTrainer

    def __init__(self, step_s: float, samples: int):
        self._step_s, self._samples, self._dropped = step_s, samples, 0

    def on_pre_optimizer_step(self, args, state, control, **others) -> None:
        time.sleep(self._step_s)

    def on_step_end(self, args, state, control, **others) -> None:
        self._dropped += int(sum(self.trainer._metrics["train"].get("sample/dropped_stale_total", [])))  # emptied at every step's log
        print(json.dumps({"step": state.global_step, "trained": state.global_step * self._samples, "dropped": self._dropped}), flush=True)


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    async_grpo_trainer.get_peak_flops_per_device = lambda *arguments: None
    packing._flash_attn = lambda: TorchVarlen
    async_rollout_worker.is_vllm_available = lambda *arguments, **others: True
    samples = given["groups"] * given["group_size"]
    arguments = AsyncGRPOConfig(
        # what the CPU needs
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        # the work, the same on every side
        num_generations=given["group_size"],
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        token_budget=0,  # a fixed number of samples a step instead of as many as fit a number of tokens
        max_completion_length=given["new_tokens"],
        learning_rate=given["learning_rate"],
        max_inflight_tasks=given["in_flight"],
        max_staleness=given["max_staleness"],
        vllm_server_base_url=given["url"],
        # no more than the work
        max_steps=given["steps"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        output_dir=given["output"],
    )
    rows = [json.loads(line) for line in Path(given["rows"]).read_text().splitlines()]
    steps = Steps(given["step_s"], samples)
    steps.trainer = AsyncGRPOTrainer(
        model=given["model"],
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        weight_transfer=FileTransfer(given["url"], Path(given["output"]) / "weights.pt"),
        callbacks=[steps],
    )
    Path(given["output"]).mkdir(parents=True, exist_ok=True)
    steps.trainer.train()


if __name__ == "__main__":
    main()
