"""KDA as its formula reads: one token at a time, in any dtype up to fp64, differentiable. Slow on purpose.

Source: Kimi Linear, arXiv 2510.26692. With fp64 inputs this is the oracle of every test.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda2.ops.kda.check import Call
from kda2.ops.kda.transforms import delta_rule, first_state, last_state, sequence_bounds, step, tokens_of

__all__ = ["kda", "step"]


def kda(call: Call) -> tuple[Tensor, Tensor | None]:
    """Run the recurrence over each sequence in turn."""
    bounds = sequence_bounds(call)
    tokens = tokens_of(call, bounds)
    initial = first_state(call, tokens.v.dtype)
    o = list(tokens.v.new_zeros(call.v.shape).flatten(0, 1).unbind(0))
    finals = []
    for state, (start, end) in zip(initial.unbind(0), bounds, strict=True):
        for t in range(start, end):
            o[t], state = delta_rule(state, *(x[t] for x in tokens))
        finals.append(state)
    out = torch.stack(o).view_as(call.v) if o else torch.zeros_like(call.v)
    return out.to(call.v.dtype), last_state(call, torch.stack(finals) if finals else initial)
