"""What KDA's options do to its inputs, and where its states live: shared by the reference and the torch backend."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kda2.errors import InvalidValue
from kda2.ops.kda.check import Call, Options, StepCall
from kda2.ops.kda.gate import log_decay

L2NORM_EPS = 1e-6


class Transformed(NamedTuple):
    """The formula's own operands, per value head: q carries the scale, g is the log decay."""

    q: Tensor  # [..., HV, K]
    k: Tensor  # [..., HV, K]
    v: Tensor  # [..., HV, V]
    g: Tensor  # [..., HV, K]
    beta: Tensor  # [..., HV]


def transform(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, options: Options) -> Transformed:
    """Apply every option, in fp32 (fp64 for fp64 inputs), to inputs whose head axis is the last but one."""
    dtype = torch.promote_types(torch.float32, q.dtype)
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    if options.qk_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS) for x in (q, k))
    if options.beta_sigmoid:
        beta = options.beta_scale * torch.sigmoid(beta)
    shared_by = v.shape[-2] // q.shape[-2]
    q, k = (x.repeat_interleave(shared_by, dim=-2) for x in (q, k))
    return Transformed(options.scale * q, k, v, log_decay(g, options.gate, dtype), beta)


def sequence_bounds(call: Call) -> list[tuple[int, int]]:
    """(first token, one past the last) of each sequence, counted over the flattened [B * T] tokens."""
    B, T = call.q.shape[:2]
    if call.cu_seqlens is None:
        return [(b * T, (b + 1) * T) for b in range(B)]
    # clamped: contents that live on a GPU are unchecked, and must never reach past the tensors
    offsets = [min(max(offset, 0), T) for offset in call.cu_seqlens.tolist()]
    return [(start, max(start, end)) for start, end in pairwise(offsets)]


def tokens_of(call: Call, bounds: list[tuple[int, int]]) -> Transformed:
    """The formula's operands [tokens, HV, ...] of the flattened tokens, up to the last one that a sequence owns: what
    lies behind is never read, so that NaN there reaches no gradient."""
    end = max((end for _, end in bounds), default=0)
    q, k, v, g, beta = (x.flatten(0, 1)[:end] for x in (call.q, call.k, call.v, call.g, call.beta))
    return transform(q, k, v, g, beta, call.options)


def swap_layout(state: Tensor, layout: str) -> Tensor:
    """Between `layout` and "kv"; its own inverse."""
    return state if layout == "kv" else state.transpose(-1, -2)


def first_state(call: Call, dtype: torch.dtype) -> Tensor:
    """A copy of the initial state [N, HV, K, V] in `dtype`; zeros if the call has none.

    Without a token it becomes the final state as it is, which must not be the caller's own tensor.
    """
    if call.initial_state is None:
        shape = (call.sequences, call.heads, call.q.shape[-1], call.v.shape[-1])
        return call.v.new_zeros(shape, dtype=dtype)
    return swap_layout(call.initial_state.to(dtype, copy=True), call.options.state_layout)


def last_state(call: Call, state: Tensor) -> Tensor | None:
    """`state` [N, HV, K, V] as the caller wants it back."""
    if not call.output_final_state:
        return None
    return swap_layout(state, call.options.state_layout).to(call.state_dtype).contiguous()


def delta_rule(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the formula: state [..., K, V] and one token's operands to (o [..., V], new state)."""
    state = g.exp()[..., None] * state
    error = v - torch.einsum("...kv,...k->...v", state, k)
    state = state + torch.einsum("...,...k,...v->...kv", beta, k, error)
    return torch.einsum("...kv,...k->...v", state, q), state


def _refuse_inference_tensors(call: StepCall) -> None:
    """Before anything is written: torch writes into inference tensors only inside inference mode."""
    for name, x in (("state", call.state if call.inplace else None), ("out", call.out)):
        if x is not None and x.is_inference() and not torch.is_inference_mode_enabled():
            fix = f"call inside torch.inference_mode(), or pass {name}.clone()"
            raise InvalidValue(name, "a normal tensor outside torch.inference_mode()", "an inference tensor", fix)


def step(call: StepCall) -> tuple[Tensor, Tensor]:
    """A decode call on the formula itself; rows of the pad slot (or outside the pool) give o = 0."""
    _refuse_inference_tensors(call)
    slots = call.state.shape[0]
    rows = torch.arange(slots, device=call.q.device)
    if call.state_indices is not None:
        rows = call.state_indices.long()
    live = (rows >= 0) & (rows < slots)
    if call.state_indices is not None:
        live = live & (rows != call.pad_slot)
    picked, where = rows[live], live.nonzero().flatten()
    # picked before the transforms, so that NaN in a padded row reaches no gradient
    q, k, v, g, beta = (x[where] for x in (call.q, call.k, call.v, call.g, call.beta))
    x = transform(q, k, v, g, beta, call.options)
    layout = call.options.state_layout
    before = swap_layout(call.state[picked].to(x.q.dtype), layout)
    o_live, after = delta_rule(before, *x)
    o = x.v.new_zeros(call.v.shape).index_copy(0, where, o_live).to(call.v.dtype)
    stored = swap_layout(after, layout).to(call.state.dtype)
    if call.out is not None:
        o = call.out.copy_(o)
    if call.inplace:
        return o, call.state.index_copy_(0, picked, stored)
    return o, call.state.index_copy(0, picked, stored)
