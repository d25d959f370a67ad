"""The comparator: what passes, what never does, and what it says."""

from __future__ import annotations

import math

import pytest
import torch

from kda2.contract import Tolerance
from kda2.testing import compare, error, rms
from kda2.testing.compare import TOKEN_AXES

LIMITS = Tolerance("bf16", relative_l2=1e-2, element_rms=0.1, provenance="a test")


def test_error_is_relative_l2() -> None:
    assert error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


def test_error_of_a_reference_that_is_zero_by_nature() -> None:
    got, zero = torch.tensor([1e-9, 0.0]), torch.zeros(2)
    assert error(got, zero) == math.inf
    assert error(got, zero, floor=1e-3) == pytest.approx(1e-6 / 2**0.5)
    assert error(zero, zero) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_error_of_what_is_not_finite_is_infinite(bad: float) -> None:
    assert error(torch.tensor([bad]), torch.tensor([1.0])) == math.inf


def test_error_of_nothing_is_zero() -> None:
    assert error(torch.empty(0, 3), torch.empty(0, 3)) == 0.0 and rms(torch.empty(0)) == 0.0


def test_agreement() -> None:
    want = torch.randn(2, 8, 3, 16)
    c = compare(want * 1.001, want, LIMITS, axes=TOKEN_AXES)
    assert c.ok and c.margin == pytest.approx(0.1, rel=1e-3) and c.provenance == "a test"
    assert c.explain().startswith("o agrees: relative L2 1.00e-03 (limit 1.00e-02); worst element at batch")


def test_worst_element_is_named_by_its_axes() -> None:
    want = torch.ones(2, 8, 3, 16)
    got = want.clone()
    got[1, 5, 2, 7] = 1.5
    c = compare(got, want, LIMITS, axes=TOKEN_AXES)
    assert not c.ok and c.worst is not None
    assert c.worst.place == "batch 1, token 5, head 2, channel 7"
    assert (c.worst.got, c.worst.want, c.worst.rms_off) == (1.5, 1.0, 0.5)
    assert "got 1.5, want 1, 0.5 RMS off (limit 0.1)" in c.explain()


def test_one_wrong_element_fails_though_the_norm_passes() -> None:
    want = torch.ones(1, 1000, 1, 100)
    got = want.clone()
    got[0, 3, 0, 4] = 1.3
    c = compare(got, want, LIMITS)
    assert c.relative_l2 < LIMITS.relative_l2 and not c.ok


def test_the_floor_is_the_least_that_a_tensor_counts_for() -> None:
    want = torch.full((1, 4, 1, 4), 1e-6)
    got = want + 1e-3
    assert compare(got, want, LIMITS).worst.rms_off == pytest.approx(1000)  # type: ignore[union-attr]
    c = compare(got, want, LIMITS, floor=1.0)
    assert c.ok and c.relative_l2 == pytest.approx(1e-3)
    assert c.worst is not None and c.worst.rms_off == pytest.approx(1e-3)
    large = compare(1e9 * got, 1e9 * want, LIMITS, floor=1.0)
    assert large.relative_l2 == pytest.approx(1000)


def test_rms_of_the_row_is_the_unit_of_large_rows() -> None:
    want = torch.ones(1, 100, 1, 10)
    want[0, 0] = 1000.0
    got = want.clone()
    got[0, 0, 0, 0] += 5.0
    c = compare(got, want, LIMITS)
    assert c.ok and c.worst is not None and c.worst.rms_off == pytest.approx(0.005)


def test_packed_tokens_are_named_by_their_sequence() -> None:
    want = torch.ones(1, 10, 1, 2)
    got = want.clone()
    got[0, 7, 0, 1] = 2.0
    offsets = torch.tensor([0, 4, 4, 9])
    c = compare(got, want, LIMITS, axes=TOKEN_AXES, cu_seqlens=offsets)
    assert c.worst is not None and c.worst.place == "sequence 2, token 3, head 0, channel 1"
    got[0, 9, 0, 0] = 9.0
    c = compare(got, want, LIMITS, axes=TOKEN_AXES, cu_seqlens=offsets)
    assert c.worst is not None and c.worst.place == "token past the last sequence 9, head 0, channel 0"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_never_passes(bad: float) -> None:
    want = torch.ones(1, 4, 1, 2)
    got = want.clone()
    got[0, 2, 0, 1] = bad
    generous = Tolerance("bf16", math.inf, math.inf)
    c = compare(got, want, generous, axes=TOKEN_AXES)
    assert not c.ok and c.margin == math.inf and c.non_finite == 1
    assert "1 elements are NaN or inf, the first at batch 0, token 2, head 0, channel 1" in c.explain()


def test_a_reference_that_is_not_finite_never_passes() -> None:
    nan = torch.tensor([[math.nan, 1.0]])
    c = compare(nan, nan, Tolerance("bf16", math.inf, math.inf))
    assert not c.ok and "the reference itself has 1 NaN or inf" in c.explain()


def test_shape_and_dtype_are_failures_of_their_own() -> None:
    want = torch.ones(2, 3)
    assert compare(torch.ones(3, 2), want, LIMITS).explain() == "o: wanted shape (2, 3), got (3, 2)"
    c = compare(want.bfloat16(), want, LIMITS, dtype=torch.float32, quantity="final state")
    assert not c.ok and c.explain() == "final state: wanted dtype torch.float32, got torch.bfloat16"
    c = compare(None, want, LIMITS)  # type: ignore[arg-type]
    assert not c.ok and c.explain() == "o: wanted a tensor, got NoneType"


def test_nothing_agrees_with_nothing() -> None:
    c = compare(torch.empty(1, 0, 2, 3), torch.empty(1, 0, 2, 3), LIMITS, axes=TOKEN_AXES)
    assert c.ok and c.margin == 0.0
