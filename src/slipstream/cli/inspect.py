"""`slipstream inspect`: where every group of a run went, and what its time and tokens were spent on."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from slipstream.cli.arguments import add_json, run_folder
from slipstream.cli.show import Output
from slipstream.errors import LedgerError

if TYPE_CHECKING:
    from slipstream.controller.state import RunState

HELP = "show where every group of a run went, its staleness, waste and idle time"
EPILOG = """examples:
  slipstream inspect runs/quickstart-20250101-120000
  slipstream inspect runs/quickstart-20250101-120000 --json

Reads the ledger only, so it can be used while the run goes on."""
TAKES_SETTINGS = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="FOLDER", type=Path, help="run folder")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from slipstream.observe.account import account, print_account

    folder = run_folder(args.run)
    state, problem = read_ledger(folder)
    numbers = account(state)
    console = Output(sys.stderr if args.json else sys.stdout)
    console.print(
        f"{escape(str(folder))}: {numbers['steps']} steps, incarnation {numbers['incarnation']}, checkpoints {numbers['checkpoints']}"
    )
    print_account(numbers, console)
    if problem:
        console.print(f"\n[bold red]{escape(problem)}[/bold red]")
    if args.json:
        print(json.dumps({"run_folder": str(folder), **numbers, "problem": problem}))
    return 1 if problem else 0


def read_ledger(folder: Path) -> tuple[RunState, str | None]:
    """(the run's state as its ledger stands now, what does not add up when every group is followed through the log: nothing, normally)."""
    from slipstream.controller.accounts import check_accounts
    from slipstream.controller.ledger import LedgerReader
    from slipstream.controller.run_folder import LEDGER
    from slipstream.controller.state import fold

    with LedgerReader.open(folder / LEDGER) as ledger:
        state = fold(event for *_, event in ledger.live_events())
        try:
            check_accounts(ledger)
        except LedgerError as error:
            return state, str(error)
    return state, None
