"""The logprob stage between rollout and trainer: what frozen models say of the sampled tokens, computed off the trainer's critical path."""
