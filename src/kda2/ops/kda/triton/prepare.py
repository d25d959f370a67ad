"""Stage `prepare`: everything a chunk can compute before it knows its state."""

import triton
import triton.language as tl

from kda2.ops.kda.triton.tiles import (
    LOG2E,
    across_cut,
    log2_decay,
    product,
    sequence_of_slot,
    sum_tokens,
    unit_lower_inverse,
)

# What T or the packing may change is not specialised on; ALIGN says what the loads may rely on instead.
T_DEPENDENT = ["T", "N", *(f"s_{x}_{axis}" for x in ("q", "k", "v", "g", "beta") for axis in "bh")]


@triton.jit
def _sum_squares(b_x):
    b_x = b_x.to(tl.float32)
    return tl.sum(b_x * b_x, 1)


@triton.jit
def _scores_across_cut(
    b_q, b_k, b_g, b_Akk, b_Aqk, half, ONE_BLOCK: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr
):
    """Add the scores of rows right of the middle of their block of 2 * half tokens with columns left of it.

    Both factors decay towards the middle, so neither exceeds its row of q or k."""
    o_i = tl.arange(0, BT)
    cut = o_i // (2 * half) * (2 * half) + half
    right = (o_i >= cut)[:, None]
    to_cut = right & (o_i[None, :] >= cut[:, None]) & (o_i[None, :] <= o_i[:, None])
    from_cut = (o_i[None, :] > o_i[:, None]) & (o_i[None, :] < cut[:, None])
    b_decay = tl.exp2(sum_tokens(to_cut | from_cut, to_cut & from_cut, b_g, PRECISION))
    b_kd = b_k * b_decay
    b_left = tl.trans(tl.where(right, 0.0, b_kd))
    b_kd = tl.where(right, b_kd, 0.0)
    b_qd = tl.where(right, b_q * b_decay, 0.0)
    if ONE_BLOCK:  # every product lies across the one cut, or is 0
        b_Akk = product(b_kd, b_left, b_Akk, PRECISION)
        b_Aqk = product(b_qd, b_left, b_Aqk, PRECISION)
    else:
        m_cut = across_cut(o_i[:, None], o_i[None, :], half)
        b_zero = tl.zeros([BT, BT], tl.float32)
        b_Akk += tl.where(m_cut, product(b_kd, b_left, b_zero, PRECISION), 0.0)
        b_Aqk += tl.where(m_cut, product(b_qd, b_left, b_zero, PRECISION), 0.0)
    return b_Akk, b_Aqk


