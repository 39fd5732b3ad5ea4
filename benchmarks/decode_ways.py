"""The ways to decode that are compared: each runs a `Work` and gives the tokens of every request, exactly as many as were asked for.

slipstream's engine    softmax at temperature 1, one counter-based draw per token; the logprob of every token, in frames with the version,
                       as a rollout worker gets them; a prompt once per group
`generate`             softmax at temperature 1, `torch.multinomial`; logprobs only where the table says so (`output_logits` and
                       `compute_transition_scores`); the prompt of every sample
`generate_batch`       the manager behind it; the same sampling; logprobs (`return_logprobs`); its own sharing of prefixes
vLLM                   its own sampler; logprobs of the tokens (`logprobs=0`, processed); its own prefix cache

No end token ends anything anywhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from decode_work import GROUP, PROMPT_TOKENS, Work
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.types import GenerateRequest, Purpose, Sampling

MAX_CONTEXT = 512
DEADLINE_S = 600.0


class Way(Protocol):
    name: str
    settles_s: float  # until its threads are still after a run

    def run(self, work: Work) -> list[list[int]]:
        """The new tokens of each request."""
        ...


class Slipstream:
    """The shipped engine with `batch` slots, driven as its own loop drives it: a tick, a frame."""

    name = "slipstream"
    settles_s = 0.0

    def __init__(self, model: PreTrainedModel, batch: int, *, min_rows: int, greedy: bool = False):
        self.engine = EmbeddedEngine(model, slots=batch, max_context=MAX_CONTEXT, min_rows=min_rows)
        self.engine.set_version(0, 0, "")
        self._purpose, self._temperature = (Purpose.EVAL, 0.0) if greedy else (Purpose.TRAIN, 1.0)
        if greedy:
            self.engine.pin(share=True)
        self._runs = 0

    def run(self, work: Work) -> list[list[int]]:
        self._runs += 1
        handles = [self.engine.submit(self.request(work, i)) for i in range(work.num_requests)]
        tokens: dict[int, list[int]] = {handle: [] for handle in handles}
        while self.engine.has_work():
            frame = self.engine.tick()
            for handle, token in zip(frame.handles.tolist(), frame.token_ids.tolist(), strict=True):
                tokens[handle].append(token)
        return [tokens[handle] for handle in handles]

    def request(self, work: Work, i: int) -> GenerateRequest:
        return GenerateRequest(
            group_id=self._runs * 1_000_000 + i // GROUP,
            sample=i % GROUP,
            attempt=0,
            turn=0,
            purpose=self._purpose,
            token_ids=np.array(work.prompt(i), dtype=np.int32),
            prompt_length=PROMPT_TOKENS,
            num_sampled=0,
            sampling=Sampling(temperature=self._temperature, max_new_tokens=work.lengths[i]),
            stop_token_ids=(),
        )


class Generate:
    """transformers' `generate`, `batch` requests at a time: all of a batch decode until its longest has ended, as `generate` does."""

    settles_s = 0.0

    def __init__(self, model: PreTrainedModel, batch: int, *, greedy: bool = False, logprobs: bool = False):
        self.name = "generate, logprobs too" if logprobs else "generate"
        self._model, self._batch, self._logprobs = model, batch, logprobs
        model.generation_config = GenerationConfig(pad_token_id=0)  # no end token
        self._sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

    @torch.inference_mode()
    def run(self, work: Work) -> list[list[int]]:
        out: list[list[int]] = []
        for at in range(0, work.num_requests, self._batch):
            lengths = work.lengths[at : at + self._batch]
            prompts = torch.tensor([work.prompt(i) for i in range(at, at + len(lengths))])
            settings: dict[str, Any] = {**self._sampling, "max_new_tokens": max(lengths)}
            if self._logprobs:
                settings |= {"return_dict_in_generate": True, "output_logits": True}
            result = self._model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
            if self._logprobs:
                self._model.compute_transition_scores(result.sequences, result.logits, normalize_logits=True)
                result = result.sequences
            out += [row[:length] for row, length in zip(result[:, PROMPT_TOKENS:].tolist(), lengths, strict=True)]
        return out


class GenerateBatch:
    """transformers' continuous batching: the manager behind `generate_batch`, which alone takes a length per request."""

    name = "generate_batch"
    settles_s = 0.0

    def __init__(self, model: PreTrainedModel, batch: int):
        self._model = model
        self._config = ContinuousBatchingConfig(
            max_requests_per_batch=batch,
            max_batch_tokens=1024,
            num_blocks=2 * batch,  # of 256 tokens; on a CPU it cannot tell how many fit
            return_logprobs=True,
        )

    def run(self, work: Work) -> list[list[int]]:
        sampling = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0)
        manager = self._model.continuous_batching_context_manager(
            generation_config=sampling, continuous_batching_config=self._config, block=True, timeout=DEADLINE_S
        )
        deadline = time.monotonic() + DEADLINE_S
        with manager as running:
            for i, length in enumerate(work.lengths):
                running.add_request(list(work.prompt(i)), request_id=str(i), max_new_tokens=length)
            done: dict[int, list[int]] = {}
            while len(done) < work.num_requests:
                if time.monotonic() > deadline or not running.is_running():
                    raise RuntimeError(f"generate_batch ended after {len(done)} of {work.num_requests} requests")
                result = running.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[int(result.request_id)] = list(result.generated_tokens)
        return [done[i] for i in range(work.num_requests)]


class VLLM:
    """vLLM in a process and an environment of its own (`peers/decode_vllm.py`), which this one talks to by lines of JSON."""

    name = "vLLM"
    settles_s = 3.0  # its threads spin for 2 s

    def __init__(self, python: str, folder: Path, batch: int, threads: int, dtype: str):
        script = Path(__file__).parent / "peers" / "decode_vllm.py"
        cores = sorted(os.sched_getaffinity(0))[:threads]
        env = {
            **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "2",
        }
        command = [python, str(script), str(folder), str(batch), dtype, str(MAX_CONTEXT)]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()["version"]

    def run(self, work: Work) -> list[list[int]]:
        assert self._process.stdin is not None
        prompts = [list(work.prompt(i)) for i in range(work.num_requests)]
        self._process.stdin.write(json.dumps({"prompts": prompts, "lengths": work.lengths}) + "\n")
        self._process.stdin.flush()
        return self._answer()["tokens"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answer(self) -> dict[str, Any]:
        """The next line of JSON; what else vLLM prints is passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:  # ends with the process
            if line.startswith('{"decode": '):
                return json.loads(line)["decode"]
        raise RuntimeError("vLLM ended; its reason is on stderr")
