"""Tools that the tests name in settings."""

import threading
import time

meeting = threading.Barrier(2)
release = threading.Event()


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b (int): the second

    Returns:
        their sum
    """
    return a + b


async def shout(text: str) -> dict:
    """Upper case."""
    return {"text": text.upper()}


def meet() -> str:
    """Waits for a second call at the same time."""
    meeting.wait(timeout=10)
    return "met"


def hang() -> str:
    """Never answers in time."""
    release.wait(timeout=30)
    return "late"


def fail(code: int) -> None:
    """Raises."""
    raise KeyError(code)


def now() -> float:
    return time.time()
