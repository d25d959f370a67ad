"""The reference, which every other implementation is held to, is held to the formula by hand and to gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kda2
from kda2.testing import KdaConformance, KdaStepConformance, Problem, make, make_step, oracle, upcast

BOTH = pytest.mark.parametrize("impl", ["reference", "torch"])
TOKENS = ("q", "k", "v", "g", "beta")


class TestKda(KdaConformance):
    impl = "reference"


class TestStep(KdaStepConformance):
    impl = "reference"


def fp64(*values: float, shape: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(shape)


@BOTH
def test_two_tokens_by_hand(impl: str) -> None:
    """K = 2, V = 1. Token 0: S = [2, 4] halves to [1, 2]; e = 5 - (1*1 + 2*1) = 2; S += 0.5 * [1, 1] * 2 = [2, 3];
    o = 2 + 0. Token 1: the second channel is reset, S = [2, 0]; e = 1 - 0 = 1; S += 1 * [0, 3] * 1 = [2, 3];
    o = 2 * 2 - 3 = 1; both times scale 10."""
    o, state = kda2.kda(
        q=fp64(1, 0, 2, -1, shape=(1, 2, 1, 2)),
        k=fp64(1, 1, 0, 3, shape=(1, 2, 1, 2)),
        v=fp64(5, 1, shape=(1, 2, 1, 1)),
        g=fp64(-math.log(2), -math.log(2), 0, -math.inf, shape=(1, 2, 1, 2)),
        beta=fp64(0.5, 1, shape=(1, 2, 1)),
        scale=10.0,
        initial_state=fp64(2, 4, shape=(1, 1, 2, 1)),
        output_final_state=True,
        impl=impl,
    )
    assert state is not None
    torch.testing.assert_close(o.flatten().tolist(), [20.0, 10.0])
    torch.testing.assert_close(state.flatten().tolist(), [2.0, 3.0])


@BOTH
def test_options_by_hand(impl: str) -> None:
    """One token from an empty state: o = scale * (q . k) * beta * v, whatever the gate."""
    q, k = fp64(3, 4, shape=(1, 1, 1, 2)), fp64(6, 8, shape=(1, 1, 1, 2))
    rest = {"v": fp64(7, shape=(1, 1, 1, 1)), "g": fp64(-1, -1, shape=(1, 1, 1, 2))}
    beta = fp64(math.log(3), shape=(1, 1, 1))
    plain, _ = kda2.kda(q=q, k=k, beta=beta, **rest, impl=impl)
    normalised, _ = kda2.kda(q=q, k=k, beta=beta, **rest, qk_l2norm=True, impl=impl)
    sigmoid, _ = kda2.kda(q=q, k=k, beta=beta, **rest, beta_sigmoid=True, impl=impl)
    doubled, _ = kda2.kda(q=q, k=k, beta=beta, **rest, beta_sigmoid=True, allow_neg_eigval=True, impl=impl)
    for got, beta_value, dot in (
        (plain, math.log(3), 50.0),
        (normalised, math.log(3), 1.0),
        (sigmoid, 0.75, 50.0),
        (doubled, 1.5, 50.0),
    ):
        assert got.item() == pytest.approx(2**-0.5 * dot * beta_value * 7, rel=1e-6)


@pytest.mark.parametrize("gate", ["log", "log_bounded", "softplus", "bounded"])
@pytest.mark.parametrize("lengths", [None, (20, 0, 1, 70)])
def test_chunks_are_the_recurrence(gate: Any, lengths: tuple[int, ...] | None) -> None:
    """In fp64 the chunked form differs by rounding alone, so that it can stand in for the oracle on long sequences."""
    kwargs = make(Problem(T=150, lengths=lengths, H=1, HV=2, K=24, V=40, gate=gate, regime="weak"))
    for got, want in zip(oracle(kwargs, "torch"), oracle(kwargs, "reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def small(gate: Any, **changes: Any) -> dict[str, Any]:
    """fp64 arguments of few elements, for finite differences."""
    problem = {"T": 4, "H": 1, "HV": 2, "K": 3, "V": 2, "gate": gate, "dtype": torch.float32, "regime": "strong"}
    return dict(upcast(make(Problem(**{**problem, **changes}))))


def differentiable(kwargs: dict[str, Any], impl: str) -> tuple[Callable[..., Any], list[Tensor]]:
    """The call as a function of its differentiable tensors, and those."""
    gate = kwargs["gate"]
    named = {name: kwargs[name] for name in (*TOKENS, "initial_state")}
    named |= {name: x for name, x in (("A_log", gate.A_log), ("dt_bias", gate.dt_bias)) if x is not None}

    def function(*tensors: Tensor) -> Any:
        given = dict(zip(named, tensors, strict=True))
        learned = [given.pop(name) for name in ("A_log", "dt_bias") if name in given]
        own = gate
        if gate.kind == "softplus":
            own = kda2.Gate.softplus(*learned)
        if gate.kind == "bounded":
            own = kda2.Gate.bounded(*learned, lower_bound=gate.lower_bound)
        return kda2.kda(**{**kwargs, **given, "gate": own}, impl=impl)

    return function, [x.clone().requires_grad_() for x in named.values()]


@BOTH
@pytest.mark.parametrize("gate", ["log", "softplus", "bounded"])
@pytest.mark.parametrize("flags", [{}, {"qk_l2norm": False, "beta_sigmoid": False}, {"neg_eigval": True}])
def test_gradients_are_those_of_finite_differences(impl: str, gate: Any, flags: dict[str, bool]) -> None:
    function, tensors = differentiable(small(gate, **flags), impl)
    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)


@BOTH
def test_packed_gradients(impl: str) -> None:
    function, tensors = differentiable(small("bounded", lengths=(2, 0, 3), tail=1), impl)
    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)


@BOTH
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_nan_that_no_sequence_owns_reaches_no_gradient(impl: str, gate: Any) -> None:
    kwargs = small(gate, lengths=(2, 0, 3), tail=2)
    spoilt = {**kwargs, **{name: kwargs[name].clone() for name in TOKENS}}
    for name in TOKENS:
        spoilt[name][:, 5:] = torch.nan
    for got, want in zip(gradients(spoilt, impl), gradients(kwargs, impl), strict=True):
        assert torch.equal(got, want)


@BOTH
def test_nan_in_a_padded_row_reaches_no_gradient(impl: str) -> None:
    kwargs = make_step(Problem(B=3, K=16, V=8, gate="softplus", dtype=torch.float32))
    kwargs |= {"state_indices": torch.tensor([2, -1, 0]), "inplace": False}
    gate = kda2.Gate.softplus(kwargs["gate"].A_log.requires_grad_(), kwargs["gate"].dt_bias.requires_grad_())

    def learned(**changes: Tensor) -> tuple[Tensor, ...]:
        o, state = kda2.kda_step(**{**kwargs, **changes, "gate": gate}, impl=impl)
        return torch.autograd.grad(o.sum() + state.sum(), (gate.A_log, gate.dt_bias))

    g = kwargs["g"].clone()
    g[1] = torch.nan
    for got, want in zip(learned(g=g), learned(), strict=True):
        assert torch.equal(got, want)


def gradients(kwargs: dict[str, Any], impl: str) -> tuple[Tensor, ...]:
    function, tensors = differentiable(kwargs, impl)
    o, state = function(*tensors)
    weights = torch.Generator().manual_seed(3)
    loss = sum((x * torch.randn(x.shape, generator=weights, dtype=x.dtype)).sum() for x in (o, state))
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("gate", ["log", "softplus", "bounded"])
@pytest.mark.parametrize("lengths", [None, (5, 0, 70, 1)])
def test_gradients_agree(gate: Any, lengths: tuple[int, ...] | None) -> None:
    kwargs = small(gate, T=80, lengths=lengths, K=8, V=8, regime="weak")
    for got, want in zip(gradients(kwargs, "torch"), gradients(kwargs, "reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("gate", "reset"), [("log", -math.inf), ("softplus", math.inf)])
def test_gradients_through_resets_are_finite_and_agree(gate: Any, reset: float) -> None:
    kwargs = small(gate, T=70, K=8, V=8, regime="weak")
    kwargs["g"][:, 20] = reset
    kwargs["g"][:, 40, :, 3] = reset
    kwargs["g"][:, 0] = reset
    for got, want in zip(gradients(kwargs, "torch"), gradients(kwargs, "reference"), strict=True):
        assert want.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


@BOTH
def test_nothing_before_a_reset_is_remembered(impl: str) -> None:
    """A document boundary inside a sequence is as two sequences."""
    kwargs = small("log", T=90, K=8, V=8)
    kwargs["g"][:, 37] = -math.inf
    o, _ = kda2.kda(**kwargs, impl=impl)
    tail = {**kwargs, **{name: kwargs[name][:, 37:] for name in TOKENS}, "initial_state": None}
    alone, _ = kda2.kda(**tail, impl=impl)
    torch.testing.assert_close(o[:, 37:], alone, rtol=1e-10, atol=1e-12)


@BOTH
def test_autocast_does_not_reach_inside(impl: str) -> None:
    """Products of an fp32 call stay fp32 where the model around it runs under autocast."""
    kwargs = make(Problem(T=70, K=16, V=8, dtype=torch.float32, state=torch.float32))
    token = make_step(Problem(B=3, K=16, V=8, dtype=torch.float32))
    plain = (*kda2.kda(**kwargs, impl=impl), *kda2.kda_step(**token, inplace=False, impl=impl))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = (*kda2.kda(**kwargs, impl=impl), *kda2.kda_step(**token, inplace=False, impl=impl))
        assert torch.is_autocast_enabled("cpu")
    for got, want in zip(cast, plain, strict=True):
        assert torch.equal(got, want)


@BOTH
def test_inference_tensors_are_refused_before_anything_is_written(impl: str) -> None:
    with torch.inference_mode():
        kwargs = make_step(Problem(B=3, K=16, V=8))
        inside, _ = kda2.kda_step(**{**kwargs, "state": kwargs["state"].clone()}, impl=impl)
    before, out = kwargs["state"].clone(), torch.zeros(3, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(kda2.InvalidValue, match="state must be a normal tensor"):
        kda2.kda_step(**kwargs, out=out, impl=impl)
    assert torch.equal(kwargs["state"], before) and not out.any()
    o, _ = kda2.kda_step(**{**kwargs, "state": before}, out=out, impl=impl)
    assert o is out and torch.equal(o, inside)


@BOTH
@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("lengths", [None, (0, 0)])
def test_the_final_state_is_never_the_initial_one(impl: str, layout: Any, lengths: tuple[int, ...] | None) -> None:
    """Not even where no token came: decoding on in place would change what the caller keeps as a prefix."""
    kwargs = make(Problem(T=0, lengths=lengths, K=16, V=8, layout=layout))
    kept = kwargs["initial_state"].clone()
    _, final = kda2.kda(**kwargs, impl=impl)
    assert final is not None and torch.equal(final, kept)
    final.zero_()
    assert torch.equal(kwargs["initial_state"], kept)
