"""The pages are true: their examples run and print what they say, and their links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from kda2.cli.app import app
from kda2.contract import TensorSpec
from kda2.ops.kda.spec import KDA
from kda2.testing import FAMILIES, STAGES
from kda2.workbench import gist
from kda2.workbench.rounds import STOP_RULES
from kda2.workbench.verifier.questions import OPTIONS, OUTPUTS, TENSORS

ROOT = Path(__file__).parent.parent
OPERATORS = sorted((ROOT / "src" / "kda2" / "ops").glob("*/README.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *OPERATORS]
KERNELS, WORKBENCH = ROOT / "docs" / "kernels.md", ROOT / "docs" / "workbench.md"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [ROOT / "README.md", KERNELS, *OPERATORS], ids=name_of)
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


def rows(page: Path, *heads: str) -> list[list[str]]:
    """The cells of the first table whose first columns are called `heads`, without marks of code or a last star."""
    _, _, rest = page.read_text().partition(f"\n| {' | '.join(heads)} |")
    lines = [line.strip("|").split(" | ") for line in rest.partition("\n\n")[0].splitlines()[2:]]
    return [[cell.replace("`", "").strip().removesuffix(" *") for cell in cells] for cells in lines]


def names(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(spec.name for spec in specs)


def test_the_contract_of_a_kernel_names_what_run_is_given() -> None:
    assert ", ".join(row[0] for row in rows(KERNELS, "tensor")).split(", ") == list(TENSORS)
    assert [row[0] for row in rows(KERNELS, "option")] == list(OPTIONS)
    assert [row[0] for row in rows(KERNELS, "output")] == list(OUTPUTS)


def test_the_page_of_kernels_lists_the_families_and_what_they_probe() -> None:
    assert rows(KERNELS, "family") == [[f.name, f.probes] for f in FAMILIES.values()]
    starred = re.findall(r"^\| `(\w+)` \* \|", KERNELS.read_text(), re.MULTILINE)
    assert starred == [f.name for f in FAMILIES.values() if f.judge == "same_roundings"]


def test_the_page_of_kernels_lists_the_stages_of_chunked_kda() -> None:
    listed = [row[:3] for row in rows(KERNELS, "stage", "takes")]
    assert listed == [[s.name, names(s.inputs), names(s.outputs)] for s in STAGES.values()]


def test_the_page_of_kernels_gives_the_limits() -> None:
    listed = {(name, *row[1:]) for row in rows(KERNELS, "dtype of q, k, v") for name in row[0].split(", ")}
    limits = {(name, float(l2), float(element)) for name, l2, element in listed}
    assert limits == {(t.dtype, t.relative_l2, t.element_rms) for t in KDA.tolerances if not t.family}


def test_the_page_of_the_workbench_lists_the_kinds_of_ledger_lines() -> None:
    assert sorted(row[0] for row in rows(WORKBENCH, "kind")) == sorted(gist._TELL)


def test_the_page_of_the_workbench_lists_the_rules_that_stop_a_run() -> None:
    assert sorted(row[0] for row in rows(WORKBENCH, "rule")) == sorted(STOP_RULES)


@pytest.mark.parametrize("page", [ROOT / "README.md", KERNELS, WORKBENCH, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_commands_are_commands(page: Path) -> None:
    known = {c.callback.__name__ for c in app.registered_commands if c.callback} | {
        g.name for g in app.registered_groups
    }
    used = set(re.findall(r"(?:`|^|\$ )kda2 ([a-z]+)", page.read_text(), re.MULTILINE))
    assert used and used <= known
