"""Two roles hand slots of a ring to each other, and nothing else: what compute-sanitizer says of the helpers.

    compute-sanitizer --tool racecheck python handover.py

All threads of a role write, one barrier of the role follows, then one thread arrives on the mbarrier; all threads of
the other role wait on it and read. Barrier and mbarrier together order every write before every read.
"""

from __future__ import annotations

import torch
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from kda2.backends.gluon import commit, next_slot, release, signals, wait

WRITTEN = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
READ = gl.constexpr(gl.BlockedLayout([1, 1], [16, 2], [4, 1], [1, 0]))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
MATRIX = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def read(slots, filled, free, p_out, n, SLOTS: gl.constexpr):
    """Sum what is handed over, each element by another thread than the one that wrote it."""
    matrices = slots._reinterpret(gl.float32, [SLOTS, 2, 64], MATRIX)
    b_sum = gl.zeros([64, 2], gl.float32, READ)
    slot = 0
    parities = 0
    for _ in range(n):
        parities = wait(filled, slot, parities)
        b_sum += matrices.index(slot).permute((1, 0)).load(READ)
        release(free, slot)
        slot = next_slot(slot, 1, SLOTS)
    o_i = gl.arange(0, 64, gl.SliceLayout(1, READ))[:, None]
    o_j = gl.arange(0, 2, gl.SliceLayout(0, READ))[None, :]
    gl.store(p_out + 64 * o_j + o_i, b_sum)


@gluon.jit
def write(slots, filled, free, n, SLOTS: gl.constexpr):
    slot = 0
    parities = 0
    for i in range(n):
        if i >= SLOTS:
            parities = wait(free, slot, parities)
        slots.index(slot).store((gl.arange(0, 128, WRITTEN) + i).to(gl.float32))
        commit(filled, slot)
        slot = next_slot(slot, 1, SLOTS)


@gluon.jit
def hand_over(p_out, n, SLOTS: gl.constexpr):
    slots = gl.allocate_shared_memory(gl.float32, [SLOTS, 128], VECTOR)
    filled = signals(SLOTS)
    free = signals(SLOTS)
    gl.warp_specialize(
        [(read, (slots, filled, free, p_out, n, SLOTS)), (write, (slots, filled, free, n, SLOTS))], [4], [64]
    )


if __name__ == "__main__":
    n = 20
    out = torch.empty(128, device="cuda")
    hand_over[(1,)](out, n, SLOTS=3, num_warps=4)
    want = torch.arange(128).float() * n + n * (n - 1) / 2
    print("right" if torch.equal(out.cpu(), want) else f"wrong: {out.cpu()} instead of {want}")
