"""What the planner counts of the library's own kernels: the least time of a stage's operations."""

from __future__ import annotations

from collections import defaultdict

from kda2.workbench.capture import Capture
from kda2.workbench.floors import KERNEL_STAGES, plan_of
from kda2.workbench.profiler.ablation.bound import Floor

# Resources that are operations, and not bytes or a chain of steps.
_OPERATIONS = ("tensor", "fp32", "special", "issue")


def arithmetic_floors(impl: str, capture: Capture, arch: int) -> dict[str, Floor]:
    """By kernel name; nothing for an implementation that the planner does not describe, or an unknown architecture."""
    chunk, kernels = _described(impl, capture)
    book = plan_of(capture, arch, chunk) if kernels else None
    if book is None:
        return {}
    blocks = {block.stage: block for block in book.blocks}
    found = {}
    for kernel, stages in kernels.items():
        us: dict[str, float] = defaultdict(float)
        for floor in (f for stage in stages for f in blocks[stage].floors if f.resource in _OPERATIONS):
            us[floor.resource] += floor.us
        binds = max(us, key=lambda name: us[name])
        found[kernel] = Floor(us[binds], f"its operations ({binds}), as the plan for {book.target} counts them,")
    return found


def _described(impl: str, capture: Capture) -> tuple[int, dict[str, tuple[str, ...]]]:
    """The chunk of an implementation, and the plan's blocks in each of its kernels."""
    if impl == "triton":
        from kda2.workbench.candidates import shipped_configs

        return shipped_configs(capture)["prepare"]["BT"], {f"kda_{s}": blocks for s, blocks in KERNEL_STAGES.items()}
    if impl == "hopper":
        from kda2.ops.kda.hopper.slots import C

        return int(C.value), {"kda_fused": tuple(b for blocks in KERNEL_STAGES.values() for b in blocks)}
    return 0, {}
