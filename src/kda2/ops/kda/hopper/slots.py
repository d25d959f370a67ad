"""The shared memory of stage `fused`: slots of the ring, scratch, and the layouts that all roles agree on."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from kda2.backends.gluon import signals

C = gl.constexpr(32)  # tokens of a chunk
PANEL = gl.constexpr(64)  # 16-bit channels of a 128-byte row, the unit of a wgmma operand
LOG2E = gl.constexpr(1.4426950408889634)
# Which tokens of its chunk a slot holds, its `window`: the first, how many << 8, and MORE where others are to follow.
WHOLE = gl.constexpr(C.value << 8)
MORE = gl.constexpr(1 << 16)

# operands of wgmma: rows of 128 bytes (and of 64), swizzled by the copy engine
ROWS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
TILES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
SHORT_ROWS = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))
SHORTEST_ROWS = gl.constexpr(gl.NVMMASharedLayout(32, 16, 2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
MATRIX = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
CUBE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
# rows of 8 and of 16 floats whose 16-byte parts are spread over the banks
ROWS8 = gl.constexpr(gl.SwizzledSharedLayout(4, 4, 2, [2, 1, 0]))
ROWS8_4D = gl.constexpr(gl.SwizzledSharedLayout(4, 4, 2, [3, 2, 1, 0]))
ROWS16 = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
ROWS16_3D = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, [2, 1, 0]))


@gluon.constexpr_function
def mma(n, warps=4):
    """Accumulators of a wgmma with n columns, 16 rows a warp."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, n, 16])


@gluon.constexpr_function
def tile(K):
    """A chunk as [panels, halves, 16 tokens, 64 channels]: a thread owns the tokens of a half, for one or two channels,
    so that sums over tokens stay inside it."""
    if K == 128:
        return gl.BlockedLayout([1, 1, 16, 2], [1, 1, 1, 32], [2, 2, 1, 1], [3, 2, 1, 0])
    return gl.BlockedLayout([1, 1, 16, 1], [1, 1, 1, 32], [1, 2, 1, 2], [3, 2, 1, 0])


