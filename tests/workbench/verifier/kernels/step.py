"""One token of KDA for each row in plain torch, into a new pool of states: right, and the text that the wrong ones are
made from."""

import torch


def run(
    q, k, v, g, beta, A_log, dt_bias, state, state_indices,
    scale, gate, lower_bound, qk_l2norm, beta_sigmoid, allow_neg_eigval, state_layout, pad_slot,
):  # fmt: skip
    B, HV, V = v.shape
    q, k, v32, g, beta = (x.float() for x in (q, k, v, g, beta))
    if qk_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(HV // x.shape[1], 1) for x in (q, k))
    if beta_sigmoid:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    if gate != "log":
        g = g if dt_bias is None else g + dt_bias
        rate = A_log.exp()[:, None]
        g = -rate * torch.nn.functional.softplus(g) if gate == "softplus" else lower_bound * (rate * g).sigmoid()
    slots = range(B) if state_indices is None else state_indices.tolist()
    states, o = state.clone(), torch.zeros(B, HV, V)
    for b, slot in enumerate(slots):
        if slot == pad_slot:
            continue
        S = (state[slot] if state_layout == "kv" else state[slot].mT).float()
        S = S * g[b].exp()[..., None]
        e = v32[b] - (S * k[b][..., None]).sum(1)
        S = S + beta[b][:, None, None] * k[b][..., None] * e[:, None]
        o[b] = scale * (S * q[b][..., None]).sum(1)
        states[slot] = (S if state_layout == "kv" else S.mT).to(state.dtype)
    return {"o": o.to(v.dtype), "state": states}
