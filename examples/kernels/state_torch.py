"""The stage `state` of chunked Kimi Delta Attention in plain torch: a stage kernel, to be judged with

    kda2 verify examples/kernels/state_torch.py --stage state

It is one chunk after the other, so the chunks of a sequence are a loop; heads are a batch.
"""

from itertools import pairwise

import torch


def run(W, U, Kr, decay, initial_state, cu_chunks):
    """
    Computes: Vn = U - W S, then S <- diag(decay) S + Kr^T Vn, chunk by chunk.
    Reads:    W, Kr [NT, HV, C, K], U [NT, HV, C, V], decay [NT, HV, K], initial_state [N, HV, K, V],
              cu_chunks [N + 1], the chunks that each sequence owns.
    Returns:  Vn [NT, HV, C, V] of U's dtype; S [NT, HV, K, V], the state before each chunk, of W's dtype;
              final_state [N, HV, K, V], fp32.
    """
    Vn = torch.empty_like(U)
    S = torch.empty(*decay.shape, U.shape[-1], dtype=W.dtype, device=U.device)
    final_state = initial_state.clone()
    for n, (first, last) in enumerate(pairwise(cu_chunks.tolist())):
        for i in range(first, last):
            b_S = final_state[n]
            b_Vn = U[i].float() - W[i].float() @ b_S
            S[i], Vn[i] = b_S, b_Vn
            final_state[n] = decay[i, ..., None] * b_S + Kr[i].float().mT @ b_Vn
    return {"Vn": Vn, "S": S, "final_state": final_state}
