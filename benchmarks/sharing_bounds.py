"""What computing a shared prompt once can gain at most, in floating-point operations of the matrices.

P prompt tokens, R new tokens per rollout, G rollouts per prompt; b parameters without embedding and head, h parameters of the head. A token
costs 2b operations in the body and 2h where its logits are needed: for every new token, not for the prompt's. The backward pass costs twice
the forward pass. Attention between tokens is left out: at these lengths it is a few per cent.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """One prompt's rollouts, and the model."""

    prompt: float  # P
    new: float  # R
    group: int  # G
    body: float  # b
    head: float  # h

    @property
    def training(self) -> float:
        """[G (P + R) b + G R h] / [(P + G R) b + G R h]: forward and backward pass, each prompt once against once per rollout.

        >>> round(Shape(52, 24, 8, 106.2, 28.3).training, 2)
        2.23
        """
        return self._train(shared=False) / self._train(shared=True)

    @property
    def generation(self) -> float:
        """[G P b + G R (b + h)] / [P b + G R (b + h)]: the prefill of a prompt once against once per rollout; decoding is the same."""
        return self._generate(shared=False) / self._generate(shared=True)

    @property
    def step(self) -> float:
        """Both together: generation, then a forward and a backward pass."""
        return self._step(shared=False) / self._step(shared=True)

    def operations(self, *, shared: bool) -> float:
        """Of one prompt's rollouts in one step."""
        return 2 * self._step(shared=shared)

    def _train(self, *, shared: bool) -> float:
        prompts = 1 if shared else self.group
        return (prompts * self.prompt + self.group * self.new) * self.body + self.group * self.new * self.head

    def _generate(self, *, shared: bool) -> float:
        prompts = 1 if shared else self.group
        return prompts * self.prompt * self.body + self.group * self.new * (self.body + self.head)

    def _step(self, *, shared: bool) -> float:
        return 3 * self._train(shared=shared) + self._generate(shared=shared)
