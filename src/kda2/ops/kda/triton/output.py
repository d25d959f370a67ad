"""Stage `output`: reads the query's answer from each chunk's state."""

import triton
import triton.language as tl

from kda2.ops.kda.triton.tiles import product, sequence_of_slot


@triton.jit(do_not_specialize=["T", "N", "s_o_b"])
def kda_output(
    p_Qd, p_Aqk, p_Vn, p_S, p_cu, p_o,
    T: tl.int64, N: tl.int64, s_o_b: tl.int64, s_o_t, s_o_h, s_o_d,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    IS_PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """
    Computes: o = Qd S + Aqk Vn for one chunk, head and BV value columns; 0 for tokens that no sequence owns.
    Reads:    Qd [slots, HV, BT, K], Aqk [slots, HV, BT, BT], Vn^T [slots, HV, V, BT], S^T [slots, HV, V, K].
    Writes:   o [B, T, HV, V].
    Grid:     slots * HV * cdiv(V, BV).
    Assumes:  Qd carries the scale.
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
    o_i = tl.arange(0, BT)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    p_oi = p_o + i_b * s_o_b + i_hv * s_o_h + (t0 + o_i)[:, None] * s_o_t + o_v[None, :] * s_o_d
    m_o = (t0 + o_i < eos)[:, None] & m_v[None, :]
    b_o = tl.zeros([BT, BV], tl.float32)
    if i_n < N:
        i_tile = i_slot * HV + i_hv
        for i_k in tl.static_range((K + BK - 1) // BK):
            o_k = i_k * BK + tl.arange(0, BK)
            m_k = o_k < K
            b_Qd = tl.load(p_Qd + i_tile * BT * K + o_i[:, None] * K + o_k[None, :], mask=m_k[None, :], other=0.0)
            b_S = tl.load(
                p_S + i_tile * V * K + o_v[:, None] * K + o_k[None, :], mask=m_v[:, None] & m_k[None, :], other=0.0
            )
            b_o = product(b_Qd, tl.trans(b_S), b_o, PRECISION)
        b_Aqk = tl.load(p_Aqk + i_tile * BT * BT + o_i[:, None] * BT + o_i[None, :])
        b_Vn = tl.load(p_Vn + i_tile * V * BT + o_v[:, None] * BT + o_i[None, :], mask=m_v[:, None], other=0.0)
        b_o = product(b_Aqk, tl.trans(b_Vn), b_o, PRECISION)
    tl.store(p_oi, b_o.to(p_o.dtype.element_ty), mask=m_o)
