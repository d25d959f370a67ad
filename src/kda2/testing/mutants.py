"""Mutants: KDAs that are wrong in one named way, as kernels have been. They show what the probe families find, and put
a name to what a failed kernel computes (`kda2.testing.diagnose`).

Each is the token recurrence in fp64 with one change; outputs come in the dtypes of `kda2.kda`. The changes are faults
that users of such kernels reported in public, and slips that the formula invites.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kda2.errors import InvalidValue
from kda2.ops.kda.gate import RESET, Gate
from kda2.ops.kda.transforms import L2NORM_EPS, Transformed, sequence_bounds, tokens_of
from kda2.testing.oracle import Outputs, checked, upcast
from kda2.testing.recurrence import (
    Arguments,
    Kwargs,
    Recur,
    Rule,
    by_chunks,
    decayed,
    delta_rule,
    evaluate,
    lengths,
    read,
    recur,
    tokens,
    written,
)

CHUNKS = (16, 32, 64, 128)
LOG2E = math.log2(math.e)
Applies = Callable[[Kwargs], bool]


@dataclass(frozen=True)
class Mutant:
    """A wrong KDA. `says` completes "it computes KDA ..."; `run` takes the arguments of `kda2.kda`, on the CPU;
    `applies` says whether they are such that the change can show."""

    name: str
    says: str
    run: Callable[..., Outputs]
    applies: Applies


MUTANTS: dict[str, Mutant] = {}


def _register(name: str, says: str, run: Callable[..., Outputs], *applies: Applies) -> None:
    if name in MUTANTS:
        raise InvalidValue("name", "a new mutant's name", repr(name))
    MUTANTS[name] = Mutant(name, says, run, lambda kwargs: all(condition(kwargs) for condition in applies))


def _recurrence(name: str, says: str, over: Recur, *applies: Applies) -> None:
    """A mutant with another recurrence over each sequence."""
    _register(name, says, lambda **kwargs: evaluate(kwargs, over), _has_tokens, *applies)


def _call(name: str, says: str, arguments: Arguments, *applies: Applies) -> None:
    """A mutant that computes another call."""
    _register(name, says, lambda **kwargs: evaluate(kwargs, arguments=arguments), *applies)


# When a change can show.


def _has_tokens(kwargs: Kwargs) -> bool:
    return max(lengths(kwargs), default=0) > 0


def _longer_than(count: int) -> Applies:
    return lambda kwargs: max(lengths(kwargs), default=0) > count


def _has_partial(chunk: int) -> Applies:
    """Some sequence has whole chunks, and a partial one after them."""
    return lambda kwargs: any(n > chunk and n % chunk for n in lengths(kwargs))


def _asks(option: str) -> Applies:
    return lambda kwargs: bool(kwargs.get(option))


_wants_state = _asks("output_final_state")


def _has_initial_state(kwargs: Kwargs) -> bool:
    state = kwargs.get("initial_state")
    return state is not None and state.numel() > 0


def _has_sequences(kwargs: Kwargs) -> bool:
    return len(lengths(kwargs)) > 1


def _hands_on(kwargs: Kwargs) -> bool:
    """Some sequence ends in a state that is not the next one's initial state."""
    return _has_sequences(kwargs) and (_has_initial_state(kwargs) or max(lengths(kwargs)[:-1]) > 0)


def _heads(kwargs: Kwargs) -> tuple[int, int]:
    """(H, HV)."""
    return kwargs["q"].shape[2], kwargs["v"].shape[2]


def _has_heads(kwargs: Kwargs) -> bool:
    return _heads(kwargs)[1] > 1


def _gate(kwargs: Kwargs) -> Gate:
    gate: Gate = kwargs.get("gate", Gate.log())
    return gate


def _decays(kwargs: Kwargs) -> bool:
    """Some token decays: with every gate shut nothing that concerns the decay shows."""
    call = checked(upcast(kwargs))
    return bool((tokens_of(call, sequence_bounds(call)).g < 0).any())


def _has_rates(kwargs: Kwargs) -> bool:
    return _gate(kwargs).A_log is not None and _decays(kwargs)


