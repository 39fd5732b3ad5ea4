"""Puts recorded figures into the documentation: each block `<!-- figures: NAME -->` ... `<!-- end -->` is made from results/NAME.json.

    python benchmarks/report.py [PAGE ...]        default: docs/performance.md and docs/results.md

So that no figure is copied by hand, and each stands with its command, machine and date.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from bench import RESULTS, Table, Target

DOCS = Path(__file__).parent.parent / "docs"
PAGES = (DOCS / "performance.md", DOCS / "results.md")
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(record: dict[str, Any]) -> str:
    """Figures, tables, targets, and how they came to be."""
    parts = [f"![{caption}](figures/{name})" for caption, name in record.get("figures", {}).items()]
    parts += [Table(**table).markdown() for table in record["tables"]]
    if record["targets"]:
        goals = Table("Targets", ("what", "wanted", "measured", ""))
        for fields in record["targets"]:
            target = Target(**fields)
            goals.rows.append((target.what, target.wanted, target.measured, "reached" if target.reached else "**missed**"))
        parts.append(goals.markdown())
    m = record["machine"]
    versions = ", ".join(f"{name} {m[name]}" for name in ("torch", "transformers") if name in m)
    parts.append(
        f"`{record['command']}`, {record['date']}, {m['cores']} cores of {m['cpu']}, {m['memory_gib']:g} GiB, Python {m['python']}"
        f"{', ' + versions if versions else ''}; load before it {m['load_1m']:g}, took {record['took_s']:.0f} s."
    )
    return "\n\n".join(parts)


def fill(text: str, results: Path) -> str:
    """The page with every block made anew; one without recorded results says so."""

    def block(found: re.Match[str]) -> str:
        path = results / f"{found[2]}.json"
        body = rendered(json.loads(path.read_text())) if path.exists() else "Not measured yet."
        return f"{found[1]}{body}\n{found[3]}"

    return BLOCK.sub(block, text)


def main() -> None:
    for page in [Path(name) for name in sys.argv[1:]] or PAGES:
        page.write_text(fill(page.read_text(), RESULTS))


if __name__ == "__main__":
    main()
