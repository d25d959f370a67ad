"""What the page's tables hold: what did not run, what failed, the plan's blocks, and the rounds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kda2.workbench.blockplan import BlockPlan, PlannedBlock
from kda2.workbench.records import STAGES
from kda2.workbench.report.story import Row, Story
from kda2.workbench.rounds import GO_ON, STOP_RULES
from kda2.workbench.verifier.words import reasons

# Instructions worth a column, in the order of a kernel's life: load, compute, synchronise, store, spill.
OPCODES = (
    "LDG", "LDGSTS", "UTMALDG", "LDS", "HGMMA", "HMMA", "FFMA", "MUFU", "SHFL", "BAR", "STS", "STG", "LDL", "STL",
)  # fmt: skip
SPILLING = ("LDL", "STL")

# --- not run, and why ---

# Reasons that differ in their particulars only: a pattern, and what they have in common.
_ALIKE = (
    (re.compile(r"pruned: .* spills .*", re.DOTALL), "pruned: it spills more than what ships"),
    (re.compile(r"its modelled time, .* is not below .*", re.DOTALL), "its modelled time is not below the best so far"),
    (re.compile(r"(it needs a GPU|run refuses the probe's call): .*", re.DOTALL), r"\1"),
    (re.compile(r"(its launches could not be recorded without running them): .*", re.DOTALL), r"\1"),
)


@dataclass
class Undone:
    """Stages that did not run for one reason: per candidate the stages and the reason as it was written."""

    reason: str
    stages: dict[str, list[str]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, stage: str, said: str) -> None:
        self.stages.setdefault(name, []).append(stage)
        self.said[name] = "" if said == self.reason else said

    @property
    def extent(self) -> str:
        """Which stages of how many candidates, e.g. "L4, L6 of 12 candidates"."""
        counts = Counter(stage for stages in self.stages.values() for stage in stages)
        alike: dict[int, list[str]] = {}
        for stage in STAGES:
            if counts[stage]:
                alike.setdefault(counts[stage], []).append(stage)
        return "; ".join(f"{', '.join(s)} of {n} candidate{'' if n == 1 else 's'}" for n, s in alike.items())


def undone(story: Story) -> list[Undone]:
    """What did not run, by reason, the widest first."""
    groups: dict[str, Undone] = {}
    for row in story.rows.values():
        for stage, said in _unrun(story, row):
            reason = common_reason(said)
            groups.setdefault(reason, Undone(reason)).add(row.name, stage, said)
    return sorted(groups.values(), key=lambda g: -sum(map(len, g.stages.values())))


def _unrun(story: Story, row: Row) -> Iterator[tuple[str, str]]:
    never = "the run was stopped before it came to this" if story.stopped else "the run has not come to this"
    for stage in STAGES:
        verdict = row.verdicts.get(stage)
        if verdict is None:
            yield stage, never
        elif verdict.outcome.startswith("not_run"):
            yield stage, reasons(verdict)[0]


def common_reason(said: str) -> str:
    """A reason without its particulars."""
    for pattern, common in _ALIKE:
        if found := pattern.fullmatch(said):
            return found.expand(common)
    return said


# --- failures ---


@dataclass(frozen=True)
class Failure:
    """A stage that ran and did not pass: one sentence a reason."""

    name: str
    stage: str
    outcome: str
    says: tuple[str, ...]


def failures(rows: Iterable[Row]) -> list[Failure]:
    """Every stage that ran and did not pass, in the order of the candidates."""
    return [
        Failure(row.name, stage, v.outcome, tuple(reasons(v)))
        for row in rows
        for stage, v in row.verdicts.items()
        if not v.passed and not v.outcome.startswith("not_run")
    ]


# --- the plan ---


def resources(book: BlockPlan) -> list[str]:
    """The resources that any block has a floor of."""
    return list(dict.fromkeys(f.resource for block in book.blocks for f in block.floors))


def floors(block: PlannedBlock) -> dict[str, float]:
    """The microseconds that each resource needs at least."""
    return {f.resource: f.us for f in block.floors}


def traffic(block: PlannedBlock, owner: str) -> int:
    """Bytes that a block reads and writes of the call's own tensors, or of the workspace."""
    return sum(t.size.amount for t in (*block.inputs, *block.outputs) if t.owner == owner)


# --- rounds ---


def kind_of(became: str) -> str:
    """What became of a candidate, without its particulars."""
    return "not run" if became.startswith("not_run") else became.partition(",")[0]


def counted(words: Iterable[str]) -> str:
    """How often each word comes, e.g. "2 held, 1 refuted"."""
    return ", ".join(f"{n} {word}" for word, n in Counter(words).items())


def decision(round_: Mapping[str, Any]) -> str:
    """What followed from a round, in words."""
    said = str(round_["decision"])
    return "go on" if said == GO_ON else f"stop: {STOP_RULES.get(said, said)}"


# --- machine code ---


def opcodes(rows: Iterable[Row]) -> list[str]:
    """The opcodes that any candidate has, spills always: their absence is the news."""
    groups = [stage["groups"] for row in rows for stage in row.machine_code.values()]
    return [name for name in OPCODES if name in SPILLING or any(g.get(name) for g in groups)]
