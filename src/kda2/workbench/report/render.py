"""From a ledger to a page. Everything shown is read from the ledger; nothing is computed from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from kda2.workbench import extras
from kda2.workbench import ledger as ledgers
from kda2.workbench.records import STAGES, LedgerLine, Verdict
from kda2.workbench.report import charts

# Instructions worth a column, in the order of a kernel's life: load, compute, synchronise, store, spill.
OPCODES = (
    "LDG",
    "LDGSTS",
    "UTMALDG",
    "LDS",
    "HGMMA",
    "HMMA",
    "FFMA",
    "MUFU",
    "SHFL",
    "BAR",
    "STS",
    "STG",
    "LDL",
    "STL",
)


@dataclass
class Row:
    """One candidate as the report shows it."""

    name: str
    about: dict[str, Any]
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    judged: dict[str, Any] = field(default_factory=dict)

    @property
    def machine_code(self) -> dict[str, dict[str, Any]]:
        """The L1 evidence of each stage, or nothing."""
        found: dict[str, dict[str, Any]] = self.evidence("L1").get("stages", {})
        return found

    @property
    def families(self) -> dict[str, dict[str, Any]]:
        """The numerics of each probe family, from wherever they ran."""
        for stage in ("L4", "L3"):
            if found := self.evidence(stage).get("families"):
                return dict(found)
        return {}

    def evidence(self, stage: str) -> dict[str, Any]:
        verdict = self.verdicts.get(stage)
        return {} if verdict is None else verdict.evidence


@dataclass
class Story:
    """A ledger sorted for reading."""

    run: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    choice: dict[str, Any] = field(default_factory=dict)
    stopped: dict[str, Any] = field(default_factory=dict)
    utc: str = ""
    last_utc: str = ""


def tell(lines: Iterable[LedgerLine]) -> Story:
    """Sort a ledger's lines."""
    story = Story()
    for line in lines:
        p = line.payload
        story.utc, story.last_utc = story.utc or line.utc, line.utc
        if line.kind == "run":
            story.run = p
        elif line.kind == "candidate":
            story.rows[p["name"]] = Row(p["name"], p)
        elif line.kind == "verdict":
            verdict = Verdict.model_validate(p["verdict"])
            story.rows[p["candidate"]].verdicts[verdict.stage] = verdict
        elif line.kind == "judged":
            story.rows[p["name"]].judged = p
        elif line.kind == "choice":
            story.choice = p
        elif line.kind == "stopped":
            story.stopped = p
    return story


def render(ledger: Path) -> str:
    """The report of a ledger as one HTML page without references to anything outside it."""
    story, check = tell(ledgers.read(ledger)), ledgers.verify(ledger)
    jinja2 = extras.load("jinja2", "the report")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"outcome": outcome_class, "short": short, "sci": scientific, "pretty": pretty}
    text = (resources.files("kda2.workbench.report") / "template.html.j2").read_text(encoding="utf-8")
    rows = list(story.rows.values())
    page: str = environment.from_string(text).render(
        story=story,
        rows=rows,
        stages=STAGES,
        opcodes=_present(rows),
        check=check,
        ledger=ledger.name,
        charts=charts.build(story.run, rows, story.choice),
    )
    return page


def _present(rows: Iterable[Row]) -> list[str]:
    """The opcodes that any candidate has, spills always: their absence is the news."""
    groups = [stage["groups"] for row in rows for stage in row.machine_code.values()]
    return [name for name in OPCODES if name in ("LDL", "STL") or any(g[name] for g in groups)]


def write_report(ledger: Path, target: Path) -> None:
    """Write the report of `ledger` to `target`, whole or not at all."""
    page, part = render(ledger), target.with_name(f"{target.name}.part")
    try:
        part.write_text(page, encoding="utf-8")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def outcome_class(outcome: str) -> str:
    """The style of an outcome: its first word."""
    return outcome.partition("(")[0]


def short(outcome: str) -> str:
    """An outcome in a cell."""
    return "not run" if outcome.startswith("not_run") else outcome


def scientific(x: float | None) -> str:
    """A number of errors' kind; what is not finite was stored as nothing."""
    return "not finite" if x is None else f"{x:.1e}"


def pretty(evidence: dict[str, Any]) -> str:
    """Evidence as indented JSON."""
    return json.dumps(evidence, indent=1, ensure_ascii=False)
