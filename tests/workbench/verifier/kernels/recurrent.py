"""KDA as a recurrent Triton kernel, one program a sequence and value head, options in torch: right."""

import torch
import triton
import triton.language as tl


@triton.jit
def kda_recurrent(
    q, k, v, g, beta, state, o, offsets, scale, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    i_n, i_h = tl.program_id(0) // HV, tl.program_id(0) % HV
    o_k, o_v = tl.arange(0, K), tl.arange(0, V)
    p_state = state + ((i_n * HV + i_h) * K + o_k[:, None]) * V + o_v[None, :]
    b_S = tl.load(p_state)  # [K, V]
    start, end = tl.load(offsets + i_n), tl.load(offsets + i_n + 1)
    for t in range(start, end):
        row = t * HV + i_h
        b_q, b_k = tl.load(q + row * K + o_k), tl.load(k + row * K + o_k)
        b_S = b_S * tl.exp(tl.load(g + row * K + o_k))[:, None]
        b_e = tl.load(v + row * V + o_v) - tl.sum(b_S * b_k[:, None], 0)
        b_S += tl.load(beta + row) * b_k[:, None] * b_e[None, :]
        tl.store(o + row * V + o_v, scale * tl.sum(b_S * b_q[:, None], 0))
    tl.store(p_state, b_S)


def run(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,
    scale, gate, lower_bound, qk_l2norm, beta_sigmoid, allow_neg_eigval, state_layout,
):  # fmt: skip
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    if cu_seqlens is None:
        cu_seqlens = torch.arange(B + 1, device=q.device) * T
    wide = (x.float() for x in (q, k, v, g, beta))
    q, k, v32, g, beta = wide
    if qk_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(HV // H, 2).contiguous() for x in (q, k))
    if beta_sigmoid:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    if gate != "log":
        g = g if dt_bias is None else g + dt_bias
        rate = A_log.exp()[:, None]
        g = -rate * torch.nn.functional.softplus(g) if gate == "softplus" else lower_bound * (rate * g).sigmoid()
    N = len(cu_seqlens) - 1
    state = torch.zeros(N, HV, K, V, device=q.device)
    if initial_state is not None:
        state += (initial_state if state_layout == "kv" else initial_state.mT).float()
    o = torch.zeros_like(v32, memory_format=torch.contiguous_format)
    inputs = (x.contiguous() for x in (q, k, v32, g, beta))
    kda_recurrent[(N * HV,)](*inputs, state, o, cu_seqlens, scale, HV, K, V, num_warps=4)
    dtype = torch.float32 if initial_state is None else initial_state.dtype
    return {"o": o.to(v.dtype), "final_state": (state if state_layout == "kv" else state.mT).to(dtype)}
