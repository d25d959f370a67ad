"""Kimi Delta Attention token by token in Triton: a whole kernel file, to be judged with

    kda2 verify examples/kernels/recurrent_triton.py

docs/kernels.md says what `run` is given and what it must return. Nothing is kept between calls.
"""

import torch
import triton
import triton.language as tl

# The state's elements that a program holds: 32 registers a thread with 4 warps.
STATE_ELEMENTS = 4096


@triton.jit
def log_decay(b_g, a, b_bias, lower_bound, GATE: tl.constexpr):
    """The natural log decay of the gate's input, at most 0. `a` is exp(A_log)."""
    if GATE == "log":
        return b_g
    b_g += b_bias
    if GATE == "bounded":
        return lower_bound / (1.0 + tl.exp(-a * b_g))
    e = tl.exp(-tl.abs(b_g))
    # log(1 + e) loses small e; its series does not
    b_log1p = tl.where(e < 1e-3, e * (1.0 - 0.5 * e), tl.log(1.0 + e))
    return -a * (tl.where(b_g > 0, b_g, 0.0) + b_log1p)


@triton.jit
def kda_recurrent(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_first, p_cu, p_o, p_last,
    T, s_S_k, s_S_v, scale, lower_bound, beta_scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FIRST: tl.constexpr, IS_PACKED: tl.constexpr,
    USE_L2NORM: tl.constexpr, USE_SIGMOID: tl.constexpr,
):  # fmt: skip
    """
    Computes: for each token S <- diag(exp(g)) S; S <- S + beta k (v - S^T k)^T; o = scale S^T q, options applied.
    Reads:    q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K], beta [B, T, HV], A_log [HV], dt_bias [HV, K],
              first [N, HV, K, V] in strides s_S_k, s_S_v, cu [N + 1].
    Writes:   o [B, T, HV, V], last [N, HV, K, V].
    Grid:     (N * HV, cdiv(V, BV)).
    Assumes:  all contiguous but for the states' last two axes; BK >= K.
    Source:   Kimi Linear (arXiv 2510.26692).
    """
    i_n, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, BK)
    o_v = tl.program_id(1) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V

    # 64-bit from here on: products with sizes pass 2^31
    bos = i_n.to(tl.int64) * T
    eos = bos + T
    if IS_PACKED:
        bos = tl.load(p_cu + i_n).to(tl.int64)
        eos = tl.load(p_cu + i_n + 1).to(tl.int64)
    o_S = tl.program_id(0).to(tl.int64) * K * V + o_v[:, None] * s_S_v + o_k[None, :] * s_S_k
    m_S = m_v[:, None] & m_k[None, :]

    a = 0.0
    if GATE != "log":
        a = tl.exp(tl.load(p_A_log + i_hv))
    b_bias = tl.zeros([BK], tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(p_dt_bias + i_hv * K + o_k, mask=m_k, other=0.0)
    b_S = tl.zeros([BV, BK], tl.float32)  # S^T
    if HAS_FIRST:
        b_S = tl.load(p_first + o_S, mask=m_S, other=0.0).to(tl.float32)

    for t in range(bos, eos):
        i_qk = t * H + i_h  # row of q and k
        i_row = t * HV + i_hv  # row of v, g, beta and o
        b_q = tl.load(p_q + i_qk * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + i_qk * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_g = tl.load(p_g + i_row * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(p_v + i_row * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        beta = tl.load(p_beta + i_row).to(tl.float32)
        if USE_L2NORM:
            b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6)
            b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
        if USE_SIGMOID:
            beta = beta_scale / (1.0 + tl.exp(-beta))
        b_S *= tl.exp(log_decay(b_g, a, b_bias, lower_bound, GATE))[None, :]
        b_e = b_v - tl.sum(b_S * b_k[None, :], 1)
        b_S += (beta * b_e)[:, None] * b_k[None, :]
        b_o = scale * tl.sum(b_S * b_q[None, :], 1)
        tl.store(p_o + i_row * V + o_v, b_o.to(p_o.dtype.element_ty), mask=m_v)

    tl.store(p_last + o_S, b_S.to(p_last.dtype.element_ty), mask=m_S)


def run(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,
    scale, gate, lower_bound, qk_l2norm, beta_sigmoid, allow_neg_eigval, state_layout,
):  # fmt: skip
    """{"o": [B, T, HV, V] of v's dtype, "final_state": in `state_layout`, of initial_state's dtype or fp32}."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    first = None if initial_state is None else initial_state.contiguous()
    # tokens past the last offset belong to no sequence: their o is 0, and no program writes it
    o = torch.empty_like(v) if cu_seqlens is None else torch.zeros_like(v)
    shape = (N, HV, K, V) if state_layout == "kv" else (N, HV, V, K)
    last = torch.empty(shape, dtype=torch.float32 if first is None else first.dtype, device=v.device)
    s_S_k, s_S_v = (V, 1) if state_layout == "kv" else (1, K)
    BK = triton.next_power_of_2(K)
    BV = min(triton.next_power_of_2(V), STATE_ELEMENTS // BK)
    kda_recurrent[(N * HV, triton.cdiv(V, BV))](
        q, k, v, g, beta, A_log, dt_bias, first, cu_seqlens, o, last,
        T, s_S_k, s_S_v, scale, lower_bound or 0.0, 2.0 if allow_neg_eigval else 1.0,
        H=H, HV=HV, K=K, V=V, BK=BK, BV=BV,
        GATE=gate, HAS_BIAS=dt_bias is not None, HAS_FIRST=first is not None, IS_PACKED=cu_seqlens is not None,
        USE_L2NORM=qk_l2norm, USE_SIGMOID=beta_sigmoid,
    )  # fmt: skip
    return {"o": o, "final_state": last}
