"""Where the error of a 32-token chunk comes from: stage `fused` emulated on the CPU, rounding by rounding.

`python rounding.py` prints the relative errors of o and of the final state against the fp64 recurrence, T = 512, H = 4.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

C, T, H, K, V = 32, 512, 4, 128, 128


@dataclass(frozen=True)
class Rounding:
    """`raw_scores`: the diagonal of Aqk from q . k as it came; `exact_T`, `exact_o`: those of Tm and Aqk applied in
    fp32; `pairs`: factors as products of bf16 pairs; `terms`: bf16 terms of Tm, e and Vn."""

    raw_scores: bool = True
    exact_T: bool = True
    exact_o: bool = False
    pairs: bool = True
    terms: int = 1


def bf16(x: Tensor, terms: int = 1) -> Tensor:
    total = torch.zeros_like(x)
    for _ in range(terms):
        total = total + (x - total).bfloat16().float()
    return total


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, S = (x.double() for x in (q, k, v, g, beta, S))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    outputs = []
    for t in range(T):
        S = g[t].exp()[..., None] * S
        e = v[t] - torch.einsum("hkv,hk->hv", S, k[t])
        S = S + beta[t][:, None, None] * k[t][..., None] * e[:, None]
        outputs.append(K**-0.5 * torch.einsum("hkv,hk->hv", S, q[t]))
    return torch.stack(outputs), S


def fused(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, r: Rounding) -> tuple[Tensor, Tensor]:
    i = torch.arange(C)
    diagonal, below = i[:, None] == i[None, :], i[:, None] > i[None, :]
    zero = torch.zeros(())
    outputs = []
    for t in range(0, T, C):
        qc, kc, vc, gc = (x[t : t + C].transpose(0, 1) for x in (q, k, v, g))
        b = beta[t : t + C].T
        nq, nk = (torch.rsqrt(x.square().sum(-1) + 1e-6) for x in (qc, kc))
        prefix = gc.cumsum(1)
        middle = prefix[:, C // 2 - 1 : C // 2]
        L, R = (prefix - middle).exp(), (middle - prefix).exp()
        if r.pairs:
            L, R = bf16(L), bf16(R)
        KL, QL, KR = bf16(kc * L), bf16(qc * L), bf16(kc * R)
        S = S * middle.transpose(1, 2).exp()
        A = torch.where(below, KL @ KR.mT * (b * nk)[..., None] * nk[:, None], zero)
        Aqk = torch.where(below | diagonal, QL @ KR.mT, zero)
        own = (qc * kc).sum(-1)
        if r.raw_scores:
            Aqk = torch.where(diagonal, own[..., None], Aqk)
        if r.exact_o:
            Aqk = torch.where(diagonal, zero, Aqk)
        eye = torch.eye(C).expand(A.shape)
        Tm = torch.linalg.solve_triangular(eye + A, eye, upper=False) * b[:, None] * nk[..., None]
        Tm = bf16(torch.where(diagonal, zero, Tm) if r.exact_T else Tm, r.terms)
        e = vc - nk[..., None] * (KL @ bf16(S))
        Vn = Tm @ bf16(e, r.terms) + ((b * nk)[..., None] * e if r.exact_T else 0)
        o = QL @ bf16(S) + bf16(Aqk) @ bf16(Vn, r.terms) + (own[..., None] * Vn if r.exact_o else 0)
        outputs.append(bf16(o * (nq * K**-0.5)[..., None]).transpose(0, 1))
        S = (S + KR.mT @ bf16(Vn, r.terms)) * (prefix[:, -1:] - middle).transpose(1, 2).exp()
    return torch.cat(outputs), S


def errors(regime: str, r: Rounding, seeds: int = 3) -> tuple[float, float]:
    found = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        q, k, v, x = (bf16(torch.randn(T, H, n)) for n in (K, K, V, K))
        beta, A, bias = torch.sigmoid(bf16(torch.randn(T, H))), torch.rand(H).exp(), torch.rand(H, K)
        shift = {"strong": 0.0, "weak": -8.0, "bound": 40.0}.get(regime, 0.0)
        g = -5 * torch.sigmoid(A[:, None] * (x + shift + bias))
        if regime == "repeated, beta 2":
            g, beta, k = torch.zeros_like(g), torch.full_like(beta, 2.0), k[:1].expand_as(k)
        S = 0.1 * torch.randn(H, K, V)
        want, got = recurrence(q, k, v, g, beta, S), fused(q, k, v, g, beta, S, r)
        found.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)])
    o, state = (statistics.mean(column) for column in zip(*found, strict=True))
    return o, state


if __name__ == "__main__":
    cases = {
        "everything rounded": Rounding(raw_scores=False, exact_T=False, pairs=False),
        "q . k as it came": Rounding(exact_T=False, pairs=False),
        "and Tm's diagonal in fp32": Rounding(pairs=False),
        "and Aqk's diagonal in fp32": Rounding(pairs=False, exact_o=True),
        "the third, factors from pairs": Rounding(),
    }
    for name, rounding in cases.items():
        for regime in ("strong", "weak", "bound"):
            print(f"{name:32} {regime:8} o {{:.1e}} state {{:.1e}}".format(*errors(regime, rounding)), flush=True)
    for terms in (1, 2):
        o, state = errors("repeated, beta 2", Rounding(terms=terms))
        print(f"repeated keys, beta 2, {terms} term{'s' * (terms > 1)}: o {o:.1e} state {state:.1e}", flush=True)
