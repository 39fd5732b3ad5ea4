"""The documentation's links lead somewhere, and the map of the code has every file of the parts that it lists file by file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CODE = ROOT / "src" / "slipstream"


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("part", [".", "controller", "launch", "weight_sync", "engines", "engines/vllm", "engines/embedded"])
def test_the_map_of_the_code_has_every_file(part):
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    code_map = text.split("```")[1]
    absent = [file.name for file in (CODE / part).glob("*.py") if file.name not in code_map and file.name != "__init__.py"]
    assert not absent, f"docs/architecture.md, the map of the code, lacks {', '.join(sorted(absent))}"


def test_the_tests_that_the_documentation_names_exist():
    for page in PAGES:
        for name in re.findall(r"(?:(?:unit|integration|faults)/)?test_\w+\.py", page.read_text(encoding="utf-8")):
            found = list((ROOT / "tests").rglob(Path(name).name))
            assert found, f"{page.name} names {name}"
            assert "/" not in name or any(str(path).endswith(name) for path in found), f"{page.name} names {name}"
