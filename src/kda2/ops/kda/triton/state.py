"""Stage `state`: the recurrence over chunks."""

import triton
import triton.language as tl

from kda2.ops.kda.triton.tiles import product, sequence_bounds


@triton.jit(do_not_specialize=["T", "N", "s_first_n", "s_last_n"])
def kda_state(
    p_W, p_U, p_Kr, p_decay, p_cu, p_first, p_last, p_S,
    T: tl.int64, N: tl.int64,
    s_first_n: tl.int64, s_first_h, s_first_k, s_first_v, s_last_n: tl.int64, s_last_h, s_last_k, s_last_v,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_FIRST: tl.constexpr, STORE_LAST: tl.constexpr, IS_PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """
    Computes: chunk by chunk, Vn = U - W S and S <- diag(exp(G_C)) S + Kr^T Vn, for BV value columns of one head.
    Reads:    W, Kr [slots, HV, BT, K], U [slots, HV, V, BT], decay [slots, HV, K], the initial state.
    Writes:   Vn^T over U, the state before each chunk S^T [slots, HV, V, K], the final state.
    Grid:     N * HV * cdiv(V, BV).
    Assumes:  BK >= K. The state is kept transposed, [BV, BK], so that it and Vn feed the matrix units from registers.
    Source:   Kimi Linear (arXiv 2510.26692), chunkwise form; the stage `state` of `kda2.ops.kda.torch.stages`.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_hv = tl.program_id(0) // NV % HV
    i_n = (tl.program_id(0) // (NV * HV)).to(tl.int64)
    bos, eos = sequence_bounds(p_cu, i_n, N, T, IS_PACKED)
    NT = tl.cdiv(eos - bos, BT).to(tl.int32)
    if IS_PACKED:
        i_tile = (bos // BT + i_n) * HV + i_hv
    else:
        i_tile = i_n * NT * HV + i_hv

    o_i = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_vk = m_v[:, None] & m_k[None, :]
    b_S = tl.zeros([BV, BK], tl.float32)
    if HAS_FIRST:
        p_first += i_n * s_first_n + i_hv * s_first_h
        b_S = tl.load(p_first + o_v[:, None] * s_first_v + o_k[None, :] * s_first_k, mask=m_vk, other=0.0)
        b_S = b_S.to(tl.float32)

    p_Wi = p_W + i_tile * BT * K + o_i[:, None] * K + o_k[None, :]
    p_Kri = p_Kr + i_tile * BT * K + o_i[:, None] * K + o_k[None, :]
    p_Ui = p_U + i_tile * V * BT + o_v[:, None] * BT + o_i[None, :]
    p_Si = p_S + i_tile * V * K + o_v[:, None] * K + o_k[None, :]
    p_decayi = p_decay + i_tile * K + o_k
    for _ in range(NT):
        b_W = tl.load(p_Wi, mask=m_k[None, :], other=0.0)
        b_U = tl.load(p_Ui, mask=m_v[:, None], other=0.0)
        b_Kr = tl.load(p_Kri, mask=m_k[None, :], other=0.0)
        b_decay = tl.load(p_decayi, mask=m_k, other=0.0)
        b_Sw = b_S.to(p_W.dtype.element_ty)
        tl.store(p_Si, b_Sw, mask=m_vk)
        b_Vn = b_U.to(tl.float32) - product(b_Sw, tl.trans(b_W), tl.zeros([BV, BT], tl.float32), PRECISION)
        b_Vn = b_Vn.to(p_U.dtype.element_ty)
        tl.store(p_Ui, b_Vn, mask=m_v[:, None])
        b_S = product(b_Vn, b_Kr, b_S * b_decay[None, :], PRECISION)
        p_Wi += HV * BT * K
        p_Kri += HV * BT * K
        p_Ui += HV * V * BT
        p_Si += HV * V * K
        p_decayi += HV * K
    if STORE_LAST:
        p_last += i_n * s_last_n + i_hv * s_last_h
        p_lasti = p_last + o_v[:, None] * s_last_v + o_k[None, :] * s_last_k
        tl.store(p_lasti, b_S.to(p_last.dtype.element_ty), mask=m_vk)
