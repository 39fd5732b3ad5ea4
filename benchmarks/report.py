"""Puts recorded figures into the documentation: each block `<!-- figures: NAME -->` ... `<!-- end -->` is made from results/NAME.json.

    python benchmarks/report.py [PAGE ...]        default: docs/performance.md, results.md, lora.md, weight_sync.md and vllm.md

`figures: NAME 1` is the first of its tables alone. The block of the name `missed` lists every missed target of the page's other blocks, and
every one of them without figures. A block of the name of a folder, results/NAME/, sets the targets of the results there, from another
machine, beside those of results/; `figures: NAME/OTHER` is one of those results whole.

So that no figure is copied by hand, and each stands with its command, machine and date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import RESULTS, Table, Target

DOCS = Path(__file__).parent.parent / "docs"
PAGES = (DOCS / "performance.md", DOCS / "results.md", DOCS / "lora.md", DOCS / "weight_sync.md", DOCS / "vllm.md")
MISSED = "missed"  # the block that sums up the others
BLOCK = re.compile(r"(<!-- figures: ([\w/]+)(?: (\d+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(record: dict[str, Any], table: int = 0) -> str:
    """Figures, tables, targets, and how they came to be; or the n-th table alone, and how it did."""
    parts = [Table(**record["tables"][table - 1]).markdown()] if table else _everything(record)
    return "\n\n".join([*parts, _origin(record)])


def _everything(record: dict[str, Any]) -> list[str]:
    parts = [f"![{caption}](figures/{name})" for caption, name in record.get("figures", {}).items()]
    parts += [Table(**table).markdown() for table in record["tables"]]
    if record["targets"]:
        goals = Table("Targets", ("what", "wanted", "measured", ""))
        for fields in record["targets"]:
            target = Target(**fields)
            goals.rows.append((target.what, target.wanted, target.measured, target.verdict("**missed**")))
        parts.append(goals.markdown())
    return parts


def _origin(record: dict[str, Any]) -> str:
    """Command, date and machine. How busy that was tells of what the command measured itself, not of a report on earlier runs."""
    m = record["machine"]
    versions = ", ".join(f"{name} {m[name]}" for name in ("torch", "transformers") if name in m)
    before = f"load {m['load_before']:g} before it and " if "load_before" in m else "load "
    load = "" if "--only-report" in record["command"] else f"{before}{m.get('load_after', m.get('load_1m')):g} at its end, "
    revision = f", code at {record['revision']}" if record.get("revision") else ""
    return (
        f"`{record['command']}`, {record['date']}, {m['cores']} cores of {m['cpu']}, {m['memory_gib']:g} GiB, Python {m['python']}"
        f"{', ' + versions if versions else ''}{revision}; {load}took {record['took_s']:.0f} s."
        f"{' ' + record['sources'] if record.get('sources') else ''}"
    )


def missed(results: Path, names: Sequence[str]) -> str:
    """Every target that was missed, and every benchmark that was not measured."""
    table, unmeasured = Table("Missed", ("benchmark", "what", "wanted", "measured", "")), []
    for name in names:
        path = results / f"{name}.json"
        if not path.exists():
            unmeasured.append(name)
            continue
        targets = [Target(**fields) for fields in json.loads(path.read_text())["targets"]]
        table.rows += [(name, t.what, t.wanted, t.measured, t.verdict()) for t in targets if not t.reached]
    table.note = f"Not measured yet: {', '.join(unmeasured)}." if unmeasured else ""
    return table.markdown()


def beside(results: Path, folder: Path) -> str:
    """Every target that was measured on the other machine, and what it came to here where that was measured in the same form."""
    table, origins = Table("Targets", ("benchmark", "what", "wanted", "above", "here", "")), []
    for path in sorted(folder.glob("*.json")):
        there, here = json.loads(path.read_text()), results / path.name
        above = {fields["what"]: fields["measured"] for fields in json.loads(here.read_text())["targets"]} if here.exists() else {}
        targets = [Target(**fields) for fields in there["targets"]]
        table.rows += [(path.stem, t.what, t.wanted, above.get(t.what, "-"), t.measured, t.verdict("**missed**")) for t in targets]
        origins.append(f"- {_origin(there)}")
    return "\n\n".join([table.markdown(), "\n".join(origins)])


def _is_machine(results: Path, name: str) -> bool:
    """Whether there are results of another machine by this name; a study may have a folder of parts beside its result."""
    return (results / name).is_dir() and not (results / f"{name}.json").exists()


def fill(text: str, results: Path) -> str:
    """The page with every block made anew; one without recorded results says so. The block `missed` is about all others of the page."""
    names = [name for _, name, _, _ in BLOCK.findall(text) if name != MISSED and "/" not in name and not _is_machine(results, name)]

    def block(found: re.Match[str]) -> str:
        if found[2] == MISSED:
            return f"{found[1]}{missed(results, names)}\n{found[4]}"
        if _is_machine(results, found[2]):
            return f"{found[1]}{beside(results, results / found[2])}\n{found[4]}"
        path = results / f"{found[2]}.json"
        body = rendered(json.loads(path.read_text()), int(found[3] or 0)) if path.exists() else "Not measured yet."
        return f"{found[1]}{body}\n{found[4]}"

    return BLOCK.sub(block, text)


def main() -> None:
    for page in [Path(name) for name in sys.argv[1:]] or PAGES:
        page.write_text(fill(page.read_text(), RESULTS))


if __name__ == "__main__":
    main()
