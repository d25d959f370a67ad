"""Stage `step`: one token a sequence, in one launch."""

import triton
import triton.language as tl

from kda2.ops.kda.triton.tiles import LOG2E, log2_decay


@triton.jit(do_not_specialize=["slots", "pad_slot"])
def kda_step(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_index, p_state, p_new, p_o,
    scale, lower_bound, beta_scale,
    slots: tl.int64, pad_slot: tl.int64,
    s_q_b, s_q_h, s_q_d, s_k_b, s_k_h, s_k_d, s_v_b, s_v_h, s_v_d, s_g_b, s_g_h, s_g_d, s_beta_b, s_beta_h,
    s_A, s_dt_h, s_dt_d, s_index, s_state_n, s_state_h, s_state_k, s_state_v,
    s_new_n, s_new_h, s_new_k, s_new_v, s_o_b, s_o_h, s_o_d,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INDEX: tl.constexpr, USE_L2NORM: tl.constexpr,
    USE_SIGMOID: tl.constexpr,
):  # fmt: skip
    """
    Computes: S <- diag(exp(g)) S; S <- S + beta k (v - S^T k)^T; o = scale S^T q, options applied.
    Reads:    q, k [B, H, K], v [B, HV, V], g [B, HV, K], beta [B, HV], A_log [HV], dt_bias [HV, K], index [B],
              state [slots, HV, K, V].
    Writes:   the row's slot of `new` (which may be `state`), o [B, HV, V]; o = 0 and no state for padded rows.
    Grid:     B * HV * cdiv(V, BV).
    Assumes:  no slot is named twice; BK >= K.
    Source:   Kimi Linear (arXiv 2510.26692).
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_hv = tl.program_id(0) // NV % HV
    i_b = (tl.program_id(0) // (NV * HV)).to(tl.int64)
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    p_oi = p_o + i_b * s_o_b + i_hv * s_o_h + o_v * s_o_d
    i_slot = i_b
    if HAS_INDEX:
        i_slot = tl.load(p_index + i_b * s_index).to(tl.int64)
        if (i_slot == pad_slot) | (i_slot < 0) | (i_slot >= slots):
            tl.store(p_oi, tl.zeros([BV], p_o.dtype.element_ty), mask=m_v)
            return
    m_vk = m_v[:, None] & m_k[None, :]
    p_si = p_state + i_slot * s_state_n + i_hv * s_state_h
    b_S = tl.load(p_si + o_v[:, None] * s_state_v + o_k[None, :] * s_state_k, mask=m_vk, other=0.0).to(tl.float32)
    b_q = tl.load(p_q + i_b * s_q_b + i_h * s_q_h + o_k * s_q_d, mask=m_k, other=0.0).to(tl.float32)
    b_k = tl.load(p_k + i_b * s_k_b + i_h * s_k_h + o_k * s_k_d, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + i_b * s_v_b + i_hv * s_v_h + o_v * s_v_d, mask=m_v, other=0.0).to(tl.float32)
    b_g = tl.load(p_g + i_b * s_g_b + i_hv * s_g_h + o_k * s_g_d, mask=m_k, other=0.0).to(tl.float32)
    beta = tl.load(p_beta + i_b * s_beta_b + i_hv * s_beta_h).to(tl.float32)
    a = 0.0
    b_bias = tl.zeros([BK], tl.float32)
    if GATE != "log":
        a = tl.exp2(tl.load(p_A_log + i_hv * s_A) * LOG2E)
    if HAS_BIAS:
        b_bias = tl.load(p_dt_bias + i_hv * s_dt_h + o_k * s_dt_d, mask=m_k, other=0.0)
    if USE_SIGMOID:
        beta = beta_scale / (1.0 + tl.exp2(beta * -LOG2E))
    if USE_L2NORM:
        b_q = b_q * tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6)
        b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
    b_S = b_S * tl.exp2(log2_decay(b_g, a, b_bias, lower_bound, GATE))[None, :]
    b_e = b_v - tl.sum(b_S * b_k[None, :], 1)
    b_S = b_S + (beta * b_e)[:, None] * b_k[None, :]
    tl.store(p_oi, (scale * tl.sum(b_S * b_q[None, :], 1)).to(p_o.dtype.element_ty), mask=m_v)
    p_ni = p_new + i_slot * s_new_n + i_hv * s_new_h
    tl.store(p_ni + o_v[:, None] * s_new_v + o_k[None, :] * s_new_k, b_S.to(p_new.dtype.element_ty), mask=m_vk)
