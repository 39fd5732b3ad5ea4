"""The processes of a server that a run has started end with it, one by one, also where nobody is left who could end them."""

import ctypes
import os
import signal
import sys

OWNED_VARIABLE = "SLIPSTREAM_VLLM_OWNED"  # set for such a server; one that is attached to belongs to somebody else
_PR_SET_PDEATHSIG = 1


def end_with_parent():
    """From now on this process gets SIGKILL when its parent ends (Linux). Its own children must ask for the same."""
    if OWNED_VARIABLE in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
