"""The `torch` implementation: the conformance suites, its stages, and shapes that nobody listed."""

from __future__ import annotations

import pytest
import torch

import kda2
from kda2.ops.kda.torch.stages import decayed_scores, prepare, rounded, suffix_sum
from kda2.testing import KdaConformance, KdaStepConformance, Problem, make, same_roundings
from kda2.testing.compare import error


class TestKda(KdaConformance):
    impl = "torch"


class TestStep(KdaStepConformance):
    impl = "torch"


def chunk(C: int = 8, K: int = 4, V: int = 3) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    shapes = ((C, K), (C, K), (C, V), (C, K), (C,))
    q, k, v, g, beta = (torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes)
    return [q, k, v, -g.abs(), beta.sigmoid()]


def test_suffix_sum_leaves_the_token_itself_out() -> None:
    g = torch.tensor([[1.0], [2.0], [4.0]])
    assert suffix_sum(g).flatten().tolist() == [6.0, 4.0, 0.0]


def test_scores_are_sums_over_decayed_keys() -> None:
    q, k, _, g, _ = chunk()
    scores = decayed_scores(q, k, g)
    for i in range(8):
        for j in range(8):
            want = (q[i] * k[j] * g[j + 1 : i + 1].sum(0).exp()).sum() if j <= i else 0.0
            assert scores[i, j].item() == pytest.approx(float(want), abs=1e-12)


def test_scores_survive_resets() -> None:
    q, k, _, g, _ = chunk()
    g[3] = -1e30
    scores = decayed_scores(q, k, g)
    assert scores.isfinite().all() and (scores[3:, :3] == 0).all() and (scores[3:, 3:].tril() != 0).any()


def test_prepare_solves_the_delta_rule() -> None:
    """(I + A) W = diag(beta) Kd, row by row."""
    q, k, v, g, beta = chunk()
    f = prepare(q, k, v, g, beta)
    A = (beta[:, None] * decayed_scores(k, k, g)).tril(-1)
    torch.testing.assert_close(f.W + A @ f.W, beta[:, None] * k * g.cumsum(0).exp())
    torch.testing.assert_close(f.U + A @ f.U, beta[:, None] * v)


def test_rounding_is_that_of_the_operand() -> None:
    x = torch.tensor([1 + 2**-9, 1.0])
    assert rounded(x, torch.bfloat16).tolist() == [1.0, 1.0]
    assert rounded(x, None) is x


@pytest.mark.parametrize("size", [16, 32, 64])
def test_chunk_size_does_not_matter(size: int) -> None:
    kwargs = make(Problem(T=100, dtype=torch.float32, regime="weak"))
    for got, want in zip(same_roundings(kwargs, size, None), same_roundings(kwargs, 64, None), strict=True):
        assert got is not None and want is not None and error(got, want) < 2e-6


def test_blocks_bound_the_memory_of_long_sequences() -> None:
    """More chunks than are prepared at once, in sequences of different lengths."""
    kwargs = make(Problem(lengths=(1100, 0, 40, 1030), H=1, HV=1, K=8, V=8, dtype=torch.float32, regime="weak"))
    o, state = kda2.kda(**kwargs, impl="torch")
    want_o, want_state = kda2.kda(**kwargs, impl="reference")
    assert state is not None and want_state is not None
    assert error(o, want_o) < 2e-6 and error(state, want_state) < 2e-6
