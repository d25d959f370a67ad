"""A ring of slots in shared memory that warp roles hand to each other.

Each hand-over is a signal: one mbarrier a slot. A producer fills a slot and commits it; a consumer waits, reads, and
commits to the next role or releases it for another turn. A role that sees every signal of every slot keeps an int of
parities, one bit a slot: a slot may be handed over any number of times on its way round. Roles that take turns count
how often the ring went round.
"""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def signals(SLOTS: gl.constexpr):
    """One signal for each slot, none given yet."""
    bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def wait(bars, slot, parities):
    """Wait for the slot's next signal; returns the parities after it."""
    mbarrier.wait(bars.index(slot), (parities >> slot) & 1)
    return parities ^ (1 << slot)


@gluon.jit
def wait_turn(bars, slot, turn):
    """Wait for the slot's signal on the `turn`-th way round the ring, counted from 0, where each gives one."""
    mbarrier.wait(bars.index(slot), turn & 1)


@gluon.jit
def commit(bars, slot):
    """Signal that the slot is filled, once all warps of the role have come here: Gluon puts a barrier before it.
    Operands that tensor cores or the copy engine read take a proxy fence before."""
    mbarrier.arrive(bars.index(slot), count=1)


@gluon.jit
def release(bars, slot):
    """Signal that the slot may be filled again; like `commit`."""
    mbarrier.arrive(bars.index(slot), count=1)


@gluon.jit
def next_slot(slot, by: gl.constexpr, SLOTS: gl.constexpr):
    return gl.where(slot + by >= SLOTS, slot + by - SLOTS, slot + by)
