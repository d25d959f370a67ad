"""Role `state`: the recurrence over chunks, its state transposed and resident in wgmma accumulators; and the output."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kda2.backends.gluon import barrier, next_slot, release, wait
from kda2.ops.kda.hopper.slots import MORE, PANEL, ROWS, VECTOR, WHOLE, C, load, load_first, mma, recomputed, window_of


@gluon.jit
def elements(p_S, o_v, o_k, p, s_k, s_v):
    """Pointers to panel p of a state in memory [V, PANEL]. What all threads have in common of them comes last."""
    p_S += o_v.to(gl.int64)[:, None] * s_v + (o_k % 8).to(gl.int64)[None, :] * s_k
    return p_S + (p * PANEL + o_k // 8 * 8).to(gl.int64)[None, :] * s_k


@gluon.jit
def scaled(S, factors, WARPS: gl.constexpr, P: gl.constexpr):
    """S, channel by channel times `factors` [K]."""
    result = ()
    for p in gl.static_range(P):
        b_factor = factors.slice(p * PANEL, PANEL).load(gl.SliceLayout(0, mma(PANEL, WARPS)))[None, :]
        result = result + (S[p] * b_factor,)
    return result


@gluon.jit
def multiply(b_a, b, b_acc, N: gl.constexpr, WARPS: gl.constexpr, TERMS: gl.constexpr):
    """Start b_acc [V, N] + b_a @ b, b_a from registers as one bf16 term or two."""
    operand: gl.constexpr = gl.DotOperandLayout(0, mma(N, WARPS), 2)
    b_high = b_a.to(gl.bfloat16)
    b_acc = warpgroup_mma(gl.convert_layout(b_high, operand), b, b_acc, is_async=True)
    if TERMS == 2:
        b_low = (b_a - b_high.to(gl.float32)).to(gl.bfloat16)
        b_acc = warpgroup_mma(gl.convert_layout(b_low, operand), b, b_acc, is_async=True)
    return b_acc


@gluon.jit
def multiply_all(b_a, b, b_low, b_acc, N: gl.constexpr, WARPS: gl.constexpr, TERMS: gl.constexpr):
    """The same; of two terms also the product with b's second one, `b_low`."""
    b_acc = multiply(b_a, b, b_acc, N, WARPS, TERMS)
    if TERMS == 2:
        b_acc = multiply(b_a, b_low, b_acc, N, WARPS, 1)
    return b_acc