@triton.jit
def _scores_in_blocks(b_q, b_k, b_g, b_Akk, b_Aqk, BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr):
    """Add the scores inside blocks of BC tokens. Their factors are anchored at the block's middle, so they reach
    exp(BC / 2 bounded log decays); BC = 1 is a plain dot product and asks nothing of the gate."""
    o_i = tl.arange(0, BT)
    if BC == 1:
        b_qk = tl.sum(b_q * b_k, 1)
        b_Aqk += tl.where(o_i[:, None] == o_i[None, :], b_qk[:, None], 0.0)
    else:
        middle = o_i // BC * BC + (BC // 2 - 1)
        after = (o_i[None, :] > middle[:, None]) & (o_i[None, :] <= o_i[:, None])
        before = (o_i[None, :] > o_i[:, None]) & (o_i[None, :] <= middle[:, None])
        b_s = sum_tokens(after, before, b_g, PRECISION)
        b_decay = tl.exp2(b_s)
        b_right = tl.trans(b_k * tl.exp2(-b_s))
        # selected after the product: outside the block and above the diagonal it may overflow
        m_block = (o_i[:, None] // BC == o_i[None, :] // BC) & (o_i[:, None] >= o_i[None, :])
        b_zero = tl.zeros([BT, BT], tl.float32)
        b_Akk += tl.where(m_block, product(b_k * b_decay, b_right, b_zero, PRECISION), 0.0)
        b_Aqk += tl.where(m_block, product(b_q * b_decay, b_right, b_zero, PRECISION), 0.0)
    return b_Akk, b_Aqk


@triton.jit
def _tile(
    p_q, p_k, p_g, p_dt_bias, p_Qd, p_Kr, p_decay, o_t, m_t, i_tile, i_k, b_sq, b_sk, a, lower_bound, b_Akk, b_Aqk,
    s_q_t, s_q_d, s_k_t, s_k_d, s_g_t, s_g_d, s_dt_d,
    K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORM_HERE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of BK channels: store its Qd, Kr and decay, add its share of the scores; returns Kd too.
    b_sq, b_sk: what each row of q and k is multiplied by, before the norm if NORM_HERE."""
    o_i = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    m_k = (o_k < K) | (K % BK == 0)
    m_tk = m_t[:, None] & m_k[None, :]
    b_q = tl.load(p_q + o_t[:, None] * s_q_t + o_k[None, :] * s_q_d, mask=m_tk, other=0.0)
    b_k = tl.load(p_k + o_t[:, None] * s_k_t + o_k[None, :] * s_k_d, mask=m_tk, other=0.0)
    b_g = tl.load(p_g + o_t[:, None] * s_g_t + o_k[None, :] * s_g_d, mask=m_tk, other=0.0).to(tl.float32)
    if NORM_HERE:
        b_sq = b_sq * tl.rsqrt(_sum_squares(b_q) + 1e-6)
        b_sk = b_sk * tl.rsqrt(_sum_squares(b_k) + 1e-6)
    b_q = b_q.to(tl.float32) * b_sq[:, None]
    b_k = b_k.to(tl.float32) * b_sk[:, None]
    b_bias = tl.zeros([1, BK], tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(p_dt_bias + o_k * s_dt_d, mask=m_k, other=0.0)[None, :]
    b_g = tl.where(m_tk, log2_decay(b_g, a, b_bias, lower_bound, GATE), 0.0)

    o_out = i_tile * BT * K + o_i[:, None] * K + o_k[None, :]
    here = o_i[:, None] >= o_i[None, :]
    b_to = tl.exp2(sum_tokens(here, here, b_g, PRECISION))
    b_from = tl.exp2(sum_tokens(~here, ~here, b_g, PRECISION))
    b_Kd = b_k * b_to
    tl.store(p_Qd + o_out, (b_q * b_to).to(p_Qd.dtype.element_ty), mask=m_k[None, :])
    tl.store(p_Kr + o_out, (b_k * b_from).to(p_Kr.dtype.element_ty), mask=m_k[None, :])
    tl.store(p_decay + i_tile * K + o_k, tl.exp2(tl.sum(b_g, 0)), mask=m_k)
    b_Akk, b_Aqk = _scores_in_blocks(b_q, b_k, b_g, b_Akk, b_Aqk, BT, BC, PRECISION)
    half = BC
    while half < BT // 2:
        b_Akk, b_Aqk = _scores_across_cut(b_q, b_k, b_g, b_Akk, b_Aqk, half, False, BT, PRECISION)
        half *= 2
    if BC < BT:
        b_Akk, b_Aqk = _scores_across_cut(b_q, b_k, b_g, b_Akk, b_Aqk, BT // 2, True, BT, PRECISION)
    return b_Kd.to(p_Kr.dtype.element_ty), b_Akk, b_Aqk


@triton.jit(do_not_specialize=T_DEPENDENT)
def kda_prepare(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_cu,
    p_W, p_U, p_Qd, p_Kr, p_Aqk, p_decay,
    scale, lower_bound, beta_scale,
    T: tl.int64, N: tl.int64,
    s_q_b: tl.int64, s_q_t, s_q_h: tl.int64, s_q_d, s_k_b: tl.int64, s_k_t, s_k_h: tl.int64, s_k_d,
    s_v_b: tl.int64, s_v_t, s_v_h: tl.int64, s_v_d, s_g_b: tl.int64, s_g_t, s_g_h: tl.int64, s_g_d,
    s_beta_b: tl.int64, s_beta_t, s_beta_h: tl.int64, s_A, s_dt_h, s_dt_d,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, ALIGN: tl.constexpr,
    GATE: tl.constexpr, HAS_BIAS: tl.constexpr, USE_L2NORM: tl.constexpr, USE_SIGMOID: tl.constexpr,
    IS_PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """
    Computes: W = Tm Kd, U = Tm v, Qd, Kr, tril(Qd Ki^T) and exp(G_C) of one chunk and value head; options applied.
    Reads:    q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K], beta [B, T, HV], A_log [HV], dt_bias [HV, K].
    Writes:   W, Qd, Kr [slots, HV, BT, K], U [slots, HV, V, BT], Aqk [slots, HV, BT, BT], decay [slots, HV, K].
    Grid:     slots * HV.
    Assumes:  batch and head strides of q, k, v, g are multiples of ALIGN; BC > 1 only where the gate is bounded
              below by -5. Rows past a sequence's end count as zeros.
    Source:   Kimi Linear (arXiv 2510.26692), chunkwise form; the stage `prepare` of `kda2.ops.kda.torch.stages`.
    """
    i_hv = tl.program_id(0) % HV
    i_slot = (tl.program_id(0) // HV).to(tl.int64)
    i_n, bos, eos, first_slot = sequence_of_slot(p_cu, i_slot, N, T, BT, IS_PACKED)
    t0 = bos + (i_slot - first_slot) * BT
    if (i_n >= N) | (t0 < bos) | (t0 >= eos):
        return
    i_h = i_hv // (HV // H)
    i_b = tl.where(IS_PACKED, 0, i_n)
    o_i = tl.arange(0, BT)
    o_t = t0 + o_i
    m_t = o_t < eos

    p_q += tl.multiple_of(i_b * s_q_b + i_h * s_q_h, ALIGN)
    p_k += tl.multiple_of(i_b * s_k_b + i_h * s_k_h, ALIGN)
    p_v += tl.multiple_of(i_b * s_v_b + i_hv * s_v_h, ALIGN)
    p_g += tl.multiple_of(i_b * s_g_b + i_hv * s_g_h, ALIGN)
    b_beta = tl.load(p_beta + i_b * s_beta_b + o_t * s_beta_t + i_hv * s_beta_h, mask=m_t, other=0.0).to(tl.float32)
    if USE_SIGMOID:
        b_beta = tl.where(m_t, beta_scale / (1.0 + tl.exp2(b_beta * -LOG2E)), 0.0)
    a = 0.0
    if GATE != "log":
        a = tl.exp2(tl.load(p_A_log + i_hv * s_A) * LOG2E)
    i_tile = i_slot * HV + i_hv

    NK: tl.constexpr = (K + BK - 1) // BK
    b_sq = tl.full([BT], 1.0, tl.float32) * scale
    b_sk = tl.full([BT], 1.0, tl.float32)
    if USE_L2NORM and NK > 1:
        b_q2 = tl.zeros([BT], tl.float32)
        b_k2 = tl.zeros([BT], tl.float32)
        for i_k in range(NK):
            o_k = i_k * BK + tl.arange(0, BK)
            m_tk = m_t[:, None] & ((o_k < K) | (K % BK == 0))[None, :]
            b_q = tl.load(p_q + o_t[:, None] * s_q_t + o_k[None, :] * s_q_d, mask=m_tk, other=0.0)
            b_k = tl.load(p_k + o_t[:, None] * s_k_t + o_k[None, :] * s_k_d, mask=m_tk, other=0.0)
            b_q2 += _sum_squares(b_q)
            b_k2 += _sum_squares(b_k)
        b_sq = b_sq * tl.rsqrt(b_q2 + 1e-6)
        b_sk = b_sk * tl.rsqrt(b_k2 + 1e-6)

    NORM_HERE: tl.constexpr = USE_L2NORM and NK == 1
    if HAS_BIAS:
        p_dt_bias += i_hv * s_dt_h
    b_Akk = tl.zeros([BT, BT], tl.float32)
    b_Aqk = tl.zeros([BT, BT], tl.float32)
    if NK == 1:
        b_Kd, b_Akk, b_Aqk = _tile(
            p_q, p_k, p_g, p_dt_bias, p_Qd, p_Kr, p_decay, o_t, m_t, i_tile, 0, b_sq, b_sk, a, lower_bound,
            b_Akk, b_Aqk, s_q_t, s_q_d, s_k_t, s_k_d, s_g_t, s_g_d, s_dt_d,
            K, BT, BK, BC, GATE, HAS_BIAS, NORM_HERE, PRECISION,
        )  # fmt: skip
    else:
        for i_k in range(NK):
            o_k = i_k * BK + tl.arange(0, BK)
            b_Kd, b_Akk, b_Aqk = _tile(
                p_q, p_k, p_g, p_dt_bias, p_Qd, p_Kr, p_decay, o_t, m_t, i_tile, i_k, b_sq, b_sk, a, lower_bound,
                b_Akk, b_Aqk, s_q_t, s_q_d, s_k_t, s_k_d, s_g_t, s_g_d, s_dt_d,
                K, BT, BK, BC, GATE, HAS_BIAS, NORM_HERE, PRECISION,
            )  # fmt: skip
            tl.store(p_W + i_tile * BT * K + o_i[:, None] * K + o_k[None, :], b_Kd, mask=(o_k < K)[None, :])

    o_square = i_tile * BT * BT + o_i[:, None] * BT + o_i[None, :]
    tl.store(p_Aqk + o_square, b_Aqk.to(p_Aqk.dtype.element_ty))
    b_A = tl.where(o_i[:, None] > o_i[None, :], b_beta[:, None] * b_Akk, 0.0)
    b_Tm = (unit_lower_inverse(b_A, BT, PRECISION) * b_beta[None, :]).to(p_W.dtype.element_ty)

    if NK == 1:
        o_k = tl.arange(0, BK)
        b_W = product(b_Tm, b_Kd, tl.zeros([BT, BK], tl.float32), PRECISION)
        p_Wi = p_W + i_tile * BT * K + o_i[:, None] * K + o_k[None, :]
        tl.store(p_Wi, b_W.to(p_W.dtype.element_ty), mask=(o_k < K)[None, :])
    else:
        # W held Kd for a moment: what other threads of this program wrote is read, then overwritten
        for i_k in range(NK):
            o_k = i_k * BK + tl.arange(0, BK)
            p_Wi = p_W + i_tile * BT * K + o_i[:, None] * K + o_k[None, :]
            tl.debug_barrier()
            b_Kd = tl.load(p_Wi, mask=(o_k < K)[None, :], other=0.0)
            tl.debug_barrier()
            b_W = product(b_Tm, b_Kd, tl.zeros([BT, BK], tl.float32), PRECISION)
            tl.store(p_Wi, b_W.to(p_W.dtype.element_ty), mask=(o_k < K)[None, :])
    for i_v in range((V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = o_v < V
        b_v = tl.load(
            p_v + o_t[:, None] * s_v_t + o_v[None, :] * s_v_d, mask=m_t[:, None] & m_v[None, :], other=0.0
        ).to(p_U.dtype.element_ty)
        b_U = tl.trans(product(b_Tm, b_v, tl.zeros([BT, BV], tl.float32), PRECISION))
        p_Ui = p_U + i_tile * V * BT + o_v[:, None] * BT + o_i[None, :]
        tl.store(p_Ui, b_U.to(p_U.dtype.element_ty), mask=m_v[:, None])
