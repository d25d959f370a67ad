"""The specification book as plain text, 120 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from kda2.workbench.blockplan import BlockPlan, PlannedBlock, PlannedTensor
from kda2.workbench.planner.amounts import human

WIDTH = 120
_AXES = {
    "N": "sequences", "tokens": "of all sequences", "NT": "chunks of all sequences", "C": "tokens of a chunk",
    "H": "query and key heads", "HV": "value heads", "K": "key channels", "V": "value channels",
}  # fmt: skip


def render_text(plan: BlockPlan) -> str:
    """The whole book: the problem, the part, the whole call, chunk lengths, then each block and the rules."""
    lines = [
        *_front(plan), *_whole(plan), *_overview(plan), *_chunks(plan), *_names(plan),
        *(line for block in plan.blocks for line in _block(block)), *_rules(plan),
    ]  # fmt: skip
    return "\n".join(line.rstrip() for line in lines) + "\n"


def title_of(plan: BlockPlan) -> str:
    return f"{plan.op} on {plan.part['name']}: specification book"


def problem_words(plan: BlockPlan) -> str:
    return ", ".join(f"{name}={value}" for name, value in plan.problem.items())


def part_words(plan: BlockPlan) -> str:
    p = plan.part
    note = f"; {p['note']}" if p["note"] else ""
    rates = ", ".join(f"{name} {rate}" for name, rate in p["rates"].items())
    return f"{p['name']} ({plan.target}), {p['sms']} SMs at {p['clock'] / 1e9:g} GHz; {rates}{note}"


def unit_test_words(block: PlannedBlock) -> str:
    """The block's unit tests in one sentence."""
    families = [name.partition("[")[2].rstrip("]") for name in block.unit_tests]
    return f"{block.unit_tests[0].partition('[')[0]}, one a probe family: {', '.join(families)}"


def _front(plan: BlockPlan) -> Iterator[str]:
    title = title_of(plan)
    yield from (title, "=" * len(title), "")
    yield from _fact("problem", problem_words(plan))
    yield from _fact("part", part_words(plan))
    yield from _fact("contract", f"{plan.op} {plan.op_hash[:16]}, plan {plan.content_hash[:16]}")
    yield from _fact("read as", "counted, not measured; nothing takes less time than its floor, and most takes more")


def _whole(plan: BlockPlan) -> Iterator[str]:
    t = plan.totals
    yield from _heading("The whole call")
    yield from _fact("floor", f"{t.floor.us:.1f} us, bound by {t.floor.resource} = {t.floor.counted}")
    yield from _fact("token tensors", f"{t.tokens.counted}; {t.token_floor.counted}")
    yield from _fact("moved", t.moved.counted)
    yield from _fact("flop", t.flops.counted)
    yield from _fact("workspace", t.workspace.counted)
    floors = " + ".join(f"{b.floor_us:.1f}" for b in plan.blocks)
    on_chip = " + ".join(f"{b.on_chip_us:.1f}" for b in plan.blocks)
    yield from _fact("staged", f"{floors} = {t.staged_us:.1f} us, with the workspace through memory")
    yield from _fact(
        "on chip", f"{on_chip} = {t.on_chip_us:.1f} us; keeping the workspace there saves {t.saved_us:.1f} us"
    )
    steps = f"{t.serial_steps.counted} chunks of the longest sequence, one after another: bound by latency"
    yield from _fact("chain", steps)
    yield from _fact("largest gap", t.gap)


def _overview(plan: BlockPlan) -> Iterator[str]:
    yield from _heading("The blocks, in the order of the data flow")
    rows = [
        (
            b.letter, b.stage, f"{b.floor_us:.1f}", b.binds, f"{b.on_chip_us:.1f}", b.binds_on_chip,
            str(b.grid.ctas.amount), str(b.grid.waves), f"{b.grid.fill:.0%}",
        )
        for b in plan.blocks
    ]  # fmt: skip
    head = ("", "stage", "floor, us", "bound by", "on chip, us", "bound by", "CTAs", "waves", "places used")
    yield from _table(head, rows, right={2, 4, 6, 7, 8})


