"""A small model that calls a tool: `builtin:tiny`'s architecture, taught to say `CALL` first and to sort digits once the tool has answered.

Made once per machine, in some seconds, as `builtin:tiny` is.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from slow_tool import ANSWER, wait

from slipstream.data.builtin import sort_digits
from slipstream.environments.schema import tool_schema
from slipstream.models.cache import build_once
from slipstream.models.tiny import CHAT_TEMPLATE, END, TinyRecipe, make_model, make_tokenizer
from slipstream.rollout.rendering import Renderer

CALL = '{"name": "wait"}'
MAX_NEW_TOKENS = 20  # per turn; the call and its end token are 17
BATCH, MAX_STEPS, LEARNT = 32, 300, 0.01  # LEARNT: mean loss per token of the call
TEMPLATE = (  # tools by their names alone: this model has learnt what they do
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}<|end|>{% endif %}" + CHAT_TEMPLATE
)


def tool_caller() -> Path:
    """The folder that `model.name` names."""
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    return build_once(f"tool-caller-{key}", _build)


def _build(folder: Path) -> None:
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = make_model(TinyRecipe(), tokenizer)
    _teach(model, *_conversations(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _conversations(tokenizer) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(ids [rows, T], whether the model says the token [T], tokens of the call). Ids are those that a rollout would have."""
    renderer, tools = Renderer(tokenizer, 512), (tool_schema(wait),)

    def said(text: str) -> list[int]:
        return tokenizer.encode(text + END, add_special_tokens=False)

    rows, mask = [], []
    for row in sort_digits("warm"):
        prompt = renderer.prompt([{"role": "user", "content": row["prompt"]}], MAX_NEW_TOKENS, tools).tolist()
        reply = renderer.continuation(said("")[0], [{"role": "tool", "content": ANSWER, "name": "wait"}], tools).tolist()
        parts = [(prompt, False), (said(CALL), True), (reply, False), (said(row["answer"]), True)]
        rows.append([token for ids, _ in parts for token in ids])
        mask = [own for ids, own in parts for _ in ids]
    return torch.tensor(rows), torch.tensor(mask), len(said(CALL))


def _teach(model, ids: torch.Tensor, own: torch.Tensor, num_call: int) -> None:
    """Supervised steps on the model's own tokens, until it knows its calls; then it is made sure of them. RuntimeError if it never does."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    where = own[1:].nonzero().flatten()
    for _ in range(MAX_STEPS):
        batch = ids[torch.randint(len(ids), (BATCH,), generator=generator)]
        logits = model(input_ids=batch).logits[:, where].float()
        losses = F.cross_entropy(logits.transpose(1, 2), batch[:, where + 1], reduction="none")
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if losses[:, :num_call].mean() < LEARNT:
            with torch.no_grad():
                model.model.norm.weight.mul_(2)  # logits of twice the size: a call that comes out wrong is one in thousands
            return
    raise RuntimeError(f"the model does not know its calls after {MAX_STEPS} steps")
