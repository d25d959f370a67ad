"""One interleaved run over a case, with what the device was like meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kda2.workbench.profiler import environment
from kda2.workbench.profiler.timing import Call, Timing, burst, interleave
from kda2.workbench.profiler.verdict import Measured

# Calls back to back, but no more than take so long; of a few bursts the shortest counts, which nothing has interrupted.
_BURST, _BURST_US, _BURSTS = 20, 2e5, 3
# The name under which a call is timed beside itself.
_AGAIN = "{} again"


@dataclass(frozen=True)
class TimedRun:
    """By implementation what was measured, and what the same calls took under another name; the GPU's `state` (see
    `environment.watched`), and the rate of the neighbour if there was one."""

    measured: Mapping[str, Measured] = field(default_factory=dict)
    again: Mapping[str, Timing] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    neighbour_gbps: float | None = None


def timed(
    calls: Mapping[str, Sequence[Call]], samples: int, where: torch.device, impossible_us: float | None = None,
    itself: bool = False, neighbour: bool = False,
) -> TimedRun:  # fmt: skip
    """Time implementations turn by turn. `impossible_us` is the least time that the datasheet allows; with `itself`
    every call is timed twice in each turn, with `neighbour` all are timed beside a copy."""
    if not calls:
        return TimedRun()
    twice = {_AGAIN.format(name): own for name, own in calls.items() if itself}
    beside = _neighbour(where) if neighbour else None
    with torch.no_grad():
        with environment.watched(where) as state:
            timings = interleave({**calls, **twice}, samples, where, neighbour=beside)
        measured = {
            name: Measured(timings[name], impossible_us, _burst_us(own[0], timings[name], where))
            for name, own in calls.items()
        }
    again = {name: timings[_AGAIN.format(name)] for name in calls if itself}
    return TimedRun(measured, again, state, beside and beside.gbps)


def _neighbour(where: torch.device) -> Any:
    from kda2.workbench.profiler.neighbour import Neighbour

    return Neighbour(where)


def _burst_us(call: Call, timing: Timing, where: torch.device) -> float | None:
    """None on the CPU, where the wall clock is the only one."""
    if where.type != "cuda":
        return None
    count = max(1, min(_BURST, int(_BURST_US / timing.median_us)))
    return min(burst(call, count, where) for _ in range(_BURSTS))
