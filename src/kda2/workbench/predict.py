"""Modelled kernel times, for ranking candidates where there is no GPU to measure them on.

The rule, stated once and printed with every choice it makes: a stage takes the longer of issuing its instructions and
moving its bytes. Issue: (instructions in the code) x (warps) x (trips of its loop over chunks), for all CTAs of the
fullest multiprocessor, one instruction a clock on each of its four schedulers. Bytes: every tensor of the launch once,
at the part's memory rate. Stages follow each other. Latency, caches and branches are not in it: it ranks, it does not
tell times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kda2.workbench.parts import PARTS, SCHEDULERS, Part

RULE = (
    "the shipped configuration unless another's modelled time is 20 % lower; modelled time = sum over stages of "
    "max(instructions x warps x chunk trips of the fullest SM / (4 x clock), bytes of all tensors / memory rate), from "
    "the machine code and not from a measurement"
)
# What the model does not know (latency, caches) is worth more than small differences of what it knows.
RESOLUTION = 0.2


@dataclass(frozen=True)
class StageLoad:
    """What the model needs of one stage: CTAs of the grid, warps of a CTA, instructions in the code, trips of the loop
    over chunks (1 if it has none) and the bytes of its tensors."""

    ctas: int
    warps: int
    instructions: int
    trips: int
    bytes: int


def stage_us(load: StageLoad, part: Part) -> float:
    """Modelled microseconds of one stage."""
    per_sm = -(-load.ctas // part.sms)
    # fewer warps than schedulers leave schedulers idle
    issued = load.instructions * load.trips * max(1.0, per_sm * load.warps / SCHEDULERS)
    return max(issued / part.clock, load.bytes / part.memory) * 1e6


def modelled_us(loads: Sequence[StageLoad], arch: int) -> float | None:
    """Modelled microseconds of a call; None for an architecture without a part to model."""
    part = PARTS.get(arch)
    return None if part is None else sum(stage_us(load, part) for load in loads)


def stages_us(stages: Mapping[str, Mapping[str, Any]], arch: int) -> dict[str, float]:
    """Modelled microseconds of each stage of a candidate's L1 evidence; nothing for an architecture without a part."""
    part = PARTS.get(arch)
    loads = zip(stages, loads_of(stages), strict=True)
    return {} if part is None else {stage: round(stage_us(load, part), 3) for stage, load in loads}


def best(modelled: Mapping[str, float], shipped: str) -> str | None:
    """The candidate that `RULE` names, None where nothing could be modelled."""
    if not modelled:
        return None
    lowest = min(modelled, key=lambda name: modelled[name])
    if shipped in modelled and modelled[lowest] > (1 - RESOLUTION) * modelled[shipped]:
        return shipped
    return lowest


def loads_of(stages: Mapping[str, Mapping[str, Any]]) -> list[StageLoad]:
    """The loads that the L1 evidence of a candidate holds."""
    names = ("ctas", "num_warps", "instructions", "trips", "bytes")
    return [StageLoad(*(int(stage[name]) for name in names)) for stage in stages.values()]
