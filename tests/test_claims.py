"""What docs/claims.md says was tested here and needs no GPU; and that it answers every claim in its own terms."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kda2

PAGE = Path(__file__).parent.parent / "docs" / "claims.md"
CLAIMS = [f"{note}{i}" for note, last in (("A", 8), ("B", 12), ("C", 10), ("D", 5)) for i in range(1, last + 1)]
OUTCOME = re.compile(r"\b(holds|does not hold|could not be tested|not tested yet)\b")


def test_every_claim_is_answered_once() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.read_text().splitlines()]
    answers = [row for row in rows if re.fullmatch(r"[A-D]\d+", row[0])]
    assert [row[0] for row in answers] == CLAIMS
    assert [row[0] for row in answers if not OUTCOME.search(row[-1])] == []


def without_delta_rule(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, q: Tensor) -> Tensor:
    """o [T, V] of one head if nothing is corrected: S <- diag(exp(g)) S + beta k v^T."""
    S = torch.zeros(k.shape[-1], v.shape[-1], dtype=k.dtype)
    o = []
    for t in range(len(k)):
        S = g[t].exp()[:, None] * S + beta[t] * torch.outer(k[t], v[t])
        o.append(k.shape[-1] ** -0.5 * S.mT @ q[t])
    return torch.stack(o)


def test_A2_a_flat_tolerance_passes_a_kernel_without_the_delta_rule() -> None:
    """Outputs are so small that an absolute 1e-2 is most of them; relative to the tensor the error is plain."""
    T, K = 256, 128
    q, k = (torch.nn.functional.normalize(torch.randn(T, K, dtype=torch.float64), dim=-1) for _ in range(2))
    v, beta = torch.randn(T, K, dtype=torch.float64), torch.rand(T, dtype=torch.float64)
    g = -torch.nn.functional.softplus(torch.randn(T, K, dtype=torch.float64) - 2.0)
    right, _ = kda2.kda(*(x[None, :, None] for x in (q, k, v, g, beta)), impl="reference")
    right, wrong = right[0, :, 0], without_delta_rule(k, v, g, beta, q)
    torch.testing.assert_close(wrong, right, atol=1e-2, rtol=1e-2)
    assert (wrong - right).norm() > 0.05 * right.norm()


def test_A6_ptxas_has_no_swizzle_option() -> None:
    knobs = pytest.importorskip("triton.knobs")
    listed = subprocess.run([knobs.nvidia.ptxas.path, "--help"], capture_output=True, text=True, check=True).stdout
    assert "--opt-level" in listed
    assert "swizzle" not in listed


def test_C7_only_the_published_step_replaces_what_a_key_held() -> None:
    """Two values under one unit key, no decay, beta 1: reading the key must give the second."""
    K = 16
    k = torch.nn.functional.normalize(torch.randn(K), dim=0)
    first, second = torch.randn(K), torch.randn(K)
    state = torch.zeros(1, 1, K, K)
    printed = torch.zeros(K, K)
    for v in (first, second):
        tokens = (x.view(1, 1, -1) for x in (k, k, v, torch.zeros(K)))
        o, state = kda2.kda_step(*tokens, torch.ones(1, 1), state, scale=1.0, impl="reference")
        printed = (torch.eye(K) - torch.outer(v, k)) @ printed + torch.outer(v, k)
    torch.testing.assert_close(o.flatten(), second)
    assert (printed @ k - second).norm() > 0.1 * second.norm()
    assert (printed.mT @ k - second).norm() > 0.1 * second.norm()


def test_C9_the_state_is_constant_where_a_kv_cache_grows() -> None:
    """Bytes of one layer with 32 heads of 128 channels in bf16; the cache is that of 64K tokens."""
    H, K, tokens = 32, 128, 64 * 1024
    for T in (1, 3):
        q, k, v, g = (torch.zeros(1, T, H, K, dtype=torch.bfloat16) for _ in range(4))
        first = torch.zeros(1, H, K, K, dtype=torch.bfloat16)
        _, state = kda2.kda(q, k, v, g, g[..., 0], initial_state=first, output_final_state=True, impl="reference")
        assert state is not None and state.nbytes == 2**20
    keys, values = (torch.empty(1, tokens, H, K, dtype=torch.bfloat16, device="meta") for _ in range(2))
    assert keys.nbytes + values.nbytes == 2**30
