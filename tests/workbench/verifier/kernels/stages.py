"""The stages of chunked KDA in plain torch, fp32 inside: right, and the text that the wrong ones are made from."""

from itertools import pairwise

import torch


def factors(q, k, g, beta):
    G = g.cumsum(-2)
    decay_to, decay_from = G.exp(), (G[..., -1:, :] - G).exp()
    between = (G[..., :, None, :] - G[..., None, :, :]).clamp(max=0.0)  # [NT, HV, C, C, K], token i from token j
    A = beta.float()[..., None] * torch.einsum("nhik,nhijk,nhjk->nhij", k.float(), between.exp(), k.float())
    return {
        "Qd": (q * decay_to).bfloat16(),
        "Kd": (k * decay_to).bfloat16(),
        "Kr": (k * decay_from).bfloat16(),
        "decay": decay_to[..., -1, :],
        "A": A.tril(-1),
    }


def solve(A, beta, Kd, v):
    Tm = torch.linalg.solve_triangular(A, torch.diag_embed(beta.float()), upper=False, unitriangular=True)
    return {"W": (Tm @ Kd.float()).bfloat16(), "U": (Tm @ v.float()).bfloat16()}


def prepare(q, k, v, g, beta):
    x = factors(q, k, g, beta)
    return {**solve(x["A"], beta, x["Kd"], v), "Qd": x["Qd"], "Kr": x["Kr"], "decay": x["decay"]}


def state(W, U, Kr, decay, initial_state, cu_chunks):
    before, Vn = torch.zeros(*decay.shape, U.shape[-1], dtype=W.dtype), torch.zeros_like(U)
    final = initial_state.clone()
    for n, (first, last) in enumerate(pairwise(cu_chunks.tolist())):
        for i in range(first, last):
            before[i] = final[n]
            new = U[i].float() - W[i].float() @ final[n]
            final[n] = decay[i][..., None] * final[n] + Kr[i].float().mT @ new
            Vn[i] = new.bfloat16()
    return {"Vn": Vn, "S": before, "final_state": final}


def output(Qd, q, k, g, Vn, S):
    G = g.cumsum(-2)
    between = (G[..., :, None, :] - G[..., None, :, :]).clamp(max=0.0)
    scores = torch.einsum("nhik,nhijk,nhjk->nhij", q.float(), between.exp(), k.float()).tril()
    return {"o": (Qd.float() @ S.float() + scores @ Vn.float()).to(q.dtype)}
