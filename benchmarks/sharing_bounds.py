"""What computing a shared prompt once can gain at most, in floating-point operations of the matrices.

P prompt tokens, R new tokens per rollout, G rollouts per prompt; b parameters without embedding and head, h parameters of the head. A token
costs 2b operations in the body and 2h where its logits are needed: for every new token, not for the prompt's. Generation reads each prompt
and makes each new token once; a forward pass of training does the same, its backward pass twice as much. So the ratio is the same for
generation, for training and for a whole step. Attention between tokens is left out: at these lengths it is a few per cent.
"""

from __future__ import annotations

from dataclasses import dataclass

PASSES = 4  # generation, forward, and backward, which counts twice


@dataclass(frozen=True, slots=True)
class Shape:
    """One prompt's rollouts, and the model."""

    prompt: float  # P
    new: float  # R
    group: int  # G
    body: float  # b
    head: float  # h

    @property
    def gain(self) -> float:
        """[G (P + R) b + G R h] / [(P + G R) b + G R h]: each prompt once per group against once per rollout.

        >>> round(Shape(52, 24, 8, 106.2, 28.3).gain, 2)
        2.23
        """
        return self.operations(shared=False) / self.operations(shared=True)

    def operations(self, *, shared: bool) -> float:
        """Of one prompt's rollouts in one step, generation and training."""
        prompts = 1 if shared else self.group
        return PASSES * 2 * ((prompts * self.prompt + self.group * self.new) * self.body + self.group * self.new * self.head)