def _has_bias(kwargs: Kwargs) -> bool:
    return _gate(kwargs).dt_bias is not None and _decays(kwargs)


# The delta rule: the same operands in another step.


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


def _steps(name: str, says: str, rule: Rule, *applies: Applies) -> None:
    _recurrence(name, says, partial(recur, rule=rule), *applies)


_steps("no_delta", "without the delta correction: S <- diag(exp(g)) S + beta k v^T", _no_delta)
_steps("decay_after_correction", "with S^T k read before the decay", _decay_after_correction, _decays)
_steps("decay_after_update", "with the decay after the update, which then decays too", _decay_after_update, _decays)
_steps("output_before_update", "with o read before the token's own update", _output_before_update)
_steps("output_before_token", "with o read from the state that the token before left", _output_before_token)
_steps(
    "printed_step", "as S <- (I - beta v k^T) S + alpha v k^T, which contracts S's value axis with k", _printed_step,
    lambda kwargs: kwargs["k"].shape[-1] == kwargs["v"].shape[-1],
)  # fmt: skip


# Chunks: what is handed on, what is left out inside and at the end, how the state is stored.


def _without_solve(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    """One chunk in which each token is corrected by the state before the chunk alone."""
    before, o = S, []
    for q, k, v, g, beta in zip(*x, strict=True):
        before, S = decayed(before, g), decayed(S, g)
        S = written(S, k, v - read(before, k), beta)
        o.append(read(S, q))
    return torch.stack(o), S


def _without_partial(S: Tensor, x: Transformed, chunk: int, keep_o: bool) -> tuple[Tensor, Tensor]:
    """The partial chunk after the whole ones is not in the final state, nor (but for `keep_o`) in o."""
    whole = len(x.q) - len(x.q) % chunk or len(x.q)
    o, after = recur(S, tokens(x, 0, whole))
    rest, _ = recur(after, tokens(x, whole, None))
    return torch.cat([o, rest if keep_o else torch.zeros_like(rest)]), after


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _bf16_rule(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    S = _bf16(delta_rule(S, q, k, v, g, beta)[1])
    return read(S, q), S


_steps("bf16_state", "with the state rounded to bf16 after every token", _bf16_rule)
for _C in CHUNKS:
    _recurrence(
        f"state_lost_{_C}", f"with every chunk of {_C} tokens but the first started from an empty state",
        partial(by_chunks, chunk=_C, inside=recur, hand_on=torch.zeros_like), _longer_than(_C),
    )  # fmt: skip
    _recurrence(
        f"no_solve_{_C}", f"without the triangular solve: tokens of a chunk of {_C} do not correct one another",
        partial(by_chunks, chunk=_C, inside=_without_solve, hand_on=lambda S: S), _longer_than(1),
    )  # fmt: skip
    _recurrence(
        f"tail_skipped_{_C}", f"without the partial chunk at the end, if chunks have {_C} tokens: o is 0 there",
        partial(_without_partial, chunk=_C, keep_o=False), _has_partial(_C),
    )  # fmt: skip
    _recurrence(
        f"tail_state_{_C}", f"with a final state that lacks the partial chunk at the end, if chunks have {_C} tokens",
        partial(_without_partial, chunk=_C, keep_o=True), _has_partial(_C), _wants_state,
    )  # fmt: skip


# The gate.


def _with_g(change: Callable[[Tensor], Tensor]) -> Recur:
    """The recurrence with another log decay [T, HV, K] in each sequence."""
    return lambda S, x: recur(S, x._replace(g=change(x.g).clamp(min=RESET)))


def _of_previous(g: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(g[:1]), g[:-1]])


def _of_next(g: Tensor) -> Tensor:
    return torch.cat([g[1:], torch.zeros_like(g[:1])])


def _with_A_log(change: Callable[[Tensor], Tensor]) -> Arguments:
    return lambda kwargs: {**kwargs, "gate": replace(kwargs["gate"], A_log=change(kwargs["gate"].A_log))}


def _without_bias(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "gate": replace(kwargs["gate"], dt_bias=None)}


for _name, _says, _change in (
    ("no_gate", "without any decay", torch.zeros_like),
    ("gate_base_2", "with exp2 of the log decay, without the factor log2(e)", lambda g: g / LOG2E),
    ("gate_log2e_twice", "with the log decay multiplied by log2(e) once too often", lambda g: g * LOG2E),
    ("gate_of_previous_token", "with each token decayed by the gate of the one before", _of_previous),
    ("gate_of_next_token", "with each token decayed by the gate of the one after", _of_next),
):
    _recurrence(_name, _says, _with_g(_change), _decays)
_recurrence(
    "gate_per_head", "with one decay for a head, the mean of its channels",
    _with_g(lambda g: g.mean(-1, keepdim=True).expand_as(g)), _decays, lambda kwargs: kwargs["k"].shape[-1] > 1,
)  # fmt: skip
_call("no_dt_bias", "without dt_bias", _without_bias, _has_bias)
_call("no_A_log", "without A_log: every head has rate 1", _with_A_log(torch.zeros_like), _has_rates)
_call(
    "A_log_of_head_0", "with A_log of head 0 for every head", _with_A_log(lambda A_log: A_log[:1].expand_as(A_log)),
    _has_rates, _has_heads,
)  # fmt: skip


# Scale, beta and l2norm.


def _with(**changes: Any) -> Arguments:
    return lambda kwargs: {**kwargs, **changes}


def _with_beta(change: Callable[[Tensor], Tensor]) -> Recur:
    return lambda S, x: recur(S, x._replace(beta=change(x.beta)))


def _is_scaled(kwargs: Kwargs) -> bool:
    return _has_tokens(kwargs) and kwargs.get("scale") != 1.0 and kwargs["q"].shape[-1] > 1


def _has_own_scale(kwargs: Kwargs) -> bool:
    return _has_tokens(kwargs) and kwargs.get("scale") not in (None, kwargs["q"].shape[-1] ** -0.5)


def _normalised(kwargs: dict[str, Any], q_by: str, eps: float) -> dict[str, Any]:
    """q and k divided outside of the call, q by the norm of `q_by`."""
    root = {name: (kwargs[name].square().sum(-1, keepdim=True) + eps).sqrt() for name in ("q", "k")}
    return {**kwargs, "q": kwargs["q"] / root[q_by], "k": kwargs["k"] / root["k"], "qk_l2norm": False}


def _has_tiny_rows(kwargs: Kwargs) -> bool:
    """Some row of q or k is so short that the epsilon beneath the root counts."""
    return any(bool((kwargs[name].double().square().sum(-1) < 1e3 * L2NORM_EPS).any()) for name in ("q", "k"))


_call("no_scale", "without the scale", _with(scale=1.0), _is_scaled)
_call("own_scale", "with the scale K^-0.5 in place of the one given", _with(scale=None), _has_own_scale)
_recurrence("no_beta", "without beta (beta = 1)", _with_beta(torch.ones_like))
_recurrence("beta_twice", "with beta applied twice (beta^2)", _with_beta(torch.square))
_call(
    "no_beta_sigmoid", "with beta as it is, without its sigmoid", _with(beta_sigmoid=False, allow_neg_eigval=False),
    _has_tokens, _asks("beta_sigmoid"),
)  # fmt: skip
_call(
    "no_neg_eigval", "with sigmoid(beta) in place of 2 * sigmoid(beta)", _with(allow_neg_eigval=False),
    _has_tokens, _asks("allow_neg_eigval"),
)  # fmt: skip
_call("no_l2norm", "without the l2norm of q and k", _with(qk_l2norm=False), _has_tokens, _asks("qk_l2norm"))
_call(
    "joint_l2norm", "with q divided by the norm of k", partial(_normalised, q_by="k", eps=L2NORM_EPS),
    _has_tokens, _asks("qk_l2norm"),
)  # fmt: skip
for _eps in (1e-12, 1e-5):
    _call(
        f"l2norm_eps_{_eps:g}", f"with {_eps:g} in place of 1e-06 beneath the root of the l2norm",
        partial(_normalised, q_by="q", eps=_eps), _asks("qk_l2norm"), _has_tiny_rows,
    )  # fmt: skip


# Heads.


def _last_as_first(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    heads = torch.arange(x.v.shape[1])
    heads[-1] = 0
    return recur(S, Transformed(*(part[:, heads] for part in x)))


def _keys_of_neighbour(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "k": kwargs["k"].roll(1, 2)}


def _interleaved(kwargs: dict[str, Any]) -> dict[str, Any]:
    H, HV = _heads(kwargs)
    return {**kwargs, **{name: kwargs[name][:, :, torch.arange(HV) % H] for name in ("q", "k")}}


def _has_key_heads(kwargs: Kwargs) -> bool:
    return _has_tokens(kwargs) and _heads(kwargs)[0] > 1


def _has_groups(kwargs: Kwargs) -> bool:
    H, HV = _heads(kwargs)
    return _has_tokens(kwargs) and 1 < H < HV


_recurrence("last_head_reads_head_0", "with the inputs of head 0 in the last head", _last_as_first, _has_heads)
_call("keys_of_neighbour", "with the keys of another head in each head", _keys_of_neighbour, _has_key_heads)
_call(
    "heads_interleaved", "with q and k of head h % H in value head h, instead of h // (HV / H)", _interleaved,
    _has_groups,
)  # fmt: skip


# States of whole sequences.


def _from_state(change: Callable[[Tensor], Tensor]) -> Arguments:
    return lambda kwargs: {**kwargs, "initial_state": change(kwargs["initial_state"])}


def _other_layout(state: Tensor) -> Tensor:
    """What is read from memory that holds each matrix transposed."""
    return state.mT.contiguous().view(state.shape)


def _without_half(kwargs: dict[str, Any]) -> dict[str, Any]:
    state, K = kwargs["initial_state"].clone(), kwargs["k"].shape[-1]
    (state if kwargs.get("state_layout", "kv") == "kv" else state.mT)[..., K // 2 :, :] = 0
    return {**kwargs, "initial_state": state}


def _without_last_token(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    return recur(S, x)[0], recur(S, tokens(x, 0, -1))[1]


def _final_transposed(**kwargs: Any) -> Outputs:
    o, state = evaluate(kwargs)
    return o, None if state is None else _other_layout(state)


def _final_is_initial(**kwargs: Any) -> Outputs:
    return evaluate(kwargs)[0], kwargs["initial_state"].clone()


def _has_matrices(kwargs: Kwargs) -> bool:
    """There are states, and transposed they are others."""
    return bool(lengths(kwargs) and kwargs["k"].shape[-1] > 1 and kwargs["v"].shape[-1] > 1)


_call("no_initial_state", "without the initial state", _from_state(torch.zeros_like), _has_initial_state)
_call(
    "initial_state_transposed", "with the initial state read in the other layout", _from_state(_other_layout),
    _has_initial_state, _has_matrices,
)  # fmt: skip
_call(
    "initial_state_of_sequence_0", "with the initial state of sequence 0 in every sequence",
    _from_state(lambda state: state[:1].expand_as(state)),
    _has_initial_state, _has_sequences,
)  # fmt: skip
_call(
    "initial_state_halved", "without the second half of the initial state's key channels", _without_half,
    _has_initial_state,
)  # fmt: skip
_register(
    "sequences_joined", "with each sequence started from the state in which the one before ended",
    lambda **kwargs: evaluate(kwargs, joined=True), _hands_on,
)  # fmt: skip
_recurrence("final_state_early", "with a final state that lacks the last token", _without_last_token, _wants_state)
_register(
    "final_state_transposed", "with the final state written in the other layout", _final_transposed,
    _wants_state, _has_matrices,
)  # fmt: skip
_register(
    "final_state_is_initial", "with the initial state returned as the final one", _final_is_initial,
    _has_tokens, _wants_state, _has_initial_state,
)  # fmt: skip
