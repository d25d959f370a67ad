"""The pages are true: their examples run and print what they say, and their links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPERATORS = sorted((ROOT / "src" / "kda2" / "ops").glob("*/README.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *OPERATORS]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [ROOT / "README.md", *OPERATORS], ids=name_of)
def test_examples_run(page: Path) -> None:
    examples = blocks(page, "python")
    assert examples
    for code in examples:
        exec(compile(code, name_of(page), "exec"), {})


def test_the_first_example_prints_what_the_page_shows() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(blocks(ROOT / "README.md", "python")[0], {})
    assert printed.getvalue() == blocks(ROOT / "README.md", "text")[0]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []
