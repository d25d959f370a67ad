"""What a block costs: arithmetic counted from its formulas, and the floors that each resource sets.

Counts are per block over the whole call. `RULES` states what is counted and how; every figure carries its product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kda2.workbench.blockplan import Count, Floor
from kda2.workbench.parts import Part, Rate
from kda2.workbench.planner.amounts import ZERO, Amount, floor, human, per_second, product, total
from kda2.workbench.planner.blocks import Block, Tensors
from kda2.workbench.planner.problem import Problem
from kda2.workbench.planner.tiles import grid_of, state_rows

# fp32 operands go through the matrix units as three products of tf32 terms, each at half the rate of bf16.
FP32_PRODUCT = 6
LANES = 32
MMA_FLOPS = 16 * 8 * 16 * 2
BYTES_PER_INSTRUCTION = 16 * LANES
# With a bounded gate blocks of 32 tokens are anchored at their middle; longer chunks are halved down to them.
ANCHORED = 32

RULES = (
    "bytes: every tensor of a block once; q and k once a token whatever HV is, though each value head uses them",
    "tensor: 2 m n k flop a product; score squares are computed whole, then masked; fp32 operands as three tf32 terms, "
    "each at half the bf16 rate, hence x 6",
    "fp32: additions and multiplications of the gate, norms, sums of log decays, factors and the triangular inverse; a "
    "fused pair is two",
    "special: exponentials, logarithms, reciprocals and their roots, 16 a clock on each SM; a bounded gate needs two "
    "exponentials an element and chunk for its decays, another gate one for each halving, and in block A two more",
    "lanes: fp32 operations (a fused pair once), special functions, and conversions to and from 16 bits",
    "issue: warp instructions, 4 a clock on each SM = lanes over 32, bytes over 512 (16 a lane), tensor flop over 4096 "
    "(one mma 16x8x16); addresses, synchronisation and changes of layout are not in it",
    "chain: the fullest SM works off its chunks one after another, each at an SM's share of the tensor rate",
    "floor of a block: the largest of its resources' floors; of the staged call: their sum, as stages come one by one",
)


@dataclass(frozen=True)
class Work:
    """One kind of arithmetic, `times` for each element of `axes`: what it is, and the lanes' instructions it takes."""

    what: str
    axes: str
    times: int
    instructions: int


@dataclass(frozen=True)
class Arithmetic:
    """A block's arithmetic: fp32 operations, special functions, conversions, and matrix products (axes of 2 m n k)."""

    fp32: tuple[Work, ...]
    special: tuple[Work, ...]
    conversions: tuple[Work, ...]
    products: tuple[tuple[str, str], ...]


_ELEMENT, _ROW, _VALUE = "NT HV C K", "NT HV C", "NT HV C V"


def arithmetic_of(stage: str, p: Problem) -> Arithmetic:
    """What the stage's formulas ask for."""
    found = {"factors": _factors, "solve": _solve, "state": _state, "output": _output}[stage](p)
    if p.dtype != "fp32":
        return found
    return Arithmetic(found.fp32, found.special, (), found.products)


def _factors(p: Problem) -> Arithmetic:
    cuts, bounded = _cuts(p), p.gate == "bounded"
    sums, factors, operands = (2, 6 + cuts, 2) if bounded else (2 + cuts, 3 + cuts, cuts)
    fp32 = [
        *_gate(p), *_norms(p), _work("sums", _ELEMENT, sums), _work("factors", _ELEMENT, factors),
        _work("beta A", "NT HV C C", 1),
    ]  # fmt: skip
    special = [*_gate_special(p), _work("decays", _ELEMENT, 2 if bounded else 2 + cuts)]
    special += [*_norm_special(p), _work("beta's sigmoid", _ROW, 2)]
    converted = [_work("q, k, g in", _ELEMENT, 3), _work("score operands", _ELEMENT, operands)]
    converted.append(_work("Qd, Kd, Kr out", _ELEMENT, 3))
    return Arithmetic(tuple(fp32), tuple(special), tuple(converted), (("Kd Ki^T", "NT HV C C K"),))


