"""The plan of a captured call, and the floors that it gives the stages of a kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kda2.workbench.blockplan import BlockPlan, PlannedBlock
from kda2.workbench.capture import Capture
from kda2.workbench.parts import PARTS, part_for
from kda2.workbench.planner import Problem, plan

# The stages of the library's staged kernels, as the plan's blocks have them.
KERNEL_STAGES: Mapping[str, tuple[str, ...]] = {
    "prepare": ("factors", "solve"),
    "state": ("state",),
    "output": ("output",),
}


def plan_of(capture: Capture, arch: int, chunk: int) -> BlockPlan | None:
    """The specification book of a captured call in chunks of `chunk` tokens; None for a call without a token, and for
    an architecture without a part to plan for."""
    B, T = capture.kwargs["q"].shape[:2]
    if not B * T or arch not in PARTS:
        return None
    case, packed = capture.case(), capture.kwargs.get("cu_seqlens") is not None
    shape: dict[str, Any] = {"seqlens": tuple(case["seqlens"])} if packed else {"T": T, "B": B}
    problem = Problem(
        **shape, H=case["qk_heads"], HV=case["heads"], K=case["k"], V=case["v"], C=chunk, dtype=case["dtype"],
        gate=capture.gate.kind, qk_l2norm=capture.options()["qk_l2norm"], state=case["state"],
    )  # fmt: skip
    return plan("kda", f"sm_{arch}", problem)


def kernel_floors(book: BlockPlan, stages: Mapping[str, Sequence[str]] = KERNEL_STAGES) -> dict[str, float]:
    """Microseconds that each kernel stage takes at least: its blocks' work by resource, and every tensor that comes
    into it or leaves it once. What its blocks hand to each other stays in the stage."""
    by_name = {block.stage: block for block in book.blocks}
    return {stage: _floor(book, [by_name[b] for b in blocks]) for stage, blocks in stages.items()}


def _floor(book: BlockPlan, blocks: Sequence[PlannedBlock]) -> float:
    made = {t.name for block in blocks for t in block.outputs}
    elsewhere = {t.name for block in book.blocks if block not in blocks for t in block.inputs}
    crossing = {t.name: t.size.amount for b in blocks for t in b.inputs if t.name not in made}
    crossing |= {t.name: t.size.amount for b in blocks for t in b.outputs if t.owner == "call" or t.name in elsewhere}
    us: dict[str, float] = defaultdict(float)
    us["memory"] = sum(crossing.values()) / part_for(book.target).memory_rate.per_second * 1e6
    for floor in (f for block in blocks for f in block.floors if not f.resource.startswith("memory")):
        us[floor.resource] += floor.us
    return round(max(us.values()), 3)
