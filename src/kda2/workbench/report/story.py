"""A ledger sorted for reading: each candidate with what was found of it, the plan, the rounds, and how it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from kda2.workbench import predict
from kda2.workbench.blockplan import BlockPlan
from kda2.workbench.growth import Growth
from kda2.workbench.records import STAGES, LedgerLine, Verdict

MEASURED, PREDICTED = "measured", "predicted"
_TRITON = "triton"


@dataclass
class Row:
    """One candidate as the report shows it. `held` says what became of its hypothesis, "" where no round judged it."""

    name: str
    about: dict[str, Any]
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    held: str = ""

    @property
    def writer(self) -> str:
        """Who wrote it; older ledgers do not say."""
        return str(self.about.get("writer", ""))

    @property
    def parent(self) -> str:
        return self.about.get("parent") or ""

    @property
    def hypothesis(self) -> str:
        return str(self.about.get("hypothesis", ""))

    @property
    def status(self) -> str:
        """ "correct" if numerics passed and nothing refuted it, "refuted", or "not shown"."""
        if any(v.refuted for v in self.verdicts.values()):
            return "refuted"
        passed = any(v.passed for stage, v in self.verdicts.items() if stage in ("L3", "L4"))
        return "correct" if passed else "not shown"

    @property
    def machine_code(self) -> dict[str, dict[str, Any]]:
        """The L1 evidence of each stage, or nothing."""
        found: dict[str, dict[str, Any]] = self.evidence("L1").get("stages", {})
        return found

    @property
    def numerics(self) -> dict[str, Any]:
        """The evidence of the numerics, from wherever they ran."""
        found = (self.evidence(stage) for stage in ("L4", "L3"))
        return next((evidence for evidence in found if evidence.get("families")), {})

    @property
    def families(self) -> dict[str, dict[str, Any]]:
        """The numerics of each probe family."""
        return dict(self.numerics.get("families", {}))

    @property
    def latency(self) -> dict[str, Any]:
        """The evidence of its latency, nothing unless L6 passed."""
        verdict = self.verdicts.get("L6")
        return verdict.evidence if verdict is not None and verdict.passed else {}

    def evidence(self, stage: str) -> dict[str, Any]:
        verdict = self.verdicts.get(stage)
        return {} if verdict is None else verdict.evidence


@dataclass(frozen=True)
class Speed:
    """How many times as fast as what ships; the interval only where it was measured."""

    value: float
    low: float | None = None
    high: float | None = None
    verdict: str = ""


@dataclass
class Story:
    """What a ledger tells. `stopped` is how the run ended, unless it was resumed; `resumed` tells when it was."""

    run: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    choice: dict[str, Any] = field(default_factory=dict)
    stopped: dict[str, Any] = field(default_factory=dict)
    resumed: list[dict[str, Any]] = field(default_factory=list)
    growth: list[dict[str, Any]] = field(default_factory=list)
    utc: str = ""
    last_utc: str = ""

    @property
    def capture(self) -> dict[str, Any]:
        """The facts of the captured call, nothing where there was none."""
        return self.run.get("capture") or {}

    @property
    def environment(self) -> dict[str, Any]:
        return self.run.get("environment") or {}

    @property
    def label(self) -> str:
        """Whether times are measured or predicted."""
        said = (x.get("label") for x in (self.choice, self.stopped, *self.rounds))
        default = MEASURED if any(row.latency for row in self.rows.values()) else PREDICTED
        return next((str(label) for label in said if label), default)

    @property
    def shipped(self) -> Row | None:
        """What the others are held against: what ships."""
        against = (row.latency.get("against") for row in self.rows.values())
        name = next((name for name in against if name in self.rows), None)
        if name is not None:
            return self.rows[name]
        return next((r for r in self.rows.values() if r.about.get("impl") == _TRITON and not r.parent), None)

    @property
    def best(self) -> Row | None:
        """The chosen candidate, or the best so far of a run that chose none."""
        if self.choice:
            return self.rows.get(self.choice["chosen"])
        names = (x.get("best") for x in (self.stopped, *reversed(self.rounds)))
        return next((self.rows[name] for name in names if name in self.rows), None)

    @cached_property
    def book(self) -> BlockPlan | None:
        """The plan's book, if it is one that this version reads."""
        try:
            return BlockPlan.model_validate(self.plan["book"]) if "book" in self.plan else None
        except ValidationError:
            return None

    @cached_property
    def curves(self) -> list[Growth]:
        """The error growth that was measured, as far as this version reads it."""
        found = []
        for payload in self.growth:
            with contextlib.suppress(ValidationError):
                found.append(Growth.model_validate(payload))
        return found

    @property
    def arch(self) -> int:
        return int(self.run.get("arch", 0))

    def us(self, row: Row) -> float | None:
        """A candidate's microseconds: those it was ranked by, else those of L6, else the model's."""
        ranked = {entry["name"]: float(entry["us"]) for entry in self.choice.get("ranking", ())}
        if row.name in ranked:
            return ranked[row.name]
        if self.label == MEASURED:
            return row.latency.get("median_us")
        return self._modelled(row) if row.status != "refuted" else None

    def speed(self, row: Row) -> Speed | None:
        """Against what ships: as it was measured beside it, or by the model."""
        if self.label == MEASURED:
            return Speed(**found) if (found := row.latency.get("speed")) else None
        base = self.us(self.shipped) if self.shipped is not None and row is not self.shipped else None
        us = self.us(row)
        return Speed(base / us) if base and us else None

    def stages_us(self, row: Row) -> dict[str, float]:
        """Microseconds of each of a candidate's stages, measured or modelled; nothing where they are not known."""
        if self.label == MEASURED:
            return dict(row.latency.get("stages_us", {}))
        try:
            return predict.stages_us(row.machine_code, self.arch) if row.about.get("impl") == _TRITON else {}
        except KeyError:  # older machine code evidence holds too little
            return {}

    def missing(self, row: Row) -> list[str]:
        """The stages that the ledger holds no verdict of."""
        return [stage for stage in STAGES if stage not in row.verdicts]

    def _modelled(self, row: Row) -> float | None:
        stages = self.stages_us(row)
        return round(sum(stages.values()), 3) if stages else None


