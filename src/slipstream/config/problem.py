"""What the checks of parts of the settings (`*_problems.py`) find; `checks.py` makes conflicts of it."""

Problem = tuple[tuple[str, ...], str]  # (keys, the first to blame; what is wrong and what to do)
