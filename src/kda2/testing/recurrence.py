"""The token recurrence in fp64 with places to change it: what mutants are made of.

A change is made in the arguments of the call, in the recurrence over one sequence, or in what a sequence starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kda2.ops.kda.check import StepCall
from kda2.ops.kda.transforms import (
    Transformed,
    first_state,
    last_state,
    sequence_bounds,
    swap_layout,
    tokens_of,
    transform,
)
from kda2.testing.oracle import Outputs, checked, checked_step, upcast

Kwargs = Mapping[str, Any]
# From the arguments of the call, upcast, to others.
Arguments = Callable[[dict[str, Any]], dict[str, Any]]
# One token: state [HV, K, V] before it and q, k, v, g, beta [HV, ...] to (o [HV, V], state after it).
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# One sequence: state [HV, K, V] before it and its tokens [T, HV, ...] to (o [T, HV, V], state after it).
Recur = Callable[[Tensor, Transformed], tuple[Tensor, Tensor]]
# From the formula's operands of any tokens, [..., HV, ...], to others.
Operands = Callable[[Transformed], Transformed]
# Of a decode call, the slot [B] that each row's state is read from or written to; -1: none.
Slots = Callable[[StepCall], Tensor]


def decayed(state: Tensor, g: Tensor) -> Tensor:
    return g.exp()[..., None] * state


def read(state: Tensor, x: Tensor) -> Tensor:
    """S^T x: state [..., K, V] and x [..., K] to [..., V]."""
    return (x[..., None, :] @ state)[..., 0, :]


def written(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """S + beta k v^T."""
    return state + (beta[..., None] * k)[..., None] * v[..., None, :]


def delta_rule(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The formula. It is written out here, not taken from the op, so that a test can hold one against the other."""
    state = decayed(state, g)
    state = written(state, k, v - read(state, k), beta)
    return read(state, q), state


def recur(state: Tensor, x: Transformed, rule: Rule = delta_rule) -> tuple[Tensor, Tensor]:
    """`rule` over the tokens of one sequence."""
    o = []
    for token in zip(*(part.unbind(0) for part in x), strict=True):
        at, state = rule(state, *token)
        o.append(at)
    return torch.stack(o) if o else torch.zeros_like(x.v), state


def tokens(x: Transformed, start: int, end: int | None) -> Transformed:
    """Those from `start` to before `end`."""
    return Transformed(*(part[start:end] for part in x))


def by_chunks(
    state: Tensor, x: Transformed, chunk: int, inside: Recur, hand_on: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """`inside` over each chunk, which starts from what `hand_on` makes of the state after the one before."""
    o, after = [x.v[:0]], state
    for start in range(0, len(x.q), chunk):
        at, after = inside(hand_on(after) if start else state, tokens(x, start, start + chunk))
        o.append(at)
    return torch.cat(o), after


def evaluate(
    kwargs: Kwargs,
    over: Recur = recur,
    arguments: Arguments = dict,
    joined: bool = False,
    reach: tuple[int, int] = (0, 0),
) -> Outputs:
    """(o, final state) of `kda2.kda(**kwargs)`, in its dtypes, on the arguments that `arguments` makes of them and with
    `over` in place of the recurrence. `joined`: a sequence starts from the state in which the one before it ended.
    `reach`: tokens before and after its own that a sequence takes for its own."""
    call = checked(arguments(upcast(kwargs)))
    bounds = sequence_bounds(call)
    x = tokens_of(call, bounds)
    o = x.v.new_zeros(call.v.shape).flatten(0, 1)
    states = list(first_state(call, o.dtype).unbind(0))
    for n, (start, end) in enumerate(bounds):
        first = max(start - reach[0], 0)
        at, states[n] = over(states[n - 1] if joined and n else states[n], tokens(x, first, end + reach[1]))
        o[start:end] = at[start - first : end - first]
    final = torch.stack(states) if states else first_state(call, o.dtype)
    return as_stored((o.view_as(call.v), last_state(call, final)), kwargs)


def slots_of(call: StepCall) -> Tensor:
    """The slot [B] that each row names; -1 for rows of padding."""
    if call.state_indices is None:
        return torch.arange(len(call.q))
    return call.state_indices.long().masked_fill(call.state_indices == call.pad_slot, -1)


def evaluate_step(
    kwargs: Kwargs,
    rule: Rule = delta_rule,
    arguments: Arguments = dict,
    operands: Operands = lambda x: x,
    reads: Slots = slots_of,
    writes: Slots = slots_of,
) -> tuple[Tensor, Tensor]:
    """(o, state) of `kda2.kda_step(**kwargs)`, in its dtypes, on the arguments that `arguments` makes of them, with
    other operands, another step, and states read from and written to other slots. Nothing is written in place."""
    call = checked_step(arguments(upcast({**kwargs, "inplace": False, "out": None})))
    x = operands(transform(call.q, call.k, call.v, call.g, call.beta, call.options))
    pool = swap_layout(call.state, call.options.state_layout).clone()
    source, target = reads(call), writes(call)
    o, after = rule(pool[source.clamp(min=0)], *x)
    o[source < 0] = 0.0
    written_rows = target >= 0
    pool[target[written_rows]] = after[written_rows]
    state = swap_layout(pool, call.options.state_layout).contiguous()
    return o.to(kwargs["v"].dtype), state.to(kwargs["state"].dtype)


def as_stored(outputs: Outputs, kwargs: Kwargs) -> Outputs:
    """`outputs` in the dtypes that `kda2.kda(**kwargs)` returns."""
    o, state = outputs
    initial, dtype = kwargs.get("initial_state"), kwargs["v"].dtype
    stored = torch.promote_types(torch.float32, dtype) if initial is None else initial.dtype
    return o.to(dtype), None if state is None else state.to(stored)


def lengths(kwargs: Kwargs) -> list[int]:
    """Tokens of each sequence of the call."""
    offsets, (B, T) = kwargs.get("cu_seqlens"), kwargs["q"].shape[:2]
    return [T] * B if offsets is None else [end - start for start, end in pairwise(offsets.tolist())]
