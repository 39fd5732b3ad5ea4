"""slipstream as a program of `turns.py`: trains a run file and prints every step's metrics as one line of JSON.

python step_lines.py RUN.toml
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slipstream import train
from slipstream.config.load import load_config


def train_and_tell(run_file: Path) -> None:
    train(load_config([run_file]), on_step=lambda line: print(json.dumps(line, default=float), flush=True))


if __name__ == "__main__":
    train_and_tell(Path(sys.argv[1]))
