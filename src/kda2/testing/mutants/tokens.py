"""Mutants that differ in what a token does: its step, its gate, scale, beta and norms. Most are mutants of `kda_step`
too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kda2.ops.kda.gate import RESET, Gate
from kda2.ops.kda.transforms import L2NORM_EPS, Transformed, sequence_bounds, tokens_of
from kda2.testing.mutants.table import (
    asks,
    has_heads,
    longer_than,
    recurrence,
    token_call,
    token_operands,
    token_rule,
)
from kda2.testing.oracle import checked, upcast
from kda2.testing.recurrence import Arguments, Kwargs, Recur, decayed, delta_rule, read, recur, written

LOG2E = math.log2(math.e)


def gate_of(kwargs: Kwargs) -> Gate:
    gate: Gate = kwargs.get("gate", Gate.log())
    return gate


def log_decays(kwargs: Kwargs) -> Tensor:
    """g [tokens, HV, K] of a call, as the formula has it."""
    checked_call = checked(upcast(kwargs))
    return tokens_of(checked_call, sequence_bounds(checked_call)).g


def decays(kwargs: Kwargs) -> bool:
    """Some token decays: with every gate shut nothing that concerns the decay shows."""
    return bool((log_decays(kwargs) < 0).any())


def _resets(kwargs: Kwargs) -> bool:
    return bool((log_decays(kwargs) == RESET).any())


def _has_rates(kwargs: Kwargs) -> bool:
    return gate_of(kwargs).A_log is not None and decays(kwargs)


def _has_bias(kwargs: Kwargs) -> bool:
    return gate_of(kwargs).dt_bias is not None and decays(kwargs)


# The step of a token: the same operands in another one.


def _no_delta(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    S = written(decayed(S, g), k, v, beta)
    return read(S, q), S


def _decay_after_correction(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    S = written(decayed(S, g), k, v - read(S, k), beta)
    return read(S, q), S


def _decay_after_update(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    S = decayed(written(S, k, v - read(S, k), beta), g)
    return read(S, q), S


def _output_before_update(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    S = decayed(S, g)
    return read(S, q), written(S, k, v - read(S, k), beta)


def _output_before_token(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    return read(S, q), delta_rule(S, q, k, v, g, beta)[1]


def _printed_step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Printed for S^T [V, K], where (I - beta v k^T) S^T contracts the value axis with k."""
    S = written(S, (S @ k[..., None])[..., 0], -v, beta)
    S = written(S, g.exp() * k, v, torch.ones_like(beta))
    return read(S, q), S


