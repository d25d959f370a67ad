"""Stage `prepare`: what a chunk's keys, values and gates give before it knows its state."""

import triton
import triton.language as tl

from kda2.ops.kda.triton.tiles import (
    LOG2E,
    add_decayed_scores,
    aligned,
    inverse_norms,
    load_log2_decay,
    load_rows,
    product,
    sequence_of_slot,
    sum_tokens,
    unit_lower_inverse,
)


# What T or the packing may change is not specialised on; ALIGN says what the loads may rely on instead.
@triton.jit(do_not_specialize=["T", "N", *(f"s_{x}_{axis}" for x in ("q", "k", "v", "g", "beta") for axis in "bh")])
def kda_prepare(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_cu,
    p_W, p_U, p_Qd, p_Kr, p_decay,
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
    Computes: W = Tm Kd, U = Tm v, Qd, Kr and exp(G_C) of one chunk and value head; options applied.
    Reads:    q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K], beta [B, T, HV], A_log [HV], dt_bias [HV, K].
    Writes:   W, Qd, Kr [slots, HV, BT, K], U^T [slots, HV, V, BT], decay [slots, HV, K].
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
    i_b = tl.where(IS_PACKED, 0, i_n)
    i_tile = i_slot * HV + i_hv
    o_i = tl.arange(0, BT)
    o_t = t0 + o_i
    m_t = o_t < eos
    p_q += aligned(i_b * s_q_b + (i_hv // (HV // H)) * s_q_h, ALIGN)
    p_k += aligned(i_b * s_k_b + (i_hv // (HV // H)) * s_k_h, ALIGN)
    p_v += aligned(i_b * s_v_b + i_hv * s_v_h, ALIGN)
    p_g += aligned(i_b * s_g_b + i_hv * s_g_h, ALIGN)
    a = 0.0
    if GATE != "log":
        a = tl.exp2(tl.load(p_A_log + i_hv * s_A) * LOG2E)
    if HAS_BIAS:
        p_dt_bias += i_hv * s_dt_h
    b_qnorm = tl.full([BT], 1.0, tl.float32) * scale
    b_knorm = tl.full([BT], 1.0, tl.float32)
    if USE_L2NORM:
        b_qnorm *= inverse_norms(p_q, o_t, m_t, s_q_t, s_q_d, K, BT, BK)
        b_knorm = inverse_norms(p_k, o_t, m_t, s_k_t, s_k_d, K, BT, BK)

    b_A = tl.zeros([BT, BT], tl.float32)
    to_here = o_i[:, None] >= o_i[None, :]
    for i_k in range((K + BK - 1) // BK):
        b_k = load_rows(p_k, o_t, m_t, i_k, s_k_t, s_k_d, K, BK) * b_knorm[:, None]
        b_g = load_log2_decay(
            p_g, p_dt_bias, o_t, m_t, i_k, a, lower_bound, s_g_t, s_g_d, s_dt_d, K, BK, GATE, HAS_BIAS
        )
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = (o_k < K) | (K % BK == 0)
        o_out = i_tile * BT * K + o_i[:, None] * K + o_k[None, :]
        b_decay = tl.exp2(sum_tokens(to_here, to_here, b_g, PRECISION))
        b_q = load_rows(p_q, o_t, m_t, i_k, s_q_t, s_q_d, K, BK) * b_qnorm[:, None]
        tl.store(p_Qd + o_out, (b_q * b_decay).to(p_Qd.dtype.element_ty), mask=m_k[None, :])
        tl.store(p_W + o_out, (b_k * b_decay).to(p_W.dtype.element_ty), mask=m_k[None, :])
        b_Kr = b_k * tl.exp2(sum_tokens(~to_here, ~to_here, b_g, PRECISION))
        tl.store(p_Kr + o_out, b_Kr.to(p_Kr.dtype.element_ty), mask=m_k[None, :])
        tl.store(p_decay + i_tile * K + o_k, tl.exp2(tl.sum(b_g, 0)), mask=m_k)
        b_A = add_decayed_scores(b_k, b_k, b_g, b_A, BT, BC, PRECISION)

    b_beta = tl.load(p_beta + i_b * s_beta_b + o_t * s_beta_t + i_hv * s_beta_h, mask=m_t, other=0.0).to(tl.float32)
    if USE_SIGMOID:
        b_beta = tl.where(m_t, beta_scale / (1.0 + tl.exp2(b_beta * -LOG2E)), 0.0)
    b_A = tl.where(o_i[:, None] > o_i[None, :], b_beta[:, None] * b_A, 0.0)
    b_Tm = (unit_lower_inverse(b_A, BT, PRECISION) * b_beta[None, :]).to(p_W.dtype.element_ty)

    for i_v in range((V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_v = load_rows(p_v, o_t, m_t, i_v, s_v_t, s_v_d, V, BV).to(p_U.dtype.element_ty)
        b_U = tl.trans(product(b_Tm, b_v, tl.zeros([BT, BV], tl.float32), PRECISION))
        p_Ui = p_U + i_tile * V * BT + o_v[:, None] * BT + o_i[None, :]
        tl.store(p_Ui, b_U.to(p_U.dtype.element_ty), mask=(o_v < V)[:, None])
    # W has held Kd: what other threads of this program wrote is read, then overwritten
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        p_Wi = p_W + i_tile * BT * K + o_i[:, None] * K + o_k[None, :]
        tl.debug_barrier()
        b_Kd = tl.load(p_Wi, mask=(o_k < K)[None, :], other=0.0)
        tl.debug_barrier()
        b_W = product(b_Tm, b_Kd, tl.zeros([BT, BK], tl.float32), PRECISION)
        tl.store(p_Wi, b_W.to(p_W.dtype.element_ty), mask=(o_k < K)[None, :])