@gluon.constexpr_function
def along(layout, axis):
    """The layout of a vector along one axis of a tensor."""
    for other in reversed(range(layout.rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def gate_rows(bits):
    """Rows of 128 bytes of the gate's input, which may be fp32."""
    return gl.NVMMASharedLayout(128, bits, 2), gl.NVMMASharedLayout(128, bits, 4)


@gluon.jit
def recomputed(x):
    """x, of which the compiler does not know that it is the same for every chunk: what follows from it takes no
    registers in between."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 1)


@aggregate
class Slots:
    """Per slot: `kq` [k; q], then [KL; QL]; `g`, then KR; `v`; `scores` [Tm^T; Aqk], of Tm the two 16x16 diagonal
    blocks; instead of the block left of the second one `A21` of A and `Y22`, what lies below the unit diagonal of
    (I + A)^-1; `decays` of the state before and from the anchor of the chunk, and other vectors; `window`. What ends in
    `low` is the second bf16 term.

    `o` is what leaves for memory, `bits` are factor's, what follows is scratch of score. Then come signals:

    signal    of each      from            to              says
    full      slot         copy engine     factor          a chunk has come
    measured  slot         factor          other factor    `large` holds what the state will remember (two of them)
    factored  slot         factor          score           factors and decays are made, of a chunk or a window
    ready     slot         score           state           scores too
    again     factor role  state           factor          done with a window; the next may overwrite it
    reloaded  factor role  copy engine     factor          k, q and g have come again, for a window
    free      slot         state           factor          done with a chunk (where factor loads)
    """

    kq: gl.shared_memory_descriptor
    g: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    scores: gl.shared_memory_descriptor
    A21: gl.shared_memory_descriptor
    Y22: gl.shared_memory_descriptor
    low: gl.shared_memory_descriptor
    A21_low: gl.shared_memory_descriptor
    Y22_low: gl.shared_memory_descriptor
    norm: gl.shared_memory_descriptor
    bnorm: gl.shared_memory_descriptor
    square: gl.shared_memory_descriptor
    large: gl.shared_memory_descriptor
    decays: gl.shared_memory_descriptor
    window: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    bits: gl.shared_memory_descriptor
    D: gl.shared_memory_descriptor
    N: gl.shared_memory_descriptor
    columns: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    Z8: gl.shared_memory_descriptor
    YT: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    measured: gl.shared_memory_descriptor
    factored: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    again: gl.shared_memory_descriptor
    reloaded: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, *parts):
        for name, part in zip(__class__.__annotations__, parts, strict=True):
            setattr(self, name, part)


@aggregate
class Source:
    """Where a CTA's chunks come from: one sequence and head, and the i_v-th slice of V."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    g_desc: tma.tensor_descriptor
    i_b: gl.tensor
    i_h: gl.tensor
    i_hv: gl.tensor
    i_v: gl.tensor

    @gluon.constexpr_function
    def __init__(self, *parts):
        for name, part in zip(__class__.__annotations__, parts, strict=True):
            setattr(self, name, part)


@gluon.constexpr_function
def chunk_bytes(s, K, V):
    """Of a chunk's k, q, g and V channels of v."""
    return ((2 * K + V) * s.kq.dtype.primitive_bitwidth + K * s.g.dtype.primitive_bitwidth) * C.value // 8


@gluon.jit
def load(s, source, slot, full, t0, K: gl.constexpr, V: gl.constexpr, SLOTS: gl.constexpr):
    """Start the copies of a chunk's k, q and g into a slot, and of V channels of v unless V is 0; they count on the
    barrier `full`."""
    mbarrier.expect(full, chunk_bytes(s, K, V))
    kq = s.kq._reinterpret(s.kq.dtype, [SLOTS, 2 * C, K], ROWS).index(slot)
    tma.async_copy_global_to_shared(source.k_desc, [source.i_b, source.i_h, t0, 0], full, kq.slice(0, C))
    tma.async_copy_global_to_shared(source.q_desc, [source.i_b, source.i_h, t0, 0], full, kq.slice(C, C))
    tma.async_copy_global_to_shared(source.g_desc, [source.i_b, source.i_hv, t0, 0], full, s.g.index(slot))
    if V > 0:
        at = [source.i_b, source.i_hv, t0, source.i_v * V]
        tma.async_copy_global_to_shared(source.v_desc, at, full, s.v.index(slot))


@gluon.jit
def load_first(s, source, bos, eos, which, K: gl.constexpr, V: gl.constexpr, SLOTS: gl.constexpr, BY: gl.constexpr):
    """Start the copies of every BY-th chunk from `which` on, as many as there are slots for."""
    for slot in range(which, gl.minimum((eos - bos + C - 1) // C, SLOTS), BY):
        load(s, source, slot, s.full.index(slot), bos + slot * C, K, V, SLOTS)


@gluon.jit
def window_of(s, slot, WARPS: gl.constexpr):
    """Which tokens of its chunk a slot holds."""
    return gl.sum(s.window.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), axis=0)


@gluon.jit
def set_window(s, slot, window):
    """Say which tokens a slot holds. For roles of 4 warps."""
    s.window.index(slot).store(gl.full([1], window, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def allocate(dtype: gl.constexpr, g_dtype: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SLOTS: gl.constexpr,
             FACTORS: gl.constexpr, TERMS: gl.constexpr):  # fmt: skip
    """All shared memory of a CTA, V channels wide."""
    P: gl.constexpr = K // PANEL
    kq = gl.allocate_shared_memory(dtype, [SLOTS * P, 2 * C, PANEL], ROWS)
    g = gl.allocate_shared_memory(g_dtype, [SLOTS, C, K], gate_rows(g_dtype.primitive_bitwidth)[0])
    v = gl.allocate_shared_memory(dtype, [SLOTS, C, V], ROWS)
    scores = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 2 * C, C], SHORT_ROWS)
    A21 = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 2 * C, 16], SHORTEST_ROWS)
    Y22 = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 16, 16], SHORTEST_ROWS)
    lows: gl.constexpr = SLOTS if TERMS == 2 else 1
    low = gl.allocate_shared_memory(gl.bfloat16, [lows, C, C], SHORT_ROWS)
    A21_low = gl.allocate_shared_memory(gl.bfloat16, [lows, 2 * C, 16], SHORTEST_ROWS)
    Y22_low = gl.allocate_shared_memory(gl.bfloat16, [lows, 16, 16], SHORTEST_ROWS)
    norm = gl.allocate_shared_memory(gl.float32, [SLOTS, 2 * C], VECTOR)
    bnorm = gl.allocate_shared_memory(gl.float32, [SLOTS, 2 * C], VECTOR)
    square = gl.allocate_shared_memory(gl.float32, [SLOTS * 2, 2 * C], VECTOR)
    large = gl.allocate_shared_memory(gl.int32, [SLOTS, 128], VECTOR)
    decays = gl.allocate_shared_memory(gl.float32, [SLOTS, 2, P, PANEL], CUBE)
    window = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], VECTOR)
    o = gl.allocate_shared_memory(dtype, [C, V], ROWS)
    bits = gl.allocate_shared_memory(gl.int32, [FACTORS, 4], VECTOR)
    D = gl.allocate_shared_memory(gl.float32, [8, 8, 8], MATRIX)
    N = gl.allocate_shared_memory(gl.float32, [2, 4, 8, 8], ROWS8)
    columns = gl.allocate_shared_memory(gl.float32, [2, 2, 8, 8], ROWS8)
    rows = gl.allocate_shared_memory(gl.float32, [2, 2, 8, 8], ROWS8)
    Z8 = gl.allocate_shared_memory(gl.float32, [2, 8, 8], ROWS8)
    YT = gl.allocate_shared_memory(gl.float32, [2, 16, 16], ROWS16_3D)
    full = signals(SLOTS)
    factored = signals(SLOTS)
    ready = signals(SLOTS)
    again = signals(FACTORS)
    reloaded = signals(FACTORS)
    # none that nobody waits for: Triton would put other things where it lies, which an mbarrier does not allow
    measured = signals(SLOTS) if FACTORS == 2 else full
    free = signals(SLOTS) if FACTORS == 2 else full
    return Slots(kq, g, v, scores, A21, Y22, low, A21_low, Y22_low, norm, bnorm, square, large, decays, window, o, bits,
                 D, N, columns, rows, Z8, YT, full, measured, factored, ready, again, reloaded, free)  # fmt: skip