def tell(lines: Iterable[LedgerLine]) -> Story:
    """Sort a ledger's lines."""
    story = Story()
    for line in lines:
        story.utc, story.last_utc = story.utc or line.utc, line.utc
        if (take := _TAKE.get(line.kind)) is not None:
            take(story, line)
    return story


def _run(story: Story, line: LedgerLine) -> None:
    story.run = line.payload


def _candidate(story: Story, line: LedgerLine) -> None:
    story.rows[line.payload["name"]] = Row(line.payload["name"], line.payload)


def _verdict(story: Story, line: LedgerLine) -> None:
    verdict = Verdict.model_validate(line.payload["verdict"])
    story.rows[line.payload["candidate"]].verdicts[verdict.stage] = verdict


def _plan(story: Story, line: LedgerLine) -> None:
    story.plan = line.payload


def _round(story: Story, line: LedgerLine) -> None:
    story.rounds.append(line.payload)
    for name, held in line.payload.get("hypotheses", {}).items():
        if name in story.rows:
            story.rows[name].held = held


def _growth(story: Story, line: LedgerLine) -> None:
    story.growth.append(line.payload)


def _choice(story: Story, line: LedgerLine) -> None:
    story.choice = line.payload


def _stopped(story: Story, line: LedgerLine) -> None:
    story.stopped = {"utc": line.utc, **line.payload}


def _resumed(story: Story, line: LedgerLine) -> None:
    """Going on, whether or not it was told how the run had stopped."""
    story.resumed.append({"utc": line.utc, "stopped": story.stopped, **line.payload})
    story.stopped = {}


_TAKE = {
    "run": _run, "candidate": _candidate, "verdict": _verdict, "plan": _plan, "round": _round, "choice": _choice,
    "stopped": _stopped, "resumed": _resumed, "growth": _growth,
}  # fmt: skip