def _names(plan: BlockPlan) -> Iterator[str]:
    yield from _heading("Names")
    sizes = plan.sizes
    yield from _fact("axes", ", ".join(f"{name} {what} = {sizes[name]}" for name, what in _AXES.items()))
    tensors = {t.name: t.meaning for b in plan.blocks for t in (*b.inputs, *b.outputs)}
    for name, meaning in tensors.items():
        yield from _fact(name, meaning)


def _chunks(plan: BlockPlan) -> Iterator[str]:
    yield from _heading("Other lengths of a chunk")
    rows = [
        (
            f"{c.C}{' *' if c.C == plan.sizes['C'] else ''}", human(c.workspace_bytes, "B"),
            human(c.tensor_flops, "flop"), str(c.serial_steps), f"{c.staged_us:.1f}", f"{c.on_chip_us:.1f}",
        )
        for c in plan.chunks
    ]  # fmt: skip
    head = ("C", "workspace", "tensor", "serial steps", "staged floor, us", "on chip, us")
    yield from _table(head, rows, right={1, 2, 3, 4, 5})
    yield "  * the chunk that this book plans for"


def _block(block: PlannedBlock) -> Iterator[str]:
    yield from _heading(f"Block {block.letter}, stage {block.stage}: {block.title}")
    yield from _list("Computes", block.computes)
    yield from _tensors("Reads", block.inputs)
    yield from _tensors("Writes", block.outputs)
    yield from _list("Invariants", block.invariants)
    yield from _list("Boundary conditions", block.boundary_conditions)
    yield from _list("Unit tests", [unit_test_words(block)])
    yield "Budget"
    for name, count in block.counts.items():
        yield from _fact(name, count.counted)
    yield from _fact("tile", f"{block.tile.holds}; {block.tile.warps} warps")
    yield from _fact("registers", f"{block.tile.registers.counted} a thread")
    yield from _fact("shared", f"{block.tile.shared.counted} a CTA")
    yield from _fact("grid", grid_words(block))
    yield "Floors"
    for f in block.floors:
        yield from _fact(f.resource, f.counted + _binds(block, f.resource))


def _binds(block: PlannedBlock, resource: str) -> str:
    names = {"binds": block.binds, "binds on chip": block.binds_on_chip}
    words = [words for words, name in names.items() if name == resource]
    return f"  <- {', '.join(words)}" if words else ""


def grid_words(block: PlannedBlock) -> str:
    """The block's grid in one sentence."""
    g = block.grid
    text = f"{g.ctas.counted} CTAs on {g.sms} SMs; one an SM: {_waves(g.waves)}, {g.fill:.1%} of the places used; "
    if not g.resident:
        return f"{text}this tile does not fit ({g.limit})"
    return f"{text}as many as fit an SM, {g.resident} (by {g.limit}): {_waves(g.resident_waves)}, {g.resident_fill:.1%}"


def _waves(waves: int | None) -> str:
    return f"{waves} wave{'' if waves == 1 else 's'}"


def _rules(plan: BlockPlan) -> Iterator[str]:
    yield from _heading("How it is counted")
    for rule in plan.rules:
        name, _, words = rule.partition(": ")
        yield from _fact(name, words)


def _tensors(title: str, tensors: Sequence[PlannedTensor]) -> Iterator[str]:
    yield title
    rows = [
        (
            t.name,
            f"[{', '.join(t.axes)}]",
            f"[{', '.join(map(str, t.shape))}]",
            t.dtype,
            t.owner,
            t.size.counted.partition(" = ")[2],
        )
        for t in tensors
    ]
    yield from _table(None, rows)


def _heading(title: str) -> Iterator[str]:
    yield from ("", title, "-" * len(title))


def _fact(name: str, words: str) -> Iterator[str]:
    indent = " " * 19
    wrapped = textwrap.wrap(
        words, WIDTH, initial_indent=f"  {name:<17}", subsequent_indent=indent, break_on_hyphens=False
    )
    yield from wrapped or [f"  {name}"]


def _list(title: str, items: Iterable[str]) -> Iterator[str]:
    yield title
    for item in items:
        yield from textwrap.wrap(item, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)


def _table(
    head: Sequence[str] | None, rows: Sequence[Sequence[str]], right: set[int] | frozenset[int] = frozenset()
) -> Iterator[str]:
    cells = [*([head] if head else []), *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))] if cells else []
    for row in cells:
        texts = (f"{x:>{w}}" if i in right else f"{x:<{w}}" for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        yield "  " + "  ".join(texts)
