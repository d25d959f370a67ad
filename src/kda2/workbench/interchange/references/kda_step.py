"""One token of Kimi Delta Attention for each row, with the options that released models use: q and k are divided by
sqrt(sum x^2 + 1e-6), beta is a logit, and the log decay is -5 * sigmoid(exp(A_log) * (g + dt_bias)).

For each row and value head, with state S [K, V]:

    S <- diag(exp(g)) S;  e = v - S^T k;  S <- S + beta k e^T;  o = scale * S^T q

Source: Kimi Linear, arXiv 2510.26692. In fp64.
"""

import torch

LOWER_BOUND = -5.0
L2NORM_EPS = 1e-6


@torch.no_grad()
def run(
    q: torch.Tensor,  # [B, H, K]
    k: torch.Tensor,  # [B, H, K]
    v: torch.Tensor,  # [B, HV, V]; value head h reads q and k of head h // (HV / H)
    g: torch.Tensor,  # [B, HV, K]
    beta: torch.Tensor,  # [B, HV]
    A_log: torch.Tensor,  # [HV]
    dt_bias: torch.Tensor,  # [HV, K]
    state: torch.Tensor,  # [slots, HV, K, V], slots = B: row b has slot b
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, state_dtype, HV = v.dtype, state.dtype, v.shape[1]
    q, k, v, g, beta, A_log, dt_bias, S = (x.double() for x in (q, k, v, g, beta, A_log, dt_bias, state))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(HV // x.shape[1], dim=1) for x in (q, k))
    decay = torch.exp(LOWER_BOUND * torch.sigmoid(A_log.exp()[:, None] * (g + dt_bias)))
    S = decay[..., None] * S
    error = v - torch.einsum("bhkv,bhk->bhv", S, k)
    S = S + torch.einsum("bh,bhk,bhv->bhkv", torch.sigmoid(beta), k, error)
    o = scale * torch.einsum("bhkv,bhk->bhv", S, q)
    return o.to(dtype), S.to(state_dtype)
