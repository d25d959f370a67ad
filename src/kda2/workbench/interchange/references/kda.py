"""Kimi Delta Attention over packed sequences, with the options that released models use: q and k are divided by
sqrt(sum x^2 + 1e-6), beta is a logit, and the log decay is -5 * sigmoid(exp(A_log) * (g + dt_bias)).

For each sequence and value head, with state S [K, V]:

    S <- diag(exp(g_t)) S;  e = v_t - S^T k_t;  S <- S + beta_t k_t e^T;  o_t = scale * S^T q_t

Source: Kimi Linear, arXiv 2510.26692. One token at a time, in fp64.
"""

import torch

LOWER_BOUND = -5.0
L2NORM_EPS = 1e-6


@torch.no_grad()
def run(
    q: torch.Tensor,  # [B, T, H, K], B = 1
    k: torch.Tensor,  # [B, T, H, K]
    v: torch.Tensor,  # [B, T, HV, V]; value head h reads q and k of head h // (HV / H)
    g: torch.Tensor,  # [B, T, HV, K]
    beta: torch.Tensor,  # [B, T, HV]
    A_log: torch.Tensor,  # [HV]
    dt_bias: torch.Tensor,  # [HV, K]
    cu_seqlens: torch.Tensor,  # [N + 1]
    scale: float,
    initial_state: torch.Tensor | None = None,  # [N, HV, K, V]
) -> tuple[torch.Tensor, torch.Tensor]:
    state_dtype = torch.float32 if initial_state is None else initial_state.dtype
    HV, K, V, o = v.shape[2], k.shape[3], v.shape[3], torch.zeros_like(v)
    q, k, v, g, beta, A_log, dt_bias = (x.double() for x in (q, k, v, g, beta, A_log, dt_bias))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(HV // x.shape[2], dim=2) for x in (q, k))
    decay = torch.exp(LOWER_BOUND * torch.sigmoid(A_log.exp()[:, None] * (g + dt_bias)))
    beta = torch.sigmoid(beta)
    offsets, states = cu_seqlens.tolist(), []
    for n in range(len(offsets) - 1):
        S = v.new_zeros(HV, K, V) if initial_state is None else initial_state[n].double()
        for t in range(offsets[n], offsets[n + 1]):
            S = decay[0, t, :, :, None] * S
            error = v[0, t] - torch.einsum("hkv,hk->hv", S, k[0, t])
            S = S + torch.einsum("h,hk,hv->hkv", beta[0, t], k[0, t], error)
            o[0, t] = scale * torch.einsum("hkv,hk->hv", S, q[0, t])
        states.append(S)
    return o, torch.stack(states).to(state_dtype)
