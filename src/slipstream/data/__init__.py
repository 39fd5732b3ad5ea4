"""Data: sources, rows, prompts, and what is held out. Imports no torch."""

from slipstream.data.dataset import Data, load_data
from slipstream.data.prompts import render_messages
from slipstream.data.rows import fingerprint, load_rows

__all__ = ["Data", "fingerprint", "load_data", "load_rows", "render_messages"]
