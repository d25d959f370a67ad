"""One CTA of each block under a stated tiling: its registers and shared memory, and how the grid fills a part."""

from __future__ import annotations

from kda2.ops.kda.spec import ITEM_BYTES
from kda2.workbench.blockplan import Grid, Tile
from kda2.workbench.inspector.occupancy import occupancy
from kda2.workbench.parts import Part
from kda2.workbench.planner.amounts import Amount, product
from kda2.workbench.planner.problem import Problem

_WARPS = (4, 8, 16)
_MOST_REGISTERS = 255
# Addresses, offsets, masks and loop counters of a thread.
_OVERHEAD = 40
_SLICE = 128
_STATE_ROWS = 64
_STREAM = 32


def padded(n: int) -> int:
    """The tile that holds n channels: a power of two, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def state_rows(p: Problem) -> int:
    """Rows of V that one CTA of the recurrence owns."""
    return min(_STATE_ROWS, padded(p.V))


def tile_of(stage: str, p: Problem, part: Part) -> Tile:
    """The tile of a stage: what a CTA holds, with the fewest warps whose threads have the registers for it."""
    return {"factors": _factors, "solve": _solve, "state": _state, "output": _output}[stage](p, part)


def _items(p: Problem) -> tuple[int, int]:
    """Bytes of an element of the workspace and of the inputs."""
    return (4 if p.dtype == "fp32" else 2), ITEM_BYTES[p.dtype]


def _factors(p: Problem, part: Part) -> Tile:
    width, (work, item) = min(padded(p.K), _SLICE), _items(p)
    holds = f"[{p.C} x {width}] tiles: q, k, G and one factor in fp32, and A [{p.C} x {p.C}]"
    registers = [("q, k, G, factor", 4 * p.C * width), ("A", p.C * p.C)]
    shared = [("score operands", 2 * p.C * width * work), ("q, k, g in flight", 3 * p.C * width * item)]
    return _tile(holds, registers, shared)


def _solve(p: Problem, part: Part) -> Tile:
    K, V, (work, item) = min(padded(p.K), _SLICE), min(padded(p.V), _SLICE), _items(p)
    holds = f"inverse [{p.C} x {p.C}] fp32, one accumulator [{p.C} x {max(K, V)}], Tm as operand"
    registers = [("inverse", p.C * p.C), ("accumulator", p.C * max(K, V)), ("Tm", p.C * p.C * work // 4)]
    shared = [("A", p.C * p.C * 4), ("Kd", p.C * K * work), ("v", p.C * V * item)]
    return _tile(holds, registers, shared)


def _state(p: Problem, part: Part) -> Tile:
    rows, K, (work, _) = state_rows(p), padded(p.K), _items(p)
    holds = f"S^T [{rows} x {K}] fp32 for the whole sequence, its copy as operand, Vn^T [{rows} x {p.C}]"
    registers = [("S^T", rows * K), ("operand", rows * K * work // 4), ("Vn^T", rows * p.C)]
    chunk = [("(W and Kr)", 2 * p.C * K * work), ("U", p.C * rows * work), ("decay", K * 4)]
    twice = [(f"2 x {name}", 2 * size) for name, size in chunk]
    fits = sum(size for _, size in twice) <= part.shared_per_cta
    return _tile(holds, registers, twice if fits else chunk)


def _output(p: Problem, part: Part) -> Tile:
    K, V, (work, item) = min(padded(p.K), _SLICE), min(padded(p.V), _SLICE), _items(p)
    holds = f"o [{p.C} x {V}] and scores [{p.C} x {p.C}] fp32; q, k, g {_STREAM} channels at a time"
    registers = [("o", p.C * V), ("scores", p.C * p.C), ("q, k, G", 3 * p.C * _STREAM)]
    shared = [
        ("Qd", p.C * K * work), ("S", K * V * work), ("Vn", p.C * V * work), ("q, k, g", 3 * p.C * _STREAM * item)
    ]  # fmt: skip
    return _tile(holds, registers, shared)


def _tile(holds: str, registers: list[tuple[str, int]], shared: list[tuple[str, int]]) -> Tile:
    words = sum(size for _, size in registers)
    warps = next((w for w in _WARPS if _per_thread(words, w) <= _MOST_REGISTERS), _WARPS[-1])
    threads = 32 * warps
    held = Amount(
        _per_thread(words, warps),
        f"({' + '.join(name for name, _ in registers)}) / {threads} threads + {_OVERHEAD} for addresses",
        f"({' + '.join(str(size) for _, size in registers)}) / {threads} + {_OVERHEAD}",
    )
    staged = Amount(
        sum(size for _, size in shared),
        " + ".join(name for name, _ in shared),
        " + ".join(str(size) for _, size in shared),
    )
    return Tile(holds=holds, warps=warps, registers=held.count(), shared=staged.count("B"))


def _per_thread(words: int, warps: int) -> int:
    return -(-words // (32 * warps)) + _OVERHEAD


def grid_of(stage: str, p: Problem, part: Part) -> Grid:
    """The grid of a stage over the part's multiprocessors, at one CTA each and at what fits."""
    ctas, tile = _ctas(stage, p), tile_of(stage, p, part)
    fits = occupancy(part.arch, tile.registers.amount, tile.warps, tile.shared.amount)
    resident, limit = fits.ctas, fits.limit
    if tile.shared.amount > part.shared_per_cta:
        resident, limit = 0, "shared"
    if tile.registers.amount > _MOST_REGISTERS:
        resident, limit = 0, "registers"
    waves, fill = _waves(ctas.value, part.sms)
    at_residency = _waves(ctas.value, part.sms * resident) if resident else (None, None)
    return Grid(
        ctas=ctas.count(),
        sms=part.sms,
        waves=waves,
        fill=fill,
        resident=resident,
        limit=limit,
        resident_waves=at_residency[0],
        resident_fill=at_residency[1],
    )


def _ctas(stage: str, p: Problem) -> Amount:
    if stage == "state":
        split = -(-p.V // state_rows(p))
        return product(p.sizes, "N HV", split, note=f"V in {state_rows(p)}-row parts")
    if stage == "output":
        split = -(-p.V // min(padded(p.V), _SLICE))
        return product(p.sizes, "NT HV", split, note=f"V in parts of {min(padded(p.V), _SLICE)}")
    return product(p.sizes, "NT HV")


def _waves(ctas: int, places: int) -> tuple[int, float]:
    """Waves of `ctas` over `places`, and the share of all their places that have one."""
    waves = -(-ctas // places)
    return waves, ctas / (waves * places) if waves else 0.0