@gluon.jit
def state(
    s, source, o_desc, p_first, p_last, p_o, s_o_t, s_first_k, s_first_v, s_last_n, s_last_h, s_last_k, s_last_v,
    i_n, bos, eos, rest,
    K: gl.constexpr, V: gl.constexpr, SLOTS: gl.constexpr, FACTORS: gl.constexpr, TERMS: gl.constexpr,
    HAS_FIRST: gl.constexpr, STORE_LAST: gl.constexpr, IS_PACKED: gl.constexpr,
):  # fmt: skip
    """Per chunk, with S the state decayed to the middle of the chunk, everything transposed [V, ..]:

    e = v - |k|^-1 KL S        Vn = beta |k|^-1 e + Tm e        (what Vn writes is divided by |k|)
    and of the second 16 tokens Vn <- Vn - (I + Y22) A21 Vn of the first
    o = |q|^-1 scale (QL S + Aqk Vn)        S <- S + KR^T Vn, then decayed to the end

    Beside one factor role, which everybody waits for, it also loads what all roles read.
    """
    P: gl.constexpr = K // PANEL
    W: gl.constexpr = s.g.dtype.primitive_bitwidth // 16
    WARPS: gl.constexpr = V // 16
    L: gl.constexpr = mma(PANEL, WARPS)
    L_C: gl.constexpr = mma(C, WARPS)
    L_16: gl.constexpr = mma(16, WARPS)
    operand: gl.constexpr = gl.DotOperandLayout(0, L_C, 2)
    token: gl.constexpr = gl.SliceLayout(0, L_C)
    KQ = s.kq._reinterpret(gl.bfloat16, [SLOTS * P, 2 * C, PANEL], ROWS)
    KR = s.g._reinterpret(gl.bfloat16, [SLOTS * W * P, C, PANEL], ROWS)
    decays = s.decays._reinterpret(gl.float32, [SLOTS * 2, K], VECTOR)
    o_v = gl.arange(0, V, gl.SliceLayout(1, L))
    o_k = gl.arange(0, PANEL, gl.SliceLayout(0, L))
    o_t = gl.arange(0, C, token)
    p_rows = p_o + gl.arange(0, V, gl.SliceLayout(1, L_C))[:, None]
    if FACTORS == 1:
        load_first(s, source, bos, eos, 0, K, V, SLOTS, 1)
    S = ()
    for p in gl.static_range(P):
        if HAS_FIRST:
            S = S + (gl.load(elements(p_first, o_v, o_k, p, s_first_k, s_first_v)).to(gl.float32),)
        else:
            S = S + (gl.zeros([V, PANEL], gl.float32, L),)
    slot = 0
    ready = 0
    t0 = bos
    while t0 < eos:
        ready = wait(s.ready, slot, ready)
        S = scaled(S, decays.index(slot * 2), WARPS, P)
        operands = ()
        for p in gl.static_range(P):
            operands = operands + (gl.convert_layout(S[p].to(gl.bfloat16), operand),)
        b_P = gl.zeros([V, C], gl.float32, L_C)
        b_O = gl.zeros([V, C], gl.float32, L_C)
        for p in gl.static_range(P):
            KL = KQ.index(slot * P + p).slice(0, C).permute((1, 0))
            b_P = warpgroup_mma(operands[p], KL, b_P, use_acc=p > 0, is_async=True)
        for p in gl.static_range(P):
            QL = KQ.index(slot * P + p).slice(C, C).permute((1, 0))
            b_O = warpgroup_mma(operands[p], QL, b_O, use_acc=p > 0, is_async=True)
        b_v = s.v.index(slot).permute((1, 0)).load(L_C).to(gl.float32)  # of rows outside a window too: KR is 0 there
        b_knorm = s.norm.index(slot).slice(0, C).load(token)
        window = window_of(s, slot, WARPS)
        b_P = warpgroup_mma_wait(P, [b_P])  # the P products for b_O go on
        b_e = b_v - b_P * b_knorm[None, :]
        b_V = b_e * s.bnorm.index(slot).slice(0, C).load(token)[None, :]
        lows = slot if TERMS == 2 else 0
        b_V = multiply_all(b_e, s.scores.index(slot).slice(0, C), s.low.index(lows), b_V, C, WARPS, TERMS)
        b_V, b_O = warpgroup_mma_wait(0, [b_V, b_O])
        # what the first 16 tokens write, the second predict as well
        b_V1, b_V2 = gl.split(b_V.reshape([V, 2, 16]).permute((0, 2, 1)))
        b_V1 = gl.convert_layout(b_V1, L_16)
        A21 = s.A21.index(slot).slice(16, 16).permute((1, 0))
        A21_low = s.A21_low.index(lows).slice(16, 16).permute((1, 0))
        none = gl.zeros([V, 16], gl.float32, L_16)
        b_c = multiply_all(b_V1, A21, A21_low, none, 16, WARPS, TERMS)
        b_c = warpgroup_mma_wait(0, [b_c])
        Y22 = s.Y22.index(slot).permute((1, 0))
        b_d = multiply_all(b_c, Y22, s.Y22_low.index(lows).permute((1, 0)), none, 16, WARPS, TERMS)
        b_V2 = gl.convert_layout(b_V2, L_16) - b_c - warpgroup_mma_wait(0, [b_d])
        b_V = gl.join(b_V1, b_V2).permute((0, 2, 1)).reshape([V, C])
        updated = ()
        for p in gl.static_range(P):
            updated = updated + (multiply(b_V, KR.index(slot * W * P + p), S[p], PANEL, WARPS, TERMS),)
        b_O = multiply(b_V, s.scores.index(slot).slice(C, C).permute((1, 0)), b_O, C, WARPS, TERMS)
        if P == 2:
            b_S0, b_S1 = warpgroup_mma_wait(TERMS, [updated[0], updated[1]])
            S = (b_S0, b_S1)
        else:
            S = (warpgroup_mma_wait(TERMS, [updated[0]]),)
        S = scaled(S, decays.index(slot * 2 + 1), WARPS, P)
        b_qnorm = s.norm.index(slot).slice(C, C).load(token)
        b_O = warpgroup_mma_wait(0, [b_O])
        b_o = (b_O * b_qnorm[None, :]).to(s.o.dtype)
        more = window & MORE
        tma.store_wait(0)  # here, so that the barrier of a signal serves this as well
        if more != 0:
            release(s.again, (t0 - bos) // C % FACTORS)
        elif FACTORS == 2:
            release(s.free, slot)
        else:
            barrier()
            if t0 + SLOTS * C < eos:
                load(s, source, slot, s.full.index(slot), t0 + SLOTS * C, K, V, SLOTS)
        if (window != WHOLE) | (IS_PACKED & (t0 + C > eos)):
            first = t0 + (window & 255)
            inside = (t0 + o_t >= first) & (t0 + o_t < gl.minimum(first + ((window >> 8) & 255), eos))
            gl.store(p_rows + (t0 + o_t).to(gl.int64)[None, :] * s_o_t, b_o, mask=inside[None, :])
        else:
            s.o.permute((1, 0)).store(b_o)
            fence_async_shared()
            barrier()
            tma.async_copy_shared_to_global(o_desc, [source.i_b, source.i_hv, t0, source.i_v * V], s.o)
        if more == 0:
            t0 += C
            slot = next_slot(slot, 1, SLOTS)
    if IS_PACKED:
        # the tokens behind the last sequence belong to none
        for t0 in range(eos, rest, C):
            none = gl.zeros([V, C], p_o.dtype.element_ty, L_C)
            gl.store(p_rows + (t0 + o_t).to(gl.int64)[None, :] * s_o_t, none, mask=(t0 + o_t < rest)[None, :])
    if STORE_LAST:
        # not kept over the chunks
        p_last += recomputed(i_n) * s_last_n + recomputed(source.i_hv) * s_last_h
        p_last += recomputed(source.i_v) * V * s_last_v
        for p in gl.static_range(P):
            gl.store(elements(p_last, o_v, o_k, p, s_last_k, s_last_v), S[p].to(p_last.dtype.element_ty))
    tma.store_wait(0)
