"""The rules: one row for each figure that should not lie above or below a threshold, and why it matters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kda2.workbench.profiler.ncu.metrics import PARTED, SAMPLES
from kda2.workbench.profiler.ncu.model import Instruction
from kda2.workbench.profiler.ncu.seen import ISSUES, Seen

# Below it a resource is not what a kernel waits for; Nsight Compute draws the same line.
BUSY = 60.0
# DRAM is busy enough for its traffic to matter.
_TRAFFIC = 30.0
# Fewer hits than misses: the cache does little.
_HALF = 50.0
# Less waste than this hardly shows in a time.
_WASTE = 10.0
# A warp's access of 16 bytes a thread touches 16 sectors; more means unused bytes.
_SECTORS = 16.0
# The hardware's count of bank conflicts includes waits for other traffic, so small shares mean nothing.
_COUNTED = 25.0
# A quarter of the threads idle.
_THREADS = 24.0
# Atomics cost more than the sectors that they are; beyond a few per cent they show.
_ATOMICS = 5.0
# With less than this the kernel is about something else than products.
_TENSOR = 5.0
# mma.sync reaches about 60 % of what wgmma does on 9.0: beyond half of that it is near its end.
_MMA = 30.0

Weight = Callable[[Seen], float]
Place = Callable[[Instruction], float]


@dataclass(frozen=True)
class Rule:
    """A figure `above` or `below` its threshold, `when` that matters. `place` counts what an instruction has of it."""

    figure: str
    comparison: Literal["above", "below"]
    threshold: float
    weight: Weight
    because: str | Callable[[Seen], str]
    suggestion: str
    when: Callable[[Seen], bool] = lambda seen: True
    place: Place | None = None

    def finds(self, seen: Seen) -> bool:
        """Whether it applies; never where its figure is n/a."""
        value = seen[self.figure]
        if value is None or not self.when(seen):
            return False
        return value > self.threshold if self.comparison == "above" else value < self.threshold

    def cause(self, seen: Seen) -> str:
        return self.because if isinstance(self.because, str) else self.because(seen)


def _difference(count: str) -> Place:
    """How much of a count an instruction has beyond the ideal."""
    return lambda at: at.metrics.get(count, 0.0) - at.metrics.get(f"{count}_ideal", 0.0)


def _local(at: Instruction) -> float:
    """How often an instruction goes to local memory."""
    is_local = any(word.startswith(("LDL", "STL")) for word in at.text.split()[:2])  # a predicate may stand first
    return at.metrics.get("inst_executed", 0.0) if is_local else 0.0


def _atomic(at: Instruction) -> float:
    is_atomic = any(word.startswith(("ATOM", "RED")) for word in at.text.split()[:2])
    return at.metrics.get("inst_executed", 0.0) if is_atomic else 0.0


def _count(name: str) -> Place:
    return lambda at: at.metrics.get(name, 0.0)


def _waits(seen: Seen) -> float:
    return seen.slack * (1 - seen.share("occupancy"))


_MEMORY = (
    Rule("dram", "above", BUSY, lambda s: s.share("dram"), "DRAM is busy for most of the time.",
         "Read and write each byte once; keep what is read again in L2 or on chip; use narrower types."),
    Rule("l2", "above", BUSY, lambda s: s.share("l2"), "L2, or the way to it, is busy for most of the time.",
         "Let blocks share what they read (clusters, multicast, larger tiles), and store whole sectors."),
    Rule("l1", "above", BUSY, lambda s: s.share("l1"), "L1 or shared memory is busy for most of the time.",
         "Keep operands in registers, use wider accesses, and remove bank conflicts."),
    Rule("l2_hits", "below", _HALF, lambda s: s.share("dram") * (1 - s.share("l2_hits")),
         "Data leaves L2 before it is used again, or is used once.",
         "Let blocks that share data run at the same time, and work on parts that fit into L2.",
         lambda s: s.known("dram") > _TRAFFIC),
    Rule("l1_hits", "below", _HALF, lambda s: s.share("l2") * (1 - s.share("l1_hits")),
         "Loads go past L1 to an L2 that is busy.", "Keep in shared memory or registers what a block reads again.",
         lambda s: s.known("l2") > BUSY),
    Rule("excess_sectors", "above", _WASTE,
         lambda s: s.share("excess_sectors") * max(s.share("l2"), s.share("l1")),
         "Threads of a warp touch sectors of which they use a part.",
         "Let neighbouring threads touch neighbouring addresses, 16 bytes each, or load through TMA.",
         place=_difference("memory_l2_theoretical_sectors_global")),
    Rule("sectors_per_load", "above", _SECTORS, lambda s: s.share("l1") / 2,
         "A warp's load touches more sectors than 16 bytes a thread need.",
         "Let neighbouring threads load neighbouring addresses.", lambda s: s["excess_sectors"] is None),
    Rule("sectors_per_store", "above", _SECTORS, lambda s: s.share("l1") / 2,
         "A warp's store touches more sectors than 16 bytes a thread need.",
         "Let neighbouring threads store to neighbouring addresses.", lambda s: s["excess_sectors"] is None),
    Rule("conflicts", "above", _WASTE, lambda s: s.share("conflicts") * s.share("l1"),
         "Threads of a warp meet in the same bank of shared memory.",
         "Swizzle or pad the layout, so that a warp's accesses fall into different banks.",
         place=_difference("memory_l1_wavefronts_shared")),
    Rule("counted_conflicts", "above", _COUNTED, lambda s: s.share("counted_conflicts") * s.share("l1"),
         "Accesses to shared memory wait for each other (conflicts, or other traffic).",
         "Swizzle or pad the layout; collect the source counters to tell which instruction it is.",
         lambda s: s["conflicts"] is None),
    Rule("spills", "above", 0, lambda s: 0.1 + 4 * s.known("local_share") / 100,
         "Registers do not suffice and go to local memory.",
         "Hold less at a time: smaller tiles, more warps, fewer stages; or allow more registers a thread.",
         place=_local),
    Rule("local", "above", 0, lambda s: 0.05 + 4 * s.known("local_share") / 100,
         "Local memory is used: spilled registers, or arrays with an index known at run time only.",
         "Make indices constants by unrolling, and see whether registers suffice.",
         lambda s: not s["spills"], _local),
    Rule("atomics", "above", _ATOMICS, lambda s: s.share("atomics"),
         "Blocks meet in atomics on global memory.",
         "Reduce inside the block first, or write partial results and add them in a second pass.", place=_atomic),
    Rule("shared_atomics", "above", _ATOMICS, lambda s: s.share("shared_atomics"),
         "Warps meet in atomics on shared memory.", "Reduce inside the warp first (shuffles).", place=_atomic),
)  # fmt: skip
_WARPS = (
    Rule("occupancy_limit", "below", _HALF, lambda s: s.slack * (1 - s.share("occupancy_limit")) / 2,
         lambda s: "Few warps fit, so that each must hide its own latency." + s.limiter,
         "Use less of what limits it; or, for a pipeline of few warps, more stages.", lambda s: s.idles),
    Rule("occupancy_reached", "below", 80, _waits,
         "Fewer warps are resident than resources allow: the grid is small, or its blocks end at different times.",
         "Give blocks equal work, longest first, and have enough of them.", lambda s: s.idles),
    Rule("waves", "below", 1, lambda s: max(1 - s.share("working"), 0.1),
         lambda s: "The grid is less than one wave of blocks" + (
             "." if s["working"] is None else f"; {s.known('working'):.0f} % of the multiprocessors have one."),
         "Split the work further, over values, heads or segments of the sequence."),
    Rule("full", "below", 80, lambda s: 1 - s.share("full"),
         "The last wave of blocks leaves much of the device idle.",
         "Choose tiles for which the grid is a multiple of a wave, or one persistent wave.",
         lambda s: s.known("waves") >= 1),
    Rule("issue", "below", ISSUES, lambda s: s.slack * (1 - s.share("issue")),
         lambda s: "Schedulers find no warp that could issue" + (
             "." if s["eligible"] is None else f" ({s.known('eligible'):.2f} on average).")
         + ("" if s["ipc"] is None else f" IPC is {s.known('ipc'):.2f} of 4."),
         "Have more independent instructions in each warp, or more warps.", place=_count(SAMPLES)),
    Rule("threads", "below", _THREADS, lambda s: (1 - s.known("threads") / 32) * s.share("issue"),
         "Threads of a warp take different ways, or have no work.",
         "Let the branch depend on the warp; mask the tail only; use all 32 threads."),
    Rule("uniform", "below", 90, lambda s: (1 - s.share("uniform")) * min(1.0, 4 * s.share("branches")),
         "Threads of a warp part at branches.", "Select instead of branching, or let the branch depend on the warp.",
         place=_count(PARTED)),
)  # fmt: skip
_PRODUCTS = (
    Rule("tensor", "above", 80, lambda s: s.share("tensor"), "The tensor pipe is near its peak.",
         "Use fewer or narrower products (fp8, structure of the operands): nothing else helps."),
    Rule("tensor", "below", _HALF, lambda s: s.slack * (1 - s.share("tensor")) / 2,
         "The products wait for operands or for work between them.",
         "Keep several products in flight, and do the other work in other warps.",
         lambda s: s.known("tensor") > _TENSOR and s.idles),
    Rule("tensor", "above", _MMA, lambda s: s.share("tensor") / 2,
         "The products are mma of single warps, which reach about 60 % of the peak on this architecture.",
         "Use wgmma, with operands in shared memory.",
         lambda s: s.kernel.cc == "9.0" and s["wgmma"] == 0 and s.known("mma") > 0),
)  # fmt: skip
RULES: tuple[Rule, ...] = (*_MEMORY, *_WARPS, *_PRODUCTS)
