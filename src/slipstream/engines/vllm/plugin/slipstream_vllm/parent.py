"""The processes of a server that a run has started end with it, one by one, also where nobody is left who could end them."""

import ctypes
import os
import signal
import sys

OWNED_VARIABLE = "SLIPSTREAM_VLLM_OWNED"  # the pid of who started such a server; one that is attached to belongs to somebody else
_PR_SET_PDEATHSIG = 1


def end_with_parent():
    """From now on this process gets SIGKILL when its parent ends (Linux). Its own children must ask for the same."""
    owner = os.environ.get(OWNED_VARIABLE)
    if owner is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if not os.path.exists(f"/proc/{owner}"):  # it ended while this process was starting, and so perhaps did the parent
            os._exit(1)
