"""Tests against a real vLLM server: whole runs of the other folders' kind, so their helpers are used here."""

import sys
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).parents[1] / folder) for folder in ("integration", "faults", "unit")]