def _solve(p: Problem) -> Arithmetic:
    inverse = (p.C**3 - p.C) // 3
    fp32 = (Work("inverse, (C^3 - C) / 3", "NT HV", inverse, inverse // 2), _work("Tm", "NT HV C C", 1))
    converted = (_work("Tm", "NT HV C C", 1), _work("W out", _ELEMENT, 1), _work("U out", _VALUE, 1))
    products = (("Tm Kd", "NT HV C C K"), ("Tm v", "NT HV C C V"))
    return Arithmetic(fp32, (_work("beta's sigmoid", _ROW, 2),), converted, products)


def _state(p: Problem) -> Arithmetic:
    fp32 = (_work("decay of S", "NT HV K V", 1), _work("U - W S", _VALUE, 1))
    converted = (_work("S as operand", "NT HV K V", 1), _work("U in, Vn out", _VALUE, 2))
    return Arithmetic(fp32, (), converted, (("W S", "NT HV C K V"), ("Kr^T Vn", "NT HV C K V")))


def _output(p: Problem) -> Arithmetic:
    cuts, bounded = _cuts(p), p.gate == "bounded"
    sums, factors, operands = (2, 2 + cuts, 2) if bounded else (cuts, cuts, cuts)
    own = Work("q.k of the token itself", _ELEMENT, 2, 1)
    fp32 = [*_gate(p), *_norms(p), _work("sums", _ELEMENT, sums), _work("factors", _ELEMENT, factors), own]
    special = [*_gate_special(p), _work("decays", _ELEMENT, 2 if bounded else cuts), *_norm_special(p)]
    converted = (
        _work("q, k, g in", _ELEMENT, 3), _work("score operands", _ELEMENT, operands),
        _work("S as operand", "NT HV K V", 1), _work("scores", "NT HV C C", 1), _work("o out", _VALUE, 1),
    )  # fmt: skip
    products = (("Qd S", "NT HV C K V"), ("Qd Ki^T", "NT HV C C K"), ("scores Vn", "NT HV C C V"))
    return Arithmetic(tuple(fp32), tuple(special), converted, products)


def _work(what: str, axes: str, times: int) -> Work:
    return Work(what, axes, times, times)


def _cuts(p: Problem) -> int:
    """Halvings of a chunk whose factors need products of their own."""
    halvings = p.C.bit_length() - 1
    return max(0, halvings - ANCHORED.bit_length() + 1) if p.gate == "bounded" else halvings


def _gate(p: Problem) -> tuple[Work, ...]:
    if p.gate == "log":
        return ()
    # bounded: bias and rate fuse, 1 + e, the bound; softplus: bias, maximum, 1 + e, sum, rate
    return (Work("gate", _ELEMENT, 4, 3) if p.gate == "bounded" else Work("gate", _ELEMENT, 5, 5),)


def _gate_special(p: Problem) -> tuple[Work, ...]:
    return () if p.gate == "log" else (_work("gate", _ELEMENT, 2),)


def _norms(p: Problem) -> tuple[Work, ...]:
    """Squares, their sums and the factors for q and k; without norms the scale of q."""
    return (Work("norms", _ELEMENT, 6, 4),) if p.qk_l2norm else (_work("scale", _ELEMENT, 1),)


def _norm_special(p: Problem) -> tuple[Work, ...]:
    return (_work("norms", _ROW, 2),) if p.qk_l2norm else ()


# --- counts and floors ---


@dataclass(frozen=True)
class Cost:
    """A block's amounts over the whole call."""

    call: Amount
    workspace: Amount
    tensor: Amount
    fp32: Amount
    special: Amount
    lanes: Amount
    issue: Amount

    def counts(self) -> dict[str, Count]:
        """As the plan holds them."""
        return {
            "call bytes": self.call.count("B"), "workspace bytes": self.workspace.count("B"),
            "tensor": self.tensor.count("flop"), "fp32": self.fp32.count("flop"), "special": self.special.count(),
            "lanes": self.lanes.count(), "issue": self.issue.count(),
        }  # fmt: skip


def cost_of(block: Block, p: Problem, tensors: Tensors) -> Cost:
    """Count a block."""
    sizes, work = p.sizes, arithmetic_of(block.stage, p)
    touched = [tensors[name] for name in (*block.reads, *block.writes) if name in tensors]
    moved = {
        owner: total(*(_named(t.name, amount) for t, amount in touched if t.owner == owner))
        for owner in ("call", "workspace")
    }
    tensor = total(*(product(sizes, axes, 2, note=what) for what, axes in work.products))
    lanes = _summed(tuple(_issued(w) for w in (*work.fp32, *work.special, *work.conversions)), sizes)
    parts = (
        ("lanes", lanes.value, LANES),
        ("bytes", moved["call"].value + moved["workspace"].value, BYTES_PER_INSTRUCTION),
        ("tensor flop", tensor.value * (FP32_PRODUCT if p.dtype == "fp32" else 1), MMA_FLOPS),
    )
    issue = total(*(Amount(-(-n // by), f"{what} / {by}", f"{human(n)} / {by}") for what, n, by in parts if n))
    fp32, special = _summed(work.fp32, sizes), _summed(work.special, sizes)
    return Cost(moved["call"], moved["workspace"], tensor, fp32, special, lanes, issue)


def _named(name: str, amount: Amount) -> Amount:
    return Amount(amount.value, name, human(amount.value, "B")) if amount.value else ZERO


def _issued(work: Work) -> Work:
    """The same work counted in lanes' instructions."""
    return replace(work, times=work.instructions)


def _summed(works: Sequence[Work], sizes: dict[str, int]) -> Amount:
    """The works' operations, those on the same axes in one product."""
    grouped: dict[str, list[Work]] = {}
    for work in works:
        grouped.setdefault(work.axes, []).append(work)
    return total(
        *(
            product(sizes, axes, sum(w.times for w in same), ", ".join(f"{w.what} {w.times}" for w in same))
            for axes, same in grouped.items()
        )
    )


def floors_of(block: Block, p: Problem, part: Part, cost: Cost) -> tuple[Floor, ...]:
    """The floor of each resource; "memory" with the workspace through memory, "memory on chip" without it."""
    weight, note = (FP32_PRODUCT, "fp32 operands") if p.dtype == "fp32" else (1, "")
    found = [
        floor("memory", cost.call.value + cost.workspace.value, "B", part.memory_rate),
        floor("memory on chip", cost.call.value, "B", part.memory_rate),
        floor("tensor", cost.tensor.value, "flop", part.tensor_rate, weight, note),
        floor("fp32", cost.fp32.value, "flop", part.fp32_rate),
        floor("special", cost.special.value, "", part.special_rate),
        floor("issue", cost.issue.value, "", part.issue_rate),
    ]
    if block.stage == "state":
        found.append(_chain(p, part))
    return tuple(found)


def _chain(p: Problem, part: Part) -> Floor:
    """The recurrence's chunks come one after another: the fullest multiprocessor cannot be faster than its products."""
    rows, steps = state_rows(p), max(p.chunks, default=0)
    waves = grid_of("state", p, part).waves if len(set(p.chunks)) == 1 else 1
    weight = FP32_PRODUCT if p.dtype == "fp32" else 1
    work = waves * steps * 2 * 2 * rows * p.C * p.K * weight
    rate = Rate(part.tensor_rate.per_second / part.sms, f"{part.tensor_rate.source}, one SM")
    us = work / rate.per_second * 1e6
    factors = f"{waves} x {steps} x 2 x 2 x {rows} x {p.C} x {p.K}{f' x {weight}' if weight != 1 else ''}"
    words = "CTAs of the fullest SM" if waves != 1 else "CTA"
    counted = f"{words} x chunks x 2 products x 2 x rows of V x C x K = {factors} = {human(work, 'flop')}"
    return Floor(resource="chain", us=us, counted=f"{counted}; / {per_second(rate, 'flop')} = {us:.2f} us")


def binding(floors: Sequence[Floor], on_chip: bool) -> Floor:
    """The floor that binds, with the workspace on chip or through memory."""
    skip = "memory" if on_chip else "memory on chip"
    return max((f for f in floors if f.resource != skip), key=lambda f: f.us)
