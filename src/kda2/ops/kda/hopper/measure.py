"""What is known of a chunk before it has factors: norms, and whether values are large."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kda2.backends.gluon import commit, wait_turn
from kda2.ops.kda.hopper.slots import PANEL, TILES, C, along, mma, recomputed, tile

# Bits: what factors multiply is too large (or, of rows, too small) for those that fill the range of fp32, or even for
# those of E up to LESS; some of what the state holds is large enough to be seen through the former, or the latter.
LARGE = gl.constexpr(8)
HUGE = gl.constexpr(16)
SEEN = gl.constexpr(32)
SEEN_BY_LESS = gl.constexpr(64)
EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # one number for each thread of a role of 4 warps


@gluon.constexpr_function
def larger_of_two(dtype):
    return "max.xorsign.abs." + ("bf16x2" if dtype == gl.bfloat16 else "f16x2") + " $0, $1, $2;"


@gluon.constexpr_function
def value_tile(V):
    """A chunk's values as [panels, halves, 16 tokens, 64 channels], read 8 channels at a time."""
    return gl.BlockedLayout([1, 1, V // 32, 8], [1, 1, 4, 8], [V // PANEL, 2, 128 // V, 1], [3, 2, 1, 0])


@gluon.jit
def larger(a, b):
    """What has the larger magnitude, two an instruction; its sign may be another."""
    return gl.inline_asm_elementwise(larger_of_two(a.dtype), "=r,r,r", [a, b], a.dtype, True, 2)


@gluon.jit
def largest(x, V: gl.constexpr):
    """max |x| in fp32 of what each thread has of values in `value_tile`, as two numbers [16, 8, 2]."""
    if V == 128:
        a, b = gl.split(x.reshape([16, 2, 2, PANEL]).permute((0, 2, 3, 1)))
        x = larger(a, b)
    a, b = gl.split(x.reshape([16, 2, PANEL]).permute((0, 2, 1)))
    a, b = gl.split(larger(a, b).reshape([16, 8, 2, 4]).permute((0, 1, 3, 2)))
    a, b = gl.split(larger(a, b).reshape([16, 8, 2, 2]).permute((0, 1, 3, 2)))
    return gl.abs(larger(a, b).to(gl.float32))


@gluon.jit
def clear_rows(x, rows, value, L: gl.constexpr):
    """Overwrite the tokens from `rows` on of a tile [panels, 2, 16, channels]."""
    o_half = recomputed(gl.arange(0, 2, along(L, 1)))[None, :, None, None]
    o_t = gl.arange(0, 16, along(L, 2))[None, None, :, None]
    x.store(gl.where(o_half * 16 + o_t < rows, x.load(L), value).to(x.dtype))


@gluon.jit
def start_squares(kq, slot, P: gl.constexpr):
    """Start [k; q] [k; q]^T, whose diagonals are |k|^2, |q|^2 and q . k of each token."""
    b_G = gl.zeros([2 * C, 2 * C], gl.float32, mma(2 * C))
    for p in gl.static_range(P):
        rows = kq.index(slot * P + p)
        b_G = warpgroup_mma(rows, rows.permute((1, 0)), b_G, use_acc=p > 0, is_async=True)
    return b_G


@gluon.jit
def diagonals(b_G):
    """Of [k; q] [k; q]^T, one entry a row: (|k|^2, q . k) and (k . q, |q|^2)."""
    L: gl.constexpr = mma(C)
    o_i = gl.arange(0, 2 * C, gl.SliceLayout(1, L))
    o_j = gl.arange(0, C, gl.SliceLayout(0, L))
    on_diagonal = (o_i % C)[:, None] == o_j[None, :]
    b_k, b_q = gl.split(b_G.reshape([2 * C, 2, C]).permute((0, 2, 1)))
    b_k = gl.sum(gl.where(on_diagonal, gl.convert_layout(b_k, L), 0.0), axis=1)
    b_q = gl.sum(gl.where(on_diagonal, gl.convert_layout(b_q, L), 0.0), axis=1)
    return b_k, b_q


@gluon.jit
def largest_each(b_x):
    """The largest of each thread's, one number a thread [128]."""
    return gl.convert_layout(gl.max(b_x.reshape([128, b_x.numel // 128]), 1), EACH)


@gluon.jit
def how_large(b_x, limits: gl.constexpr):
    """Bits of numbers >= 0 that the state holds or will hold [128]."""
    b_x = largest_each(b_x)
    b_bits = gl.where(b_x > limits[3], LARGE + HUGE, gl.where(b_x > limits[2], LARGE, 0))
    return b_bits + gl.where(b_x > limits[1], SEEN + SEEN_BY_LESS, gl.where(b_x > limits[0], SEEN_BY_LESS, 0))


@gluon.constexpr_function
def limits_of_rows(use_l2norm):
    """Of squared norms: below them HUGE and LARGE, above them LARGE and HUGE. Rows times 2^-104, 2^-116, 2^116 and
    2^104 then stay in bf16; and, in fp32, what KR writes of keys, KR (v - S^T k), where normalised keys shrink, and
    S^T k is at most 12 times a value that S holds."""
    return 2.0**-32, 2.0**-8, *((2.0**20, 2.0**44) if use_l2norm else (1.25, 2.0**8))


@gluon.constexpr_function
def limits_of_values(use_l2norm):
    """Of |v|: above them SEEN_BY_LESS, SEEN, LARGE and HUGE."""
    return 2.0**-17, 2.0**-5, *((2.0**6, 2.0**18) if use_l2norm else (2.0**6, 2.0**12))


@gluon.constexpr_function
def limits_of_state(use_l2norm):
    """The same of an initial state's |elements|."""
    return 2.0**-20, 2.0**-8, *((2.0**6, 2.0**18) if use_l2norm else (2.0**4, 2.0**8))


@gluon.jit
def at_first(p_first, s_first_k, s_first_v, K: gl.constexpr, V: gl.constexpr, HAS_FIRST: gl.constexpr,
             KEYS_FIRST: gl.constexpr, USE_L2NORM: gl.constexpr):  # fmt: skip
    """Bits of the initial state [128], read as it lies in memory: rows of keys or of values."""
    R: gl.constexpr = K if KEYS_FIRST else V
    D: gl.constexpr = V if KEYS_FIRST else K
    L: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [4, 1], [1, 0])
    limits: gl.constexpr = limits_of_state(USE_L2NORM)
    ROWS: gl.constexpr = 512 // D  # a load of each thread
    b_most = gl.zeros([ROWS, D], gl.float32, L)
    if HAS_FIRST:
        s_r = s_first_k if KEYS_FIRST else s_first_v
        s_d = s_first_v if KEYS_FIRST else s_first_k
        p_S = p_first + gl.arange(0, ROWS, gl.SliceLayout(1, L)).to(gl.int64)[:, None] * s_r
        p_S += gl.arange(0, D, gl.SliceLayout(0, L)).to(gl.int64)[None, :] * s_d
        for i in range(0, R, R // 2):
            for j in gl.static_range(R // 2 // ROWS):
                b_S = gl.load(p_S + gl.to_tensor(i + j * ROWS).to(gl.int64) * s_r).to(gl.float32)
                b_most = gl.maximum(b_most, gl.abs(b_S))
    return how_large(b_most, limits)


@gluon.jit
def measure(s, slot, tokens, K: gl.constexpr, V: gl.constexpr, SLOTS: gl.constexpr, USE_L2NORM: gl.constexpr):
    """Clear what is no token of a slot with so many, but for its gates; store the squares of its norms; return bits of
    its values [128]."""
    kq = s.kq._reinterpret(s.kq.dtype, [SLOTS, K // PANEL, 4, 16, PANEL], TILES).index(slot)
    values = s.v._reinterpret(s.v.dtype, [SLOTS, V // PANEL, 2, 16, PANEL], TILES).index(slot)
    if tokens < C:
        clear_rows(kq.slice(0, 2, dim=1), tokens, 0.0, tile(K))
        clear_rows(kq.slice(2, 2, dim=1), tokens, 0.0, tile(K))
        clear_rows(values, tokens, 0.0, value_tile(V))
        fence_async_shared()
    b_G = start_squares(s.kq, slot, K // PANEL)
    limits: gl.constexpr = limits_of_values(USE_L2NORM)
    if V == 128:
        # addresses made anew: state leaves few registers for keeping them
        values = s.v._reinterpret(s.v.dtype, [SLOTS, V // PANEL, 2, 16, PANEL], TILES).index(recomputed(slot))
    b_large = how_large(largest(values.load(value_tile(V)), V), limits)
    b_kk, b_qq = diagonals(warpgroup_mma_wait(0, [b_G]))
    s.square.index(slot * 2).store(b_kk)
    s.square.index(slot * 2 + 1).store(b_qq)
    return b_large


@gluon.jit
def remember(s, n, b_large, b_before, SLOTS: gl.constexpr, FACTORS: gl.constexpr):
    """Bits of chunk n and of all before it, since the state remembers those [128]: of `b_before`, and where another
    role has the chunk before this one, of what it found."""
    b_large |= b_before
    if FACTORS == 2:
        if n > 0:
            wait_turn(s.measured, (n - 1) % SLOTS, (n - 1) // SLOTS)
            b_large |= s.large.index((n - 1) % SLOTS).load(EACH)
        s.large.index(n % SLOTS).store(b_large)
        commit(s.measured, n % SLOTS)
    return b_large
