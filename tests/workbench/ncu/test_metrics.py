"""Every counter that the code asks for exists: on the chip, or in the header of a report of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kda2.workbench.profiler.ncu as package
from kda2.workbench.profiler.ncu import Report, collected, not_collected
from kda2.workbench.profiler.ncu.figures import FIGURES
from kda2.workbench.profiler.ncu.metrics import per_instruction
from kda2.workbench.profiler.ncu.presets import PRESETS
from kda2.workbench.profiler.ncu.rules import RULES

DATA = Path(__file__).parent / "data"
SUFFIX = re.compile(r"\.(avg|sum|min|max|ratio|pct)\b.*")
COUNTER = re.compile(r"\b[a-z][a-z0-9]*__[a-z0-9_]+(?:\.[a-z_]+)*")


@pytest.fixture
def real(rows: list[list[str]]) -> set[str]:
    """Base names: what the chip offers, and what the measured report has."""
    chip = (DATA / "gh100_metrics.txt").read_text().split()
    assert len(chip) == 3523
    return {*chip, *(SUFFIX.sub("", name) for name in rows[0])}


def test_every_counter_exists(real: set[str]) -> None:
    assert [name for name in (*collected(), *per_instruction()) if SUFFIX.sub("", name) not in real] == []


def test_no_counter_is_named_twice() -> None:
    assert len(set(collected())) == len(collected()) > 60


def test_figures_are_made_of_counters_that_are_collected() -> None:
    """So that the test above speaks of every counter there is."""
    used = {name for figure in FIGURES.values() for name in COUNTER.findall(figure.formula)}
    assert used - set(collected()) == set()
    assert len(used) > 30


def test_no_source_file_names_another_one(real: set[str]) -> None:
    """Names that are put together have their beginnings there, and stand whole in the tables above."""
    for path in Path(str(package.__file__)).parent.glob("*.py"):
        names = {SUFFIX.sub("", name) for name in COUNTER.findall(path.read_text())}
        assert [name for name in names if not any(one.startswith(name) for one in real)] == []


def test_a_full_set_has_them_all(measured: Report) -> None:
    assert [not_collected(kernel) for kernel in measured.kernels] == [(), ()]


def test_rules_and_gates_name_figures() -> None:
    assert {rule.figure for rule in RULES} <= set(FIGURES)
    assert {gate.figure for preset in PRESETS.values() for gate in preset.gates} <= set(FIGURES)
