"""The Planner: counts a problem on a part and writes the specification book. Deterministic; nothing is measured."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from kda2.errors import InvalidValue
from kda2.ops.kda.spec import KDA, bytes_moved, flops
from kda2.testing.stages import CHUNKS, STAGES
from kda2.workbench.blockplan import BlockPlan, ChunkChoice, Floor, PlannedBlock, PlannedTensor, PlanTotals
from kda2.workbench.parts import Part, part_for
from kda2.workbench.planner.amounts import Amount, human, per_second, product
from kda2.workbench.planner.amounts import floor as floor_at
from kda2.workbench.planner.blocks import BLOCKS, Block, Tensors, tensors_of, unit_tests_of
from kda2.workbench.planner.costs import RULES, binding, cost_of, floors_of
from kda2.workbench.planner.problem import Problem
from kda2.workbench.planner.tiles import grid_of, tile_of


def plan(
    op: str, target: str = "sm_90", problem: Problem | None = None, sms: int | None = None, gpu: str | None = None
) -> BlockPlan:
    """The specification book of `problem` (the default one unless given) on the part that `part_for` finds.

    Raises `InvalidValue` for an op other than kda, an unknown target or part; `UnsupportedTarget` for an architecture
    without a known part.
    """
    if op != "kda":
        raise InvalidValue("op", "'kda'", repr(op))
    p, part = problem or Problem(), part_for(target, sms, gpu)
    tensors = tensors_of(p)
    blocks = tuple(_planned(block, p, part, tensors) for block in BLOCKS)
    return BlockPlan(
        op=op,
        op_hash=KDA.content_hash,
        target=target,
        part=_facts(part),
        problem=p.facts(),
        sizes=p.sizes,
        rules=RULES,
        blocks=blocks,
        totals=_totals(p, part, tensors, blocks),
        chunks=tuple(_choice(replace(p, C=C), part) for C in CHUNKS),
    )


def _facts(part: Part) -> dict[str, Any]:
    """A part as plain data: the datasheet, then the rates that floors are counted with."""
    rates = {"memory": "B", "tensor": "flop", "fp32": "flop", "special": "op", "issue": "instruction"}
    counted = {name: per_second(getattr(part, f"{name}_rate"), unit) for name, unit in rates.items()}
    limits = {"shared_per_sm": part.shared_per_sm, "shared_per_cta": part.shared_per_cta}
    return {**asdict(part), **limits, "rates": counted}


def _planned(block: Block, p: Problem, part: Part, tensors: Tensors) -> PlannedBlock:
    cost = cost_of(block, p, tensors)
    floors = floors_of(block, p, part, cost)
    through, on_chip = binding(floors, on_chip=False), binding(floors, on_chip=True)
    return PlannedBlock.model_validate(
        {
            "letter": block.letter, "stage": block.stage, "title": block.title,
            "computes": _formulas(block.stage, p),
            "inputs": _present(block.reads, tensors), "outputs": _present(block.writes, tensors),
            "invariants": block.invariants, "boundary_conditions": block.boundary_conditions,
            "unit_tests": unit_tests_of(block), "counts": cost.counts(), "floors": floors,
            "floor_us": through.us, "binds": through.resource,
            "on_chip_us": on_chip.us, "binds_on_chip": on_chip.resource,
            "tile": tile_of(block.stage, p, part), "grid": grid_of(block.stage, p, part),
        }
    )  # fmt: skip


_GATES = {
    "log": "g as given, at most 0",
    "softplus": "g = -exp(A_log) softplus(g + dt_bias)",
    "bounded": "g = lower_bound sigmoid(exp(A_log) (g + dt_bias))",
}


def _formulas(stage: str, p: Problem) -> tuple[str, ...]:
    """The stage's formulas, after those of the options that the block applies to the call's own inputs."""
    norms = ("q = scale q / sqrt(sum q^2 + 1e-6), k likewise",) if p.qk_l2norm else ("q = scale q",)
    options = {
        "factors": (*norms, "beta = sigmoid(beta)", _GATES[p.gate]),
        "solve": ("beta = sigmoid(beta)",),
        "output": (*norms, _GATES[p.gate]),
    }
    return (*options.get(stage, ()), *STAGES[stage].computes)


def _present(names: tuple[str, ...], tensors: Tensors) -> tuple[PlannedTensor, ...]:
    return tuple(tensors[name][0] for name in names if name in tensors)


def _totals(p: Problem, part: Part, tensors: Tensors, blocks: tuple[PlannedBlock, ...]) -> PlanTotals:
    sizes, floor = p.sizes, call_floor(p, part)
    own = [(t.name, t.size.amount) for t, _ in tensors.values() if t.owner == "call"]
    work = [(t.name, t.size.amount) for t, _ in tensors.values() if t.owner == "workspace"]
    if p.gate == "log":  # the op's contract counts what a gate learns whatever the gate is
        own.append(("A_log, dt_bias (counted for every gate)", 4 * p.value_heads * (p.K + 1)))
    five = [(name, size) for name, size in own if name in ("q", "k", "v", "g", "o")]
    staged, on_chip = sum(b.floor_us for b in blocks), sum(b.on_chip_us for b in blocks)
    steps = max(p.chunks, default=0)
    chain = Amount(steps, "ceil(longest sequence / C)", f"ceil({max(p.lengths, default=0)} / {p.C})")
    return PlanTotals(
        tokens=_sum(five).count("B"),
        token_floor=floor_at("tokens", sum(size for _, size in five), "B", part.memory_rate),
        moved=_sum(own).count("B"),
        flops=product(sizes, "tokens HV K V", 7).count("flop"),
        floor=floor,
        workspace=_sum(work).count("B"),
        staged_us=staged,
        on_chip_us=on_chip,
        saved_us=staged - on_chip,
        serial_steps=chain.count(),
        gap=_gap(floor, blocks),
    )


def _sum(named: list[tuple[str, int]]) -> Amount:
    return Amount(
        sum(size for _, size in named),
        " + ".join(name for name, _ in named),
        " + ".join(human(size, "B") for _, size in named),
    )


def call_floor(p: Problem, part: Part) -> Floor:
    """The least microseconds of any implementation: the op's bytes and flops over the part's rates."""
    memory, tensor = part.memory_rate, part.tensor_rate
    moved, operations = bytes_moved(p.case()), flops(p.case())
    by_memory, by_tensor = moved / memory.per_second * 1e6, operations / tensor.per_second * 1e6
    counted = (
        f"max({human(moved, 'B')} / {per_second(memory, 'B')} = {by_memory:.2f} us, "
        f"{human(operations, 'flop')} / {per_second(tensor, 'flop')} = {by_tensor:.2f} us)"
    )
    resource = "memory" if by_memory >= by_tensor else "tensor"
    return Floor(resource=resource, us=max(by_memory, by_tensor), counted=counted)


def _choice(p: Problem, part: Part) -> ChunkChoice:
    """What another length of chunk would cost."""
    tensors = tensors_of(p)
    costs = [cost_of(block, p, tensors) for block in BLOCKS]
    floors = [floors_of(block, p, part, cost) for block, cost in zip(BLOCKS, costs, strict=True)]
    return ChunkChoice(
        C=p.C,
        workspace_bytes=sum(t.size.amount for t, _ in tensors.values() if t.owner == "workspace"),
        tensor_flops=sum(cost.tensor.value for cost in costs),
        serial_steps=max(p.chunks, default=0),
        staged_us=sum(binding(f, on_chip=False).us for f in floors),
        on_chip_us=sum(binding(f, on_chip=True).us for f in floors),
    )


def _gap(floor: Floor, blocks: tuple[PlannedBlock, ...]) -> str:
    """What lies between the staged floors and the whole call's, in words."""
    staged, on_chip = sum(b.floor_us for b in blocks), sum(b.on_chip_us for b in blocks)
    if not staged:
        return "none: there is no token to work on"
    saved, rest = staged - on_chip, on_chip - floor.us
    if saved >= rest:
        return _workspace_gap(saved, staged, floor, blocks)
    worst = max(blocks, key=lambda b: b.on_chip_us)
    return (
        f"what the blocks do on chip: {on_chip:.1f} us against {floor.us:.1f} us of the whole call, {rest:.1f} more. "
        f"Block {worst.letter} ({worst.stage}) has the most, {worst.on_chip_us:.1f} us, bound by "
        f"{worst.binds_on_chip}; blocks that overlap hide all but what is bound by the same resource"
    )


def _workspace_gap(saved: float, staged: float, floor: Floor, blocks: tuple[PlannedBlock, ...]) -> str:
    traffic: dict[str, int] = {}
    for block in blocks:
        for t in (*block.inputs, *block.outputs):
            if t.owner == "workspace":
                traffic[t.name] = traffic.get(t.name, 0) + t.size.amount
    name = max(traffic, key=lambda n: traffic[n])
    return (
        f"the workspace through memory: {saved:.1f} of the {staged:.1f} us that the staged blocks need, against "
        f"{floor.us:.1f} us of the whole call. {name} alone moves {human(traffic[name], 'B')}"
    )
