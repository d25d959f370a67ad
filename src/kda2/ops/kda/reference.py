"""KDA as its formula reads: one token at a time, in any dtype up to fp64, differentiable. Slow on purpose.

Source: Kimi Linear, arXiv 2510.26692. With fp64 inputs this is the oracle of every test.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda2.ops.kda.check import Call
from kda2.ops.kda.transforms import delta_rule, first_state, last_state, sequence_bounds, step, transform

__all__ = ["kda", "step"]


def kda(call: Call) -> tuple[Tensor, Tensor | None]:
    """Run the recurrence over each sequence in turn."""
    tokens = [x.flatten(0, 1) for x in transform(call.q, call.k, call.v, call.g, call.beta, call.options)]
    initial = first_state(call, tokens[0].dtype)
    o = list(torch.zeros_like(tokens[2]).unbind(0))
    finals = []
    for state, (start, end) in zip(initial.unbind(0), sequence_bounds(call), strict=True):
        for t in range(start, end):
            o[t], state = delta_rule(state, *(x[t] for x in tokens))
        finals.append(state)
    out = torch.stack(o).view_as(call.v) if o else torch.zeros_like(call.v)
    return out.to(call.v.dtype), last_state(call, torch.stack(finals) if finals else initial)