def _beta_on_values(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    S = decayed(S, g)
    S = written(S, k, beta[..., None] * v - read(S, k), torch.ones_like(beta))
    return read(S, q), S


def _beta_on_prediction(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    S = decayed(S, g)
    S = written(S, k, v - beta[..., None] * read(S, k), torch.ones_like(beta))
    return read(S, q), S


def _square_states(kwargs: Kwargs) -> bool:
    return bool(kwargs["k"].shape[-1] == kwargs["v"].shape[-1])


token_rule("no_delta", "without the delta correction: S <- diag(exp(g)) S + beta k v^T", _no_delta)
token_rule(
    "decay_after_correction", "with S^T k read before the decay", _decay_after_correction, decays,
    family="saturated_gate",
)  # fmt: skip
token_rule(
    "decay_after_update", "with the decay after the update, which then decays too", _decay_after_update, decays,
    family="random_depth_gate",
)  # fmt: skip
token_rule("output_before_update", "with o read before the token's own update", _output_before_update)
token_rule("output_before_token", "with o read from the state that the token before left", _output_before_token)
token_rule(
    "printed_step", "as S <- (I - beta v k^T) S + alpha v k^T, which contracts S's value axis with k", _printed_step,
    _square_states,
)  # fmt: skip
token_rule("beta_on_values_only", "with beta on v alone: S <- S + k (beta v - S^T k)^T", _beta_on_values)
token_rule("beta_on_prediction_only", "with beta on S^T k alone: S <- S + k (v - beta S^T k)^T", _beta_on_prediction)


# The gate. Most of its slips show only where much decays.


def _g(change: Callable[[Tensor], Tensor]) -> Callable[[Transformed], Transformed]:
    """Another log decay [..., HV, K]."""
    return lambda x: x._replace(g=change(x.g).clamp(min=RESET))


def _g_of_sequence(change: Callable[[Tensor], Tensor]) -> Recur:
    """Another log decay [T, HV, K] in each sequence."""
    return lambda S, x: recur(S, _g(change)(x))


def _of_previous(g: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(g[:1]), g[:-1]])


def _of_next(g: Tensor) -> Tensor:
    return torch.cat([g[1:], torch.zeros_like(g[:1])])


def _nan_after_reset(g: Tensor) -> Tensor:
    """Differences of prefix sums, which hold an infinity from a reset on."""
    sums = g.masked_fill(g == RESET, -torch.inf).cumsum(0)
    return sums.diff(dim=0, prepend=torch.zeros_like(g[:1]))


def _in_gate(change: Callable[[Gate], Gate]) -> Arguments:
    return lambda kwargs: {**kwargs, "gate": change(kwargs["gate"])}


def _with_A_log(change: Callable[[Tensor], Tensor]) -> Arguments:
    def changed(gate: Gate) -> Gate:
        assert gate.A_log is not None
        return replace(gate, A_log=change(gate.A_log))

    return _in_gate(changed)


def _with_bias(change: Callable[[Tensor, Tensor], Tensor]) -> Arguments:
    """Another dt_bias, from it and the rates exp(A_log) [HV, 1]."""

    def changed(gate: Gate) -> Gate:
        assert gate.A_log is not None and gate.dt_bias is not None
        return replace(gate, dt_bias=change(gate.dt_bias, gate.A_log.exp()[:, None]))

    return _in_gate(changed)


def _is_bounded(kwargs: Kwargs) -> bool:
    return gate_of(kwargs).kind == "bounded"


def _has_own_bound(kwargs: Kwargs) -> bool:
    return _is_bounded(kwargs) and gate_of(kwargs).lower_bound != -5.0


def _has_channels(kwargs: Kwargs) -> bool:
    return bool(kwargs["k"].shape[-1] > 1)


token_operands("no_gate", "without any decay", _g(torch.zeros_like), decays, regime="strong")
token_operands(
    "gate_base_2", "with exp2 of the log decay, without the factor log2(e)", _g(lambda g: g / LOG2E), decays,
    family="random_depth_gate",
)  # fmt: skip
token_operands(
    "gate_log2e_twice", "with the log decay multiplied by log2(e) once too often", _g(lambda g: g * LOG2E), decays,
    family="random_depth_gate",
)  # fmt: skip
for _name, _says, _change in (
    ("gate_of_previous_token", "with each token decayed by the gate of the one before", _of_previous),
    ("gate_of_next_token", "with each token decayed by the gate of the one after", _of_next),
):
    recurrence(_name, _says, _g_of_sequence(_change), decays, regime="strong")
token_operands(
    "gate_per_head", "with one decay for a head, the mean of its channels",
    _g(lambda g: g.mean(-1, keepdim=True).expand_as(g)), decays, _has_channels, family="random_depth_gate",
)  # fmt: skip
token_operands(
    "reset_ignored", "with a log decay of -inf read as none at all", _g(lambda g: g.masked_fill(g == RESET, 0.0)),
    _resets, family="reset_log",
)  # fmt: skip
recurrence(
    "nan_after_reset", "with differences of prefix sums of g, NaN after a log decay of -inf",
    _g_of_sequence(_nan_after_reset), _resets, longer_than(1), family="reset_log",
)  # fmt: skip
token_call("no_dt_bias", "without dt_bias", _in_gate(lambda gate: replace(gate, dt_bias=None)), _has_bias,
           regime="strong")  # fmt: skip
token_call("dt_bias_twice", "with dt_bias added twice", _with_bias(lambda bias, rate: 2 * bias), _has_bias,
           regime="strong")  # fmt: skip
token_call(
    "dt_bias_after_rate", "with dt_bias added after the product with exp(A_log)",
    _with_bias(lambda bias, rate: bias / rate), _has_bias, _is_bounded, regime="strong",
)  # fmt: skip
token_call("no_A_log", "without A_log: every head has rate 1", _with_A_log(torch.zeros_like), _has_rates,
           regime="strong")  # fmt: skip
token_call("A_log_as_rate", "with the rate A_log in place of exp(A_log)", _with_A_log(torch.log), _has_rates,
           regime="strong")  # fmt: skip
token_call(
    "A_log_of_head_0", "with A_log of head 0 for every head",
    _with_A_log(lambda A_log: A_log[:1].expand_as(A_log)), _has_rates, has_heads, regime="strong",
)  # fmt: skip
token_call(
    "own_lower_bound", "with the lower bound -5 in place of the one given",
    _in_gate(lambda gate: replace(gate, lower_bound=-5.0)), _has_own_bound, decays, regime="strong", lower_bound=-1.5,
)  # fmt: skip


# Scale and beta.


def _with(**changes: Any) -> Arguments:
    return lambda kwargs: {**kwargs, **changes}


def _scale_of(kwargs: Kwargs) -> float:
    scale = kwargs.get("scale")
    return float(kwargs["q"].shape[-1] ** -0.5 if scale is None else scale)


def _scaled_twice(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "scale": _scale_of(kwargs) ** 2}


def _beta(change: Callable[[Tensor], Tensor]) -> Callable[[Transformed], Transformed]:
    return lambda x: x._replace(beta=change(x.beta))


def _is_scaled(kwargs: Kwargs) -> bool:
    return _scale_of(kwargs) != 1.0


def _has_own_scale(kwargs: Kwargs) -> bool:
    return kwargs.get("scale") not in (None, kwargs["q"].shape[-1] ** -0.5)


token_call("no_scale", "without the scale", _with(scale=1.0), _is_scaled)
token_call("own_scale", "with the scale K^-0.5 in place of the one given", _with(scale=None), _has_own_scale, scale=0.2)
token_call("scale_twice", "with the scale applied twice", _scaled_twice, _is_scaled)
token_operands("no_beta", "without beta (beta = 1)", _beta(torch.ones_like))
token_operands("beta_twice", "with beta applied twice (beta^2)", _beta(torch.square))
recurrence(
    "beta_of_previous_token", "with each token written with the beta of the one before",
    lambda S, x: recur(S, _beta(lambda beta: torch.cat([beta[:1], beta[:-1]]))(x)), longer_than(1),
)  # fmt: skip
token_call(
    "no_beta_sigmoid", "with beta as it is, without its sigmoid", _with(beta_sigmoid=False, allow_neg_eigval=False),
    asks("beta_sigmoid"),
)  # fmt: skip
token_call(
    "beta_sigmoid_twice", "with the sigmoid of beta taken twice",
    lambda kwargs: {**kwargs, "beta": kwargs["beta"].sigmoid()}, asks("beta_sigmoid"),
)  # fmt: skip
token_call(
    "no_neg_eigval", "with sigmoid(beta) in place of 2 * sigmoid(beta)", _with(allow_neg_eigval=False),
    asks("allow_neg_eigval"), neg_eigval=True,
)  # fmt: skip


# l2norm: q and k divided outside of the call by something else.


def _divided(kwargs: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
    return {**kwargs, "q": kwargs["q"] / q, "k": kwargs["k"] / k, "qk_l2norm": False}


def _roots(kwargs: Kwargs, eps: float = L2NORM_EPS) -> tuple[Tensor, Tensor]:
    """What the rows [..., 1] of q and k are divided by."""
    q, k = ((kwargs[name].square().sum(-1, keepdim=True) + eps).sqrt() for name in ("q", "k"))
    return q, k


def _by_norm_of_k(kwargs: dict[str, Any]) -> dict[str, Any]:
    _, k = _roots(kwargs)
    return _divided(kwargs, k, k)


def _by_both_norms(kwargs: dict[str, Any]) -> dict[str, Any]:
    q, k = _roots(kwargs)
    both = torch.hypot(q, k)
    return _divided(kwargs, both, both)


def _by_constant(kwargs: dict[str, Any]) -> dict[str, Any]:
    root = torch.tensor(kwargs["q"].shape[-1] ** 0.5)
    return _divided(kwargs, root, root)


def _by_mean_norm(kwargs: dict[str, Any]) -> dict[str, Any]:
    q, k = _roots(kwargs)
    return _divided(kwargs, q.mean(), k.mean())


def _by_other_eps(kwargs: dict[str, Any], eps: float) -> dict[str, Any]:
    return _divided(kwargs, *_roots(kwargs, eps))


def _has_tiny_rows(kwargs: Kwargs) -> bool:
    """Some row of q or k is so short that the epsilon beneath the root counts."""
    return any(bool((kwargs[name].double().square().sum(-1) < 1e3 * L2NORM_EPS).any()) for name in ("q", "k"))


def _has_rows(kwargs: Kwargs) -> bool:
    return bool(kwargs["q"].shape[:-1].numel() > 1)


_normalises = asks("qk_l2norm")
token_call("no_l2norm", "without the l2norm of q and k", _with(qk_l2norm=False), _normalises)
token_call("joint_l2norm", "with q divided by the norm of k", _by_norm_of_k, _normalises)
token_call("l2norm_of_both", "with q and k both divided by sqrt(|q|^2 + |k|^2)", _by_both_norms, _normalises)
token_call("constant_norm", "with q and k divided by sqrt(K) in place of their norms", _by_constant, _normalises)
token_call("mean_norm", "with q and k divided by the mean norm of all rows", _by_mean_norm, _normalises, _has_rows)
for _eps in (1e-12, 1e-5):
    token_call(
        f"l2norm_eps_{_eps:g}", f"with {_eps:g} in place of 1e-06 beneath the root of the l2norm",
        partial(_by_other_eps, eps=_eps), _normalises, _has_tiny_rows, family="tiny_rows",
    )  # fmt: skip


# Heads.


def _interleaved(kwargs: dict[str, Any]) -> dict[str, Any]:
    H, HV = kwargs["q"].shape[-2], kwargs["v"].shape[-2]
    return {**kwargs, **{name: kwargs[name][..., torch.arange(HV) % H, :] for name in ("q", "k")}}


def _keys_of_neighbour(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "k": kwargs["k"].roll(1, -2)}


def _last_as_first(x: Transformed) -> Transformed:
    heads = torch.arange(x.v.shape[-2])
    heads[-1] = 0
    q, k, v, g = (part[..., heads, :] for part in (x.q, x.k, x.v, x.g))
    return Transformed(q, k, v, g, x.beta[..., heads])


def _has_key_heads(kwargs: Kwargs) -> bool:
    return bool(kwargs["q"].shape[-2] > 1)


def _has_groups(kwargs: Kwargs) -> bool:
    return bool(1 < kwargs["q"].shape[-2] < kwargs["v"].shape[-2])


token_operands("last_head_reads_head_0", "with the inputs of head 0 in the last head", _last_as_first, has_heads)
token_call("keys_of_neighbour", "with the keys of another head in each head", _keys_of_neighbour, _has_key_heads)
token_call(
    "heads_interleaved", "with q and k of head h % H in value head h, instead of h // (HV / H)", _interleaved,
    _has_groups,
)  # fmt: skip
