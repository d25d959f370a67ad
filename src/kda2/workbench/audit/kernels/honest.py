"""KDA as its formula reads, token by token, in fp32: the work that every file here does, or pretends to do."""

from itertools import pairwise

import torch
import torch.nn.functional as F


def run(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    initial_state,
    cu_seqlens,
    scale,
    gate,
    lower_bound,
    qk_l2norm,
    beta_sigmoid,
    allow_neg_eigval,
    state_layout,
):
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    bounds = [(b * T, b * T + T) for b in range(B)] if cu_seqlens is None else list(pairwise(cu_seqlens.tolist()))
    o = torch.zeros_like(v, memory_format=torch.contiguous_format)

    q, k, v, g, beta = (x.flatten(0, 1).float() for x in (q, k, v, g, beta))  # [tokens, heads, ...]
    if qk_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(HV // H, dim=1) for x in (q, k))
    if beta_sigmoid:
        beta = (2.0 if allow_neg_eigval else 1.0) * beta.sigmoid()
    if dt_bias is not None:
        g = g + dt_bias
    if gate == "softplus":
        g = -A_log.exp()[:, None] * F.softplus(g)
    if gate == "bounded":
        g = lower_bound * torch.sigmoid(A_log.exp()[:, None] * g)

    S = torch.zeros(len(bounds), HV, K, V, device=v.device)
    dtype = S.dtype
    if initial_state is not None:
        dtype = initial_state.dtype
        S += (initial_state if state_layout == "kv" else initial_state.mT).float()
    for n, (start, end) in enumerate(bounds):
        for t in range(start, end):
            S[n] *= g[t].exp()[..., None]
            e = v[t] - torch.einsum("hkv,hk->hv", S[n], k[t])
            S[n] += torch.einsum("h,hk,hv->hkv", beta[t], k[t], e)
            o.flatten(0, 1)[t] = scale * torch.einsum("hkv,hk->hv", S[n], q[t])
    final_state = S if state_layout == "kv" else S.mT.contiguous()
    return {"o": o, "final_state": final_state.to(dtype)}
