"""The three stages of chunked KDA on batches of chunks [..., C, K]: `prepare`, `state`, `output`.

    prepare   Qd = q*exp(G)   Kd = k*exp(G)   Kr = k*exp(G_C - G)   A = strict_tril(diag(beta) Kd Ki^T)
              Tm = (I + A)^-1 diag(beta)   W = Tm Kd   U = Tm v        G = inclusive cumsum of g in the chunk
    state     Vn = U - W S   S' = diag(exp(G_C)) S + Kr^T Vn
    output    o = Qd S + tril(Qd Ki^T) Vn

Source: Kimi Linear (arXiv 2510.26692), section on chunkwise parallel form. No exponent is ever a difference of
prefix sums: every decay is the sum of a segment, so unbounded gates lose nothing and resets give no NaN.

`operand` (a dtype or None) rounds what a kernel with that dtype's matrix operands would round, which makes these
functions the reference of "the same roundings". Stage names, operands and roundings are those of the triton stages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """What `prepare` hands on, per chunk."""

    W: Tensor  # [..., C, K]
    U: Tensor  # [..., C, V]
    Qd: Tensor  # [..., C, K]
    Kr: Tensor  # [..., C, K]
    decay: Tensor  # [..., K], exp(G_C)


def rounded(x: Tensor, operand: torch.dtype | None) -> Tensor:
    """`x` as a matrix operand of dtype `operand` holds it."""
    return x if operand is None else x.to(operand).to(x.dtype)


def suffix_sum(g: Tensor) -> Tensor:
    """Sum over the tokens after each one: [..., C, K] to [..., C, K], the last row 0."""
    later = g[..., 1:, :].flip(-2).cumsum(-2).flip(-2)
    return torch.cat([later, torch.zeros_like(g[..., :1, :])], dim=-2)


def decayed_scores(x: Tensor, k: Tensor, g: Tensor, operand: torch.dtype | None = None) -> Tensor:
    """Lower triangle of x_i . (k_j exp(g_{j+1} + ... + g_i)): [..., C, K] twice to [..., C, C], C a power of two.

    The chunk is halved: across the cut both factors decay towards it, so neither exceeds 1; inside, it recurs.
    """
    C = x.shape[-2]
    if C == 1:
        return (x * k).sum(-1, keepdim=True)
    (x0, x1), (k0, k1), (g0, g1) = (t.chunk(2, dim=-2) for t in (x, k, g))
    across = rounded(x1 * g1.cumsum(-2).exp(), operand) @ rounded(k0 * suffix_sum(g0).exp(), operand).mT
    first, second = (decayed_scores(*half, operand) for half in ((x0, k0, g0), (x1, k1, g1)))
    top = torch.cat([first, torch.zeros_like(across)], dim=-1)
    return torch.cat([top, torch.cat([across, second], dim=-1)], dim=-2)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    operand: torch.dtype | None = None,
    keep_Tm: bool = False,
) -> Factors:
    """Everything a chunk can compute before it knows its state. q, k, g [..., C, K], v [..., C, V], beta [..., C].

    `keep_Tm` leaves Tm unrounded: with beta near 2 an error in it is not forgotten but grows from chunk to chunk.
    """
    decay_to, decay_from = g.cumsum(-2).exp(), suffix_sum(g).exp()
    A = (beta[..., None] * decayed_scores(k, k, g, operand)).tril(-1)
    Tm = torch.linalg.solve_triangular(A, torch.diag_embed(beta), upper=False, unitriangular=True)
    Tm = Tm if keep_Tm else rounded(Tm, operand)
    W, U = Tm @ rounded(k * decay_to, operand), Tm @ rounded(v, operand)
    W, U, Qd, Kr = (rounded(x, operand) for x in (W, U, q * decay_to, k * decay_from))
    return Factors(W, U, Qd, Kr, decay_to[..., -1, :])


def state(S: Tensor, f: Factors, operand: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """One chunk of the recurrence: S [..., K, V] to (Vn [..., C, V], the next S)."""
    Vn = rounded(f.U - f.W @ rounded(S, operand), operand)
    return Vn, f.decay[..., None] * S + f.Kr.mT @ Vn


def output(
    S: Tensor, Vn: Tensor, Qd: Tensor, q: Tensor, k: Tensor, g: Tensor, operand: torch.dtype | None = None
) -> Tensor:
    """o [..., C, V] of a chunk from the state S [..., K, V] before it; q, k, g, Qd [..., C, K]."""
    return Qd @ rounded(S, operand) + rounded(decayed_scores(q, k, g, operand), operand) @ Vn
