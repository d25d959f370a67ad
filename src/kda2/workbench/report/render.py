"""From a ledger to a page. Everything shown is read from the ledger, or follows from what it holds: modelled times come
from the machine code that is written there."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from kda2.workbench import extras, files
from kda2.workbench import ledger as ledgers
from kda2.workbench.planner.amounts import human
from kda2.workbench.records import STAGES
from kda2.workbench.report import charts, sections
from kda2.workbench.report.story import Story, tell

# Outcomes as a cell has them: a mark, and its place when a table is sorted.
_MARKS = {
    "pass": ("✓", 0), "inconclusive": ("?", 1), "fail": ("✗", 2), "invalid": ("✗", 3), "not_run": ("\N{EN DASH}", 4),
}  # fmt: skip
# Candidates whose machine code is shown without being asked for.
_OPEN = 8


def render(ledger: Path) -> str:
    """The report of a ledger as one HTML page without references to anything outside it."""
    story, check = tell(ledgers.read(ledger)), ledgers.verify(ledger)
    drawn = charts.build(story)
    page: str = _environment().get_template("template.html.j2").render(
        story=story, rows=list(story.rows.values()), stages=STAGES, check=check, ledger=ledger.name, charts=drawn,
        plotly=charts.script() if drawn else "", undone=sections.undone(story),
        failures=sections.failures(story.rows.values()), opcodes=sections.opcodes(story.rows.values()),
        with_code=_with_code(story), charts_ranked=charts.RANKED,
    )  # fmt: skip
    return page


def write_report(ledger: Path, target: Path) -> None:
    """Write the report of `ledger` to `target`, whole or not at all."""
    files.replace_whole(target, render(ledger))


@cache
def _environment() -> Any:
    jinja2 = extras.load("jinja2", "the report")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kda2.workbench.report", ""), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "outcome": outcome_class, "mark": mark, "rank": rank, "sci": scientific, "pretty": pretty, "bytes": in_bytes,
        "us": microseconds, "by_stage": by_stage, "kind_of": sections.kind_of, "counted": sections.counted,
        "decision": sections.decision, "traffic": sections.traffic, "resources": sections.resources,
        "floors": sections.floors,
    }  # fmt: skip
    return environment


def _with_code(story: Story) -> tuple[list[Any], list[Any]]:
    """Candidates with machine code: those to show, and those to show on demand."""
    rows = [row for row in story.rows.values() if row.machine_code]
    if len(rows) <= _OPEN:
        return rows, []
    shown = [row for row in rows if row in (story.shipped, story.best)]
    return shown, [row for row in rows if row not in shown]


def outcome_class(outcome: str) -> str:
    """The style of an outcome: its first word."""
    return outcome.partition("(")[0]


def mark(outcome: str) -> str:
    """An outcome in a cell."""
    return _MARKS[outcome_class(outcome)][0]


def rank(outcome: str) -> int:
    """An outcome's place in a sorted column, what passed first."""
    return _MARKS[outcome_class(outcome)][1]


def scientific(x: float | None) -> str:
    """A number of errors' kind; what is not finite was stored as nothing."""
    return "not finite" if x is None else f"{x:.1e}"


def microseconds(us: float | None) -> str:
    """A time in a cell, "" for none."""
    return "" if us is None else f"{us:,.2f}" if us < 1000 else f"{us:,.0f}"


def in_bytes(amount: int) -> str:
    return human(amount, "B")


def by_stage(code: dict[str, dict[str, Any]], name: str) -> str:
    """One figure of each stage's machine code, e.g. "255 / 162 / 255"; shared memory in KiB."""
    unit = 1024 if name == "shared" else 1
    return " / ".join(f"{round(stage[name] / unit, 1):g}" for stage in code.values())


def pretty(evidence: dict[str, Any]) -> str:
    """Evidence as indented JSON."""
    return json.dumps(evidence, indent=1, ensure_ascii=False)
