"""The tool and the reward of `tools.py`, as a run file names them.

The i-th call of a run sleeps the i-th of the drawn times, whatever rollout makes it, so that every run draws the same ones. A line per
call is appended to the file that TOOL_CALLS names.
"""

import itertools
import os
import threading
import time

import numpy as np

MEAN_S, SIGMA, CUT, SEED, NUM_DRAWS = 1.0, 1.0, 4.0, 0, 1 << 14
ANSWER = "done"

_lock, _numbers = threading.Lock(), itertools.count()


def drawn_seconds() -> np.ndarray:
    """[NUM_DRAWS] lognormal, cut at CUT times the mean, then scaled to a mean of MEAN_S."""
    normal = np.random.default_rng(SEED).standard_normal(NUM_DRAWS)
    seconds = np.minimum(np.exp(SIGMA * normal - SIGMA**2 / 2), CUT)
    return seconds * (MEAN_S / seconds.mean())


_seconds = drawn_seconds()


def wait() -> str:
    """Wait for an answer."""
    with _lock:
        number = next(_numbers)
    began = time.monotonic()
    time.sleep(_seconds[number])
    with _lock, open(os.environ["TOOL_CALLS"], "a") as log:
        log.write(f"{number} {began} {time.monotonic()}\n")
    return ANSWER


def last_line(completion: str, answer: str) -> float:
    """1.0 if what the model said last, after the tool had answered, is right."""
    return float(completion.strip().rpartition("\n")[2] == answer)
