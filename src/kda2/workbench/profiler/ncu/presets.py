"""Named sets of gates on counters, held against the kernels of a report. A gate whose figure is n/a says so."""

from __future__ import annotations

import operator
from typing import Literal

from pydantic import BaseModel, ConfigDict

from kda2.errors import InvalidValue
from kda2.workbench.profiler.ncu.figures import FIGURES
from kda2.workbench.profiler.ncu.model import Report

Comparison = Literal["<=", "<", ">="]
_HOLDS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Gate(_Frozen):
    """`figure` (a name of `FIGURES`) must compare so with `threshold`; `why` it should."""

    figure: str
    comparison: Comparison
    threshold: float
    why: str


class Preset(_Frozen):
    """A named set of gates. `max_error` (absolute, against fp64) and `p95_gain` (per cent below the baseline's p95)
    are no counters: whoever has the numerics and the latency holds them to these."""

    name: str
    gates: tuple[Gate, ...]
    max_error: float | None = None
    p95_gain: float | None = None


class GateResult(_Frozen):
    """One gate of one launch. `value` is absent where the outcome is n/a."""

    kernel: str
    launch: int
    figure: str
    metric: str
    comparison: Comparison
    threshold: float
    value: float | None = None
    outcome: Literal["ok", "not ok", "n/a"]


# Only waste: what the same algorithm does not need, whatever bounds it. A fixed throughput or occupancy would be wrong
# for a kernel that waits on latency by its nature, as a recurrence does.
_DEFAULT = Preset(
    name="default",
    gates=(
        Gate(figure="spills", comparison="<=", threshold=0, why="a spilled register is memory traffic for nothing"),
        Gate(figure="shared_share", comparison="<=", threshold=95, why="the ladder's own limit: room for the driver"),
        Gate(figure="excess_sectors", comparison="<=", threshold=10, why="needless sectors cost bandwidth at any load"),
        Gate(figure="conflicts", comparison="<=", threshold=10, why="a conflict lengthens every access it touches"),
    ),
)
# A published set for TIR rules, kept as it was given. It presumes a kernel bound by its tensor pipe.
_SOURCE_NOTES = Preset(
    name="source-notes",
    gates=(
        Gate(figure="l1_hits", comparison=">=", threshold=85, why="as published; read as the L1 hit rate"),
        Gate(figure="occupancy", comparison=">=", threshold=92, why="as published"),
        Gate(figure="tensor", comparison=">=", threshold=78, why="as published"),
        Gate(figure="shared_share", comparison="<", threshold=95, why="as published"),
    ),
    max_error=1e-3,
    p95_gain=30,
)
PRESETS = {preset.name: preset for preset in (_DEFAULT, _SOURCE_NOTES)}


def check(preset: str | Preset, report: Report) -> list[GateResult]:
    """Every gate of the preset, one of `PRESETS` by name or one's own, on every launch of the report. Raises
    `InvalidValue` for an unknown name."""
    chosen = PRESETS.get(preset) if isinstance(preset, str) else preset
    if chosen is None:
        raise InvalidValue("preset", f"one of {', '.join(PRESETS)}", repr(preset))
    return [
        _result(gate, kernel.short_name, kernel.launch, FIGURES[gate.figure].value(kernel.metrics))
        for kernel in report.kernels
        for gate in chosen.gates
    ]


def _result(gate: Gate, kernel: str, launch: int, value: float | None) -> GateResult:
    if value is None:
        outcome: Literal["ok", "not ok", "n/a"] = "n/a"
    else:
        outcome = "ok" if _HOLDS[gate.comparison](value, gate.threshold) else "not ok"
    return GateResult(
        kernel=kernel, launch=launch, figure=gate.figure, metric=FIGURES[gate.figure].formula,
        comparison=gate.comparison, threshold=gate.threshold, value=value, outcome=outcome,
    )  # fmt: skip
