"""KDA in plain torch, one token after another: right, and the text that the wrong ones are made from."""

from itertools import pairwise

import torch


def run(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,
    scale, gate, lower_bound, qk_l2norm, beta_sigmoid, allow_neg_eigval, state_layout,
):  # fmt: skip
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    o = torch.zeros(B, T, HV, V)
    q, k, v32, g, beta = (x.float() for x in (q, k, v, g, beta))
    if qk_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    if beta_sigmoid:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    if gate != "log":
        g = g if dt_bias is None else g + dt_bias
        rate = A_log.exp()[:, None]
        g = -rate * torch.nn.functional.softplus(g) if gate == "softplus" else lower_bound * (rate * g).sigmoid()
    offsets = None if cu_seqlens is None else cu_seqlens.tolist()
    rows = [(b, 0, T) for b in range(B)] if offsets is None else [(0, *x) for x in pairwise(offsets)]
    states = torch.zeros(len(rows), HV, K, V)
    if initial_state is not None:
        states += (initial_state if state_layout == "kv" else initial_state.mT).float()
    for n, (b, start, end) in enumerate(rows):
        S = states[n].clone()
        for t in range(start, end):
            S = S * g[b, t].exp()[..., None]
            e = v32[b, t] - (S * k[b, t][..., None]).sum(1)
            S = S + beta[b, t][:, None, None] * k[b, t][..., None] * e[:, None]
            o[b, t] = scale * (S * q[b, t][..., None]).sum(1)
        states[n] = S
    dtype = torch.float32 if initial_state is None else initial_state.dtype
    return {"o": o.to(v.dtype), "final_state": (states if state_layout == "kv" else states.mT).to(dtype)}
