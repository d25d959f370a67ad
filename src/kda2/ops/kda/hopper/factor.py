"""Role `factor`: a chunk's gates, and its keys and queries times the decay from the middle of the chunk."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kda2.backends.gluon import commit, next_slot, wait
from kda2.ops.kda.hopper.slots import (
    LOG2E,
    PANEL,
    TILES,
    VECTOR,
    WHOLE,
    C,
    along,
    chunk_bytes,
    copy_tokens,
    gate_rows,
    mma,
    tile,
)

# Of a base-2 log decay between the middle of a chunk and its ends: what fp32 and bf16 factors hold, for rows up to 2^10
# (a gate bounded by -5 stays below 116), and what they hold for any row.
LIMIT = gl.constexpr(116.0)
SAFE = gl.constexpr(60.0)
WINDOW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def first_of(a, b):
    return a


@gluon.jit
def second(a, b):
    return b


@gluon.jit
def largest(x):
    """max |x| over a whole tensor."""
    return gl.max(gl.abs(x).reshape([x.numel]), axis=0)


@gluon.jit
def times(b_x, b_factor):
    """x times an fp32 factor, in bf16; bf16 operands two an instruction."""
    if b_x.dtype == gl.bfloat16:
        b_bf16 = b_factor.to(gl.bfloat16)
        return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [b_x, b_bf16], gl.bfloat16, True, 2)
    else:
        return (b_x.to(gl.float32) * b_factor).to(gl.bfloat16)


@gluon.jit
def load_gates(gates, K: gl.constexpr):
    """The gate's input of a chunk in the layout `tile`, fp32. Rows of 128 bytes hold 64 channels of 16 bits or 32."""
    L: gl.constexpr = tile(K)
    if gates.dtype.primitive_bitwidth == 16:
        return gates.load(L).to(gl.float32)
    else:
        b_g = gates.load(wide_tile(K)).reshape([K // PANEL, 2, 2, 16, 32]).permute((0, 2, 3, 1, 4))
        return gl.convert_layout(b_g.reshape([K // PANEL, 2, 16, PANEL]), L)


@gluon.constexpr_function
def wide_tile(K):
    """[panels of 32 channels, halves, 16 tokens, channels] of an fp32 gate."""
    if K == 128:
        return gl.BlockedLayout([1, 1, 16, 2], [2, 1, 1, 16], [2, 2, 1, 1], [3, 2, 1, 0])
    return gl.BlockedLayout([1, 1, 16, 1], [1, 1, 1, 32], [2, 2, 1, 1], [3, 2, 1, 0])


@gluon.jit
def clear_rows(x, rows, value, L: gl.constexpr):
    """Overwrite the tokens from `rows` on of a tile [panels, 2, 16, channels]."""
    o_half = gl.arange(0, 2, along(L, 1))[None, :, None, None]
    o_t = gl.arange(0, 16, along(L, 2))[None, None, :, None]
    x.store(gl.where(o_half * 16 + o_t < rows, x.load(L), value).to(x.dtype))


@gluon.jit
def fast_log2(x):
    """log2 of a normal positive number, one instruction."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def log2_decay(b_g, a, b_bias, lower_bound, GATE: gl.constexpr):
    """Base-2 log decay of the gate's input. `a` is exp(A_log)."""
    if GATE == "log":
        return b_g * LOG2E
    elif GATE == "softplus":
        b_x = b_g * LOG2E + b_bias
        b_e = gl.exp2(-gl.abs(b_x))
        # log(1 + e) loses small e; its series does not
        b_log1p = gl.where(b_e < 1e-3, b_e * (LOG2E - 0.5 * LOG2E * b_e), fast_log2(1.0 + b_e))
        return (gl.where(b_x > 0, b_x, 0.0) + b_log1p) * -a
    else:
        b_root = gl.rsqrt(1.0 + gl.exp2(b_g * (a * -LOG2E) + b_bias))  # its square is the sigmoid, without a division
        return b_root * b_root * (lower_bound * LOG2E)


@gluon.jit
def load_bias(p_dt_bias, s_dt_d, a, GATE: gl.constexpr, HAS_BIAS: gl.constexpr, K: gl.constexpr):
    """dt_bias as `log2_decay` adds it, [panels, 1, 1, channels]."""
    L: gl.constexpr = tile(K)
    o_p = gl.arange(0, K // PANEL, along(L, 0))[:, None, None, None]
    o_c = gl.arange(0, PANEL, along(L, 3))[None, None, None, :]
    if HAS_BIAS:
        b_bias = gl.load(p_dt_bias + (o_p * PANEL + o_c) * s_dt_d)
    else:
        b_bias = gl.zeros([K // PANEL, 1, 1, PANEL], gl.float32, L)
    return b_bias * (LOG2E if GATE == "softplus" else a * -LOG2E)


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
def over_halves(s, b_x, K: gl.constexpr):
    """b_x [panels, halves, channels] summed over both halves, [K]."""
    each: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    s.ends.permute((1, 0, 2)).store(b_x)
    ends = s.ends._reinterpret(gl.float32, [2, K], VECTOR)
    return ends.index(0).load(each) + ends.index(1).load(each)


@gluon.jit
def store_decay(s, slot, b_pre, b_end, K: gl.constexpr):
    """The state's decay since the chunk (or window) before: what is left of that one, `b_end`, and up to this one's
    middle, `b_pre`. Stored as its square root, which state applies twice: the decay itself may underflow where the
    state, in units of the middle of the chunk before, is large."""
    s.decay.index(slot).store(gl.exp2(0.5 * over_halves(s, b_pre + b_end, K)))


@gluon.jit
def factor(
    s, q_desc, k_desc, g_desc, p_A_log, p_dt_bias, s_dt_d, bos, eos, chunks, i_b, i_h, i_hv, lower_bound,
    K: gl.constexpr, V: gl.constexpr, SLOTS: gl.constexpr, GATE: gl.constexpr, HAS_BIAS: gl.constexpr,
    USE_L2NORM: gl.constexpr,
):  # fmt: skip
    """With E_t the log decay between the middle of a chunk and token t: KL = k exp(E), QL = q exp(E), KR = k exp(-E).

    KL_i . KR_j is then k_i . k_j decayed from j to i, and a state decayed to the middle is all that state needs. Where
    E would leave the range of fp32, the chunk goes through the ring in windows: the same slot, again and again, with
    the rows outside a window zero.
    """
    P: gl.constexpr = K // PANEL
    L: gl.constexpr = tile(K)
    G: gl.constexpr = wide_tile(K) if g_desc.dtype.primitive_bitwidth == 32 else L
    kq4 = s.kq._reinterpret(s.kq.dtype, [SLOTS, P, 4, 16, PANEL], TILES)
    factors4 = s.kq._reinterpret(gl.bfloat16, [SLOTS, P, 4, 16, PANEL], TILES)
    W: gl.constexpr = g_desc.dtype.primitive_bitwidth // 16  # rows of 128 bytes of g for each of KR
    g4 = s.g._reinterpret(s.g.dtype, [SLOTS, P * W, 2, 16, PANEL // W], gate_rows(g_desc.dtype.primitive_bitwidth)[1])
    kr4 = s.g._reinterpret(gl.bfloat16, [SLOTS * W, P, 2, 16, PANEL], TILES)
    v4 = s.v._reinterpret(s.v.dtype, [SLOTS, V // PANEL, 2, 16, PANEL], TILES)
    a = 1.0
    if GATE != "log":
        a = gl.exp2(gl.load(p_A_log) * LOG2E)
    b_bias = load_bias(p_dt_bias, s_dt_d, a, GATE, HAS_BIAS, K)
    o_half = gl.arange(0, 2, along(L, 1))[None, :, None, None]
    o_t = gl.arange(0, 16, along(L, 2))[None, None, :, None]
    o_side = gl.arange(0, 2, along(gl.SliceLayout(2, L), 1))[None, :, None]
    outside = 0.0 if GATE == "log" else float("-inf")
    b_end = gl.zeros([P, 2, PANEL], gl.float32, gl.SliceLayout(2, L))
    slot = 0
    full = 0
    again = 0
    for n in range(chunks):
        t0 = bos + n * C
        full = wait(s.full, slot, full)
        keys = kq4.index(slot).slice(0, 2, dim=1)
        queries = kq4.index(slot).slice(2, 2, dim=1)
        KL = factors4.index(slot).slice(0, 2, dim=1)
        QL = factors4.index(slot).slice(2, 2, dim=1)
        KR = kr4.index(slot * W)
        gates = g4.index(slot)
        if t0 + C > eos:
            clear_rows(keys, eos - t0, 0.0, L)
            clear_rows(queries, eos - t0, 0.0, L)
            clear_rows(v4.index(slot), eos - t0, 0.0, tile(V))
            clear_rows(gates, eos - t0, outside, G)
            fence_async_shared()
        b_G = start_squares(s.kq, slot, P)
        b_g = log2_decay(load_gates(gates, K), a, b_bias, lower_bound, GATE)
        # the first token's decay is the state's alone
        b_sum = gl.associative_scan(gl.where((o_half == 0) & (o_t == 0), 0.0, b_g), 2, add)
        b_tot = gl.reduce(b_sum, 2, second)
        b_first = gl.reduce(b_g, 2, first_of)
        reach = largest(b_tot)
        b_G = warpgroup_mma_wait(0, [b_G])
        b_kk, b_qq = diagonals(b_G)
        s.square.index(slot * 2).store(b_kk)
        s.square.index(slot * 2 + 1).store(b_qq)
        if reach > SAFE:
            rows = gl.maximum(largest(b_kk), largest(b_qq))
            values = largest(v4.index(slot).load(tile(V)).to(gl.float32))
            # k and k v times 2^LIMIT must stay in fp32; normalised keys shrink in what they write, not in KR
            large = (rows > 2.0**20) | (values > 2.0**10) if USE_L2NORM else (rows > 2.0**12) | (values > 2.0**3)
            reach = gl.where(large, 2.0 * LIMIT, reach)
        if reach > LIMIT:
            # |E| stays below SAFE in a window of `size` tokens, a power of two; a reset starts one
            b_step = log2_decay(load_gates(gates, K), a, b_bias, lower_bound, GATE)
            step = largest(gl.where((o_half == 0) & (o_t == 0), 0.0, b_step))
            size = gl.where(step <= SAFE, 2, 1)
            size = gl.where(step * 2 <= SAFE, 4, size)
            size = gl.where(step * 4 <= SAFE, 8, size)
            size = gl.where(step * 8 <= SAFE, 16, size)
            o_r = o_half * 16 + o_t
            for first in range(0, C, size):
                if first > 0:
                    again = wait(s.again, slot, again)
                    bar = s.full.index(slot)
                    mbarrier.expect(bar, chunk_bytes(s, K, 0))
                    copy_tokens(s, bar, q_desc, k_desc, g_desc, slot, t0, i_b, i_h, i_hv, K, SLOTS)
                    full = wait(s.full, slot, full)
                    if t0 + C > eos:
                        clear_rows(gates, eos - t0, outside, G)
                m = (o_r >= first) & (o_r < first + size)
                m_row = m & (t0 + o_r < eos)
                b_w = gl.where(m, log2_decay(load_gates(gates, K), a, b_bias, lower_bound, GATE), 0.0)
                b_in = gl.where(o_r > first, b_w, 0.0)
                b_prefix = gl.associative_scan(b_in, 2, add)
                b_mid = gl.sum(gl.where(o_r <= first + (size - 1) // 2, b_in, 0.0), axis=2)
                b_Ew = gl.where(m, b_prefix - b_mid[:, :, None, :], 0.0)
                store_decay(s, slot, b_mid + gl.sum(gl.where(o_r == first, b_w, 0.0), axis=2), b_end, K)
                b_end = gl.reduce(b_prefix, 2, second) - b_mid
                b_k = keys.load(L)
                b_k = gl.where(m_row, b_k, gl.zeros_like(b_k))
                b_q = queries.load(L)
                b_q = gl.where(m_row, b_q, gl.zeros_like(b_q))
                QL.store(times(b_q, gl.exp2(b_Ew)))
                KL.store(times(b_k, gl.exp2(b_Ew)))
                KR.store(times(b_k, gl.exp2(-b_Ew)))
                more = gl.where(first + size < C, 1, 0)
                s.window.index(slot).store(gl.full([1], first + (size << 8) + (more << 16), gl.int32, WINDOW))
                fence_async_shared()
                commit(s.factored, slot)
        else:
            store_decay(s, slot, gl.where(o_side == 0, b_tot + b_first, 0.0), b_end, K)
            b_end = gl.where(o_side == 0, 0.0, b_tot)
            b_E = b_sum - gl.where(o_side == 0, b_tot, 0.0)[:, :, None, :]
            b_L = gl.exp2(b_E)
            b_R = gl.exp2(-b_E)
            b_k = keys.load(L)
            QL.store(times(queries.load(L), b_L))
            KL.store(times(b_k, b_L))
            KR.store(times(b_k, b_R))
            s.window.index(slot).store(gl.full([1], WHOLE, gl.int32, WINDOW))
            fence_async_shared()
            commit(s.factored, slot)
        slot = next_slot(slot, 1, SLOTS)
    s.last.store(gl.exp2(over_halves(s, b_end, K)))
    commit(s.closed, 0)
