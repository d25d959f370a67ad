"""BlockPlan: the specification book that the Planner writes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kda2.workbench.records import Record


class _Planned(BaseModel):
    """A part of a BlockPlan."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Count(_Planned):
    """A whole number, its unit ("" for a bare count), and the product it comes from, in words and numbers."""

    amount: int
    unit: str = ""
    counted: str


class PlannedTensor(_Planned):
    """A tensor that a block reads or writes: one of the call's own, or workspace between blocks."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    size: Count
    owner: Literal["call", "workspace"]
    meaning: str


class Floor(_Planned):
    """The least microseconds that one resource allows, and how it is counted."""

    resource: str
    us: float
    counted: str


class Tile(_Planned):
    """What one CTA holds under a stated tiling: registers of a thread, bytes of shared memory."""

    holds: str
    warps: int
    registers: Count
    shared: Count


class Grid(_Planned):
    """CTAs over multiprocessors. `fill` is the share of all waves' places that have a CTA; `resident` the CTAs that fit
    on one multiprocessor at once (0: the tile does not fit), `limit` what bounds them."""

    ctas: Count
    sms: int
    waves: int
    fill: float
    resident: int
    limit: str
    resident_waves: int | None
    resident_fill: float | None


class PlannedBlock(_Planned):
    """One functional block. `floors` are by resource; `floor_us` is the largest with the workspace through memory,
    `on_chip_us` with the workspace kept on chip, and `binds` and `binds_on_chip` name the resources."""

    letter: Literal["A", "B", "C", "D"]
    stage: str
    title: str
    computes: tuple[str, ...]
    inputs: tuple[PlannedTensor, ...]
    outputs: tuple[PlannedTensor, ...]
    invariants: tuple[str, ...]
    boundary_conditions: tuple[str, ...]
    unit_tests: tuple[str, ...]
    counts: dict[str, Count]
    floors: tuple[Floor, ...]
    floor_us: float
    binds: str
    on_chip_us: float
    binds_on_chip: str
    tile: Tile
    grid: Grid


class ChunkChoice(_Planned):
    """What a chunk of C tokens would cost."""

    C: int
    workspace_bytes: int
    tensor_flops: int
    serial_steps: int
    staged_us: float
    on_chip_us: float


class PlanTotals(_Planned):
    """The whole call. `floor` is the least of any implementation, `staged_us` the sum of the blocks' floors."""

    tokens: Count
    token_floor: Floor
    moved: Count
    flops: Count
    floor: Floor
    workspace: Count
    staged_us: float
    on_chip_us: float
    saved_us: float
    serial_steps: Count
    gap: str


class BlockPlan(Record):
    """The specification book of one problem on one part: functional blocks in the order of the data flow.

    `op_hash` is the content hash of the op's contract; `sizes` are the axes' extents by their names.
    """

    op: str
    op_hash: str
    target: str
    part: dict[str, Any]
    problem: dict[str, Any]
    sizes: dict[str, int]
    rules: tuple[str, ...]
    blocks: tuple[PlannedBlock, ...]
    totals: PlanTotals
    chunks: tuple[ChunkChoice, ...]
