"""Stage `output`: reads the queries' answers from each chunk's state."""

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
)


# What T or the packing may change is not specialised on; ALIGN says what the loads may rely on instead.
@triton.jit(
    do_not_specialize=["T", "N", *(f"s_{x}_{axis}" for x in ("q", "k", "g") for axis in "bh"), "s_o_b", "s_o_h"]
)
def kda_output(
    p_q, p_k, p_g, p_A_log, p_dt_bias, p_cu, p_Qd, p_Vn, p_S, p_o,
    scale, lower_bound,
    T: tl.int64, N: tl.int64,
    s_q_b: tl.int64, s_q_t, s_q_h: tl.int64, s_q_d, s_k_b: tl.int64, s_k_t, s_k_h: tl.int64, s_k_d,
    s_g_b: tl.int64, s_g_t, s_g_h: tl.int64, s_g_d, s_A, s_dt_h, s_dt_d, s_o_b: tl.int64, s_o_t, s_o_h: tl.int64, s_o_d,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, ALIGN: tl.constexpr,
    GATE: tl.constexpr, HAS_BIAS: tl.constexpr, USE_L2NORM: tl.constexpr,
    IS_PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """
    Computes: o = scale (Qd S + tril(Qd Ki^T) Vn) for one chunk, head and BV value columns, options applied; 0 for
              tokens that no sequence owns.
    Reads:    q, k [B, T, H, K], g [B, T, HV, K], A_log [HV], dt_bias [HV, K], Qd [slots, HV, BT, K],
              Vn^T [slots, HV, V, BT], the state before the chunk S^T [slots, HV, V, K].
    Writes:   o [B, T, HV, V].
    Grid:     slots * HV * cdiv(V, BV).
    Assumes:  batch and head strides of q, k, g, o are multiples of ALIGN; BC > 1 only where the gate is bounded below
              by -5. Scores take BK channels at a time, the state BS. Rows past a sequence's end count as zeros.
    Source:   Kimi Linear (arXiv 2510.26692), chunkwise form; the stage `output` of `kda2.ops.kda.torch.stages`.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_hv = tl.program_id(0) // NV % HV
    i_slot = (tl.program_id(0) // (NV * HV)).to(tl.int64)
    i_n, bos, eos, first_slot = sequence_of_slot(p_cu, i_slot, N, T, BT, IS_PACKED)
    t0 = bos + (i_slot - first_slot) * BT
    if (t0 < bos) | (t0 >= eos):
        return
    i_b = tl.where(IS_PACKED, 0, i_n)
    i_tile = i_slot * HV + i_hv
    o_i = tl.arange(0, BT)
    o_t = t0 + o_i
    m_t = o_t < eos
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    b_o = tl.zeros([BT, BV], tl.float32)
    if i_n < N:
        p_q += aligned(i_b * s_q_b + (i_hv // (HV // H)) * s_q_h, ALIGN)
        p_k += aligned(i_b * s_k_b + (i_hv // (HV // H)) * s_k_h, ALIGN)
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

        b_scores = tl.zeros([BT, BT], tl.float32)
        for i_k in range((K + BK - 1) // BK):
            b_q = load_rows(p_q, o_t, m_t, i_k, s_q_t, s_q_d, K, BK) * b_qnorm[:, None]
            b_k = load_rows(p_k, o_t, m_t, i_k, s_k_t, s_k_d, K, BK) * b_knorm[:, None]
            b_g = load_log2_decay(
                p_g, p_dt_bias, o_t, m_t, i_k, a, lower_bound, s_g_t, s_g_d, s_dt_d, K, BK, GATE, HAS_BIAS
            )
            # what a token reads of itself may be all that is left, so it is not rounded to matrix operands
            b_scores += tl.where(o_i[:, None] == o_i[None, :], tl.sum(b_q * b_k, 1)[:, None], 0.0)
            b_scores = add_decayed_scores(b_q, b_k, b_g, b_scores, BT, BC, PRECISION)
        b_Vn = tl.load(p_Vn + i_tile * V * BT + o_v[:, None] * BT + o_i[None, :], mask=m_v[:, None], other=0.0)
        b_o = product(b_scores, tl.trans(b_Vn), b_o, PRECISION)
        for i_k in range((K + BS - 1) // BS):
            o_k = i_k * BS + tl.arange(0, BS)
            m_k = (o_k < K) | (K % BS == 0)
            b_Qd = tl.load(p_Qd + i_tile * BT * K + o_i[:, None] * K + o_k[None, :], mask=m_k[None, :], other=0.0)
            p_Si = p_S + i_tile * V * K + o_v[:, None] * K + o_k[None, :]
            b_S = tl.load(p_Si, mask=m_v[:, None] & m_k[None, :], other=0.0)
            b_o = product(b_Qd, tl.trans(b_S), b_o, PRECISION)
    p_oi = p_o + aligned(i_b * s_o_b + i_hv * s_o_h, ALIGN) + o_t[:, None] * s_o_t + o_v[None, :] * s_o_d
    tl.store(p_oi, b_o.to(p_o.dtype.element_ty), mask=m_t[:, None] & m_v[None, :])
