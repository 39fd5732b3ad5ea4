"""What computing a shared prompt once can gain at most, in floating-point operations of the weight matrices.

P prompt tokens, R new tokens per rollout, G rollouts per prompt; b parameters in the matrices of the body, h in the output head. A token
costs 2b operations in the body and 2h where its logits are needed: for every new token, not for the prompt's. Generation reads each prompt
and makes each new token once; a forward pass of training does the same, its backward pass twice as much. So the ratio is the same for
generation, for training and for a whole step:

    gain = [G (P + R) b + G R h] / [(P + G R) b + G R h]

Products between tokens in the attention are left out: at these lengths they are a few per cent.
"""

from __future__ import annotations

from collections.abc import Sequence

PASSES = 4  # generation, forward, and backward, which counts twice


def operations(prompt_tokens: float, new_tokens: float, body: float, head: float) -> float:
    """Of a step, generation and training."""
    return PASSES * 2 * ((prompt_tokens + new_tokens) * body + new_tokens * head)


def sharing_gain(prompt: float, lengths: Sequence[float], body: float, head: float) -> float:
    """Each prompt once per rollout, which is padded to the longest, against once per group without padding.

    `lengths`: R of each rollout of a group.

    >>> round(sharing_gain(52, [24] * 8, 106.2, 28.3), 2)
    2.23
    """
    size = len(lengths)
    alone = operations(size * prompt, size * max(lengths), body, head)
    return alone / operations(prompt, sum(lengths), body, head)
