"""The gates: their values by hand, their limits, what they refuse."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kda2
from kda2.ops.kda.gate import RESET, log_decay


def decay(g: list[float], gate: kda2.Gate) -> list[float]:
    """Log decay of activations `g` [1 head, K]."""
    return log_decay(torch.tensor([g], dtype=torch.float64), gate, torch.float64).flatten().tolist()


A_LOG = torch.tensor([math.log(2.0)])


def test_log_is_itself() -> None:
    assert decay([-3.0, 0.0, -1000.0], kda2.Gate.log()) == [-3.0, 0.0, -1000.0]


def test_softplus() -> None:
    got = decay([0.0, 3.0], kda2.Gate.softplus(A_LOG, torch.tensor([[0.0, -1.0]])))
    assert got == pytest.approx([-2 * math.log(2), -2 * math.log1p(math.e**2)])


def test_softplus_without_bias() -> None:
    assert decay([1.0], kda2.Gate.softplus(A_LOG)) == pytest.approx([-2 * math.log1p(math.e)])


def test_softplus_of_very_negative_activations_is_tiny_not_zero() -> None:
    assert decay([-30.0], kda2.Gate.softplus(A_LOG)) == pytest.approx([-2 * math.exp(-30)], rel=1e-6)


def test_bounded() -> None:
    got = decay([0.0, 1.0], kda2.Gate.bounded(A_LOG, torch.tensor([[0.0, 0.5]]), lower_bound=-4.0))
    assert got == pytest.approx([-2.0, -4 / (1 + math.exp(-3))])


def test_bounded_reaches_its_bound_and_no_decay() -> None:
    assert decay([1e4, -1e4], kda2.Gate.bounded(A_LOG)) == [-5.0, 0.0]


@pytest.mark.parametrize(("gate", "g"), [(kda2.Gate.log(), -math.inf), (kda2.Gate.softplus(A_LOG), math.inf)])
def test_resets_are_finite_and_decay_to_zero(gate: kda2.Gate, g: float) -> None:
    (got,) = decay([g], gate)
    assert got == RESET and math.exp(got) == 0.0 and torch.tensor(got).exp() == 0


@pytest.mark.parametrize("gate", [kda2.Gate.log(), kda2.Gate.softplus(A_LOG), kda2.Gate.bounded(A_LOG)])
def test_nan_stays_nan(gate: kda2.Gate) -> None:
    assert math.isnan(decay([math.nan], gate)[0])


@pytest.mark.parametrize("bound", [0.0, 0.1, -5.0001, -math.inf, math.nan])
def test_lower_bound_out_of_range(bound: float) -> None:
    for make in (lambda: kda2.Gate.log(bound), lambda: kda2.Gate.bounded(A_LOG, lower_bound=bound)):
        with pytest.raises(kda2.InvalidValue, match=r"lower_bound must be in \[-5, 0\), got"):
            make()


@pytest.mark.parametrize("bound", [-5.0, -1e-3, -5])
def test_lower_bound_in_range(bound: float) -> None:
    assert kda2.Gate.log(bound).lower_bound == bound
    assert kda2.Gate.bounded(A_LOG, lower_bound=bound).lower_bound == bound


@pytest.mark.parametrize("bound", ["-1", None, torch.tensor(-1.0), True])
def test_a_lower_bound_is_a_number(bound: Any) -> None:
    with pytest.raises(kda2.InvalidType, match="lower_bound must be a number"):
        kda2.Gate.bounded(A_LOG, lower_bound=bound)


def test_a_lower_bound_of_numpy_becomes_a_float() -> None:
    assert type(kda2.Gate.log(np.float32(-2)).lower_bound) is float


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("sigmoid",), "gate must be of kind"),
        (("softplus",), "A_log must be a torch.Tensor for the gate 'softplus', got None"),
        (("bounded", None, None, -5.0), "A_log must be a torch.Tensor"),
        (("bounded", A_LOG), "lower_bound must be a number"),
        (("bounded", A_LOG, None, 3.0), "lower_bound must be in"),
        (("log", None, None, -99.0), "lower_bound must be in"),
        (("log", A_LOG), "A_log must be None for the gate 'log'"),
        (("log", None, A_LOG), "dt_bias must be None for the gate 'log'"),
        (("softplus", A_LOG, None, -5.0), "lower_bound must be None for the gate 'softplus'"),
    ],
)
def test_a_gate_built_by_hand_is_checked_too(fields: tuple[Any, ...], words: str) -> None:
    with pytest.raises((kda2.InvalidValue, kda2.InvalidType), match=re.escape(words)):
        kda2.Gate(*fields)


@pytest.mark.parametrize("make", [kda2.Gate.softplus, kda2.Gate.bounded])
@pytest.mark.parametrize("g", [math.inf, -math.inf])
def test_infinite_activations_leave_finite_gradients(make: Callable[..., kda2.Gate], g: float) -> None:
    A_log, dt_bias = A_LOG.clone().requires_grad_(), torch.zeros(1, 2).requires_grad_()
    log_decay(torch.tensor([[g, 0.5]]), make(A_log, dt_bias), torch.float32).clamp(min=-100).sum().backward()
    assert A_log.grad is not None and dt_bias.grad is not None
    assert A_log.grad.isfinite().all() and dt_bias.grad.isfinite().all()
    assert A_log.grad.abs().sum() > 0  # the finite channel still teaches
