"""The template writer: single steps through a kernel's declared design space, each with the reason why it might help
and the metric that would show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kda2.workbench.candidates import Configs, changes, with_value
from kda2.workbench.records import Candidate, Expected, Verdict
from kda2.workbench.rounds import WORTH_PERCENT

Space = Mapping[str, Mapping[str, Sequence[int]]]


class Writer(Protocol):
    """Proposes candidates that change `stage` of the best one so far, those in `seen` (by name) left out."""

    name: str

    def propose(self, best: Candidate, stage: str, seen: frozenset[str], most: int) -> list[Candidate]: ...


@dataclass(frozen=True)
class _Step:
    """Why a step of one field might help, and what should then change."""

    reason: str
    metric: str
    change: Literal["lower", "higher"]


_LARGER_TILE = _Step("fewer trips over the channels, each with more products at once", "instructions", "lower")
_SMALLER_TILE = _Step("less of the tile in each thread's registers, so that more CTAs fit", "registers", "lower")
# field -> (a step down, a step up). Metrics are those of the stage's machine code at L1, or its time at L6.
_STEPS: dict[str, tuple[_Step, _Step]] = {
    "BT": (
        _Step("a smaller triangular solve per chunk, against more trips of the recurrence", "instructions", "lower"),
        _Step("fewer chunks, so fewer trips of the recurrence and fewer states stored", "ctas", "lower"),
    ),
    "BV": (
        _Step("more CTAs, each with fewer value columns: multiprocessors without work get some", "ctas", "higher"),
        _Step("fewer CTAs, so the operands that value columns share are read less often", "ctas", "lower"),
    ),
    "BK": (_SMALLER_TILE, _LARGER_TILE),
    "BS": (_SMALLER_TILE, _LARGER_TILE),
    "num_warps": (
        _Step("fewer exchanges and barriers between warps", "issued", "lower"),
        _Step("more warps in flight to hide latency, and a smaller share of the tile in each", "registers", "lower"),
    ),
    "num_stages": (
        _Step("a shallower pipeline takes less shared memory, so more CTAs fit", "shared", "lower"),
        _Step("loads run further ahead of their use", "us", "lower"),
    ),
}


@dataclass(frozen=True)
class TemplateWriter:
    """Neighbours of the best candidate in the space, one field of one stage at a time; `base` is what ships."""

    space: Space
    base: Configs
    name: str = "kda2 template"

    def propose(self, best: Candidate, stage: str, seen: frozenset[str], most: int) -> list[Candidate]:
        """At most `most` candidates, in the order in which the space names its fields, up before down."""
        found: dict[str, Candidate] = {}
        for field, value, step in self._steps(best.parameters, stage):
            configs = with_value(best.parameters, stage, field, value)
            name = name_of(self.base, configs, best.impl)
            if name not in seen and name not in found:
                found[name] = self._candidate(name, configs, best, stage, f"{field}={value}", step)
        return list(found.values())[:most]

    def _steps(self, configs: Configs, stage: str) -> Iterator[tuple[str, int, _Step]]:
        for field, values in self.space[stage].items():
            at = sorted(values).index(configs[stage][field])
            for i, step in ((at + 1, _STEPS[field][1]), (at - 1, _STEPS[field][0])):
                if 0 <= i < len(values):
                    yield field, sorted(values)[i], step

    def _candidate(
        self, name: str, configs: dict[str, Any], best: Candidate, stage: str, change: str, step: _Step
    ) -> Candidate:
        return Candidate(
            name=name, op=best.op, impl=best.impl, writer=self.name, source=best.source, parent=best.name,
            parameters=configs, hypothesis=f"{stage} {change}: {step.reason}",
            expected=Expected(metric=f"{stage}: {step.metric}", change=step.change),
        )  # fmt: skip


def name_of(base: Configs, configs: Configs, impl: str) -> str:
    """A configuration's name: the implementation's, and what differs from the shipped one."""
    return f"{impl} {changes(base, configs)}".strip()


def metric(verdicts: Mapping[str, Verdict], name: str) -> float | None:
    """The value of a metric such as "state: registers" in a candidate's evidence; None where it was not found."""
    stage, _, what = name.partition(": ")
    if what == "us":
        timed = verdicts["L6"].evidence.get("stages_us", {}) if "L6" in verdicts else {}
        return timed.get(stage)
    code = verdicts["L1"].evidence.get("stages", {}).get(stage) if "L1" in verdicts else None
    if code is None:
        return None
    return float(code["instructions"] * code["num_warps"] if what == "issued" else code[what])


def hypothesis_held(
    expected: Expected | None, own: Mapping[str, Verdict], parent: Mapping[str, Verdict], gain: float | None
) -> str:
    """What became of a candidate's hypothesis, against its parent: "held" if its metric moved as it said and the call
    became faster; "no faster" if only the metric moved; "refuted" if not even that; "not tested". `gain` is the share
    of the parent's time that the candidate saves, None where it has no time."""
    if expected is None:
        return "not tested"
    after, before = metric(own, expected.metric), metric(parent, expected.metric)
    if after is None or before is None:
        return "not tested"
    if not (after < before if expected.change == "lower" else after > before):
        return "refuted"
    if gain is None:
        return "not tested"
    return "held" if 100 * gain >= WORTH_PERCENT else "no faster"
