"""`builtin:tiny`: a small Llama model with a byte-level tokenizer, made on first use and cached. Nothing is downloaded.

Its weights come from a seed and a short supervised warm start on a few examples of `builtin:sort_digits`, learnt nearly by heart and
just long enough that the greedy answer is right for about one unseen prompt in five: something to start from, and most of the way
still to go. Few examples make a confident model, whose samples are right almost as often as its greedy answers; many make a hesitant
one, whose samples are hardly ever right, and reinforcement learning feeds on samples.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from slipstream.data import builtin
from slipstream.errors import ModelError
from slipstream.models.cache import build_once

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

NAME = "builtin:tiny"
ROLES = ("system", "user", "assistant", "tool")
END, PAD = "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class TinyRecipe:
    """The model and its warm start."""

    seed: int = 0
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    max_positions: int = 512
    batch_size: int = 64
    learning_rate: float = 3e-3
    warm_rows: int = 64  # of the warm part, learnt over and over; the rest of the part decides when to stop
    probe_every: int = 2  # steps
    enough: float = 0.18  # share of probe rows answered exactly
    max_steps: int = 1000


def tiny_folder(recipe: TinyRecipe = TinyRecipe()) -> Path:
    """The folder (config, safetensors, tokenizer) that `from_pretrained` loads; made in some seconds when it is not there yet."""
    sources = b"".join(Path(file).read_bytes() for file in (__file__, builtin.__file__))
    key = hashlib.sha256(sources + repr(recipe).encode()).hexdigest()[:16]
    return build_once(f"tiny-{key}", lambda folder: _build(recipe, folder))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, one token per role, an end token (which ends every message) and a padding token."""
    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    roles = [f"<|{role}|>" for role in ROLES]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, END, *roles)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=END, additional_special_tokens=roles)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(recipe: TinyRecipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model; the caller's random state is left alone."""
    from transformers import LlamaForCausalLM  # slow to import, and not needed where the model is in the cache

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=4 * recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),  # type: ignore[arg-type]
        eos_token_id=tokenizer.convert_tokens_to_ids(END),  # type: ignore[arg-type]
        bos_token_id=None,
    )
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(config)


def _build(recipe: TinyRecipe, folder: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of every sum, hence the weights, must not depend on the machine's cores
    try:
        tokenizer = make_tokenizer()
        model = make_model(recipe, tokenizer)
        warm_start(recipe, model, tokenizer)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def warm_start(recipe: TinyRecipe, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> int:
    """Supervised steps until `recipe.enough` of the probe rows are right; their number. ModelError if that never happens."""
    tokens, prompt_length = _encode(builtin.sort_digits("warm"), tokenizer)
    train, probe = tokens[: recipe.warm_rows], tokens[recipe.warm_rows :]
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(recipe.seed)
    for step in range(1, recipe.max_steps + 1):
        batch = train[torch.randint(len(train), (recipe.batch_size,), generator=generator)]
        logits = _answer_logits(model, batch, prompt_length)
        F.cross_entropy(logits.flatten(0, 1), batch[:, prompt_length:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % recipe.probe_every == 0 and _share_right(model, probe, prompt_length) >= recipe.enough:
            return step
    raise ModelError(f"{NAME}: the warm start did not reach {recipe.enough} within {recipe.max_steps} steps")


def _encode(rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, int]:
    """([rows, T] token ids of prompt, answer and end token, number of prompt tokens). All rows have the same length."""

    def prompt_ids(row: dict[str, str]) -> list[int]:
        text = tokenizer.apply_chat_template([{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(str(text), add_special_tokens=False)

    ids = [[*prompt_ids(row), *tokenizer.encode(row["answer"] + END, add_special_tokens=False)] for row in rows]
    return torch.tensor(ids), len(prompt_ids(rows[0]))


def _answer_logits(model: LlamaForCausalLM, tokens: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """[B, A, V]: the logits that predict the A answer tokens."""
    return model(input_ids=tokens).logits[:, prompt_length - 1 : -1].float()


@torch.no_grad()
def _share_right(model: LlamaForCausalLM, tokens: torch.Tensor, prompt_length: int) -> float:
    """Share of rows whose greedy answer is exact: greedy decoding gives the answer iff every answer token is the most likely next one."""
    best = _answer_logits(model, tokens, prompt_length).argmax(-1)
    return (best == tokens[:, prompt_length:]).all(-1).float().mean().item()
