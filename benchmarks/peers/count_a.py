"""The reward of `vs_trl_async`, for every side. Imports nothing."""


def count_a(completion: str) -> float:
    """How often the letter a occurs."""
    return float(completion.count("a"))
