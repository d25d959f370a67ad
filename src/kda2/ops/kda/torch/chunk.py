"""KDA over whole sequences: cut into chunks, prepare many at once, carry the state, read the outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kda2.ops.kda.check import Call
from kda2.ops.kda.torch.stages import Factors, output, prepare, state
from kda2.ops.kda.transforms import first_state, last_state, sequence_bounds, tokens_of

CHUNK = 64
# Chunks of every sequence that are prepared together: bounds the memory, whatever T is.
CHUNKS_AT_ONCE = 16


def kda(call: Call, chunk: int = CHUNK, operand: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
    """Chunked KDA. `operand` rounds as a kernel with matrix operands of that dtype would (see `stages`)."""
    bounds = sequence_bounds(call)
    tokens = tokens_of(call, bounds)
    S = first_state(call, tokens.v.dtype)
    o = tokens.v.new_zeros(call.v.shape).flatten(0, 1)
    for rows, sequences in _blocks(bounds, chunk, call.q.device):
        q, k, v, g, beta = (_gather(x, rows) for x in tokens)
        factors = prepare(q, k, v, g, beta, operand, keep_Tm=call.options.allow_neg_eigval)
        before, changed = [], []
        first = 0
        for active in sequences:
            here = Factors(*(x[first : first + len(active)] for x in factors))
            first += len(active)
            before.append(S[active])
            Vn, after = state(before[-1], here, operand)
            changed.append(Vn)
            S = S.index_copy(0, active, after)
        if before:
            read = output(torch.cat(before), torch.cat(changed), factors.Qd, q, k, g, operand)
            valid = rows >= 0
            o = o.index_copy(0, rows[valid], read.transpose(1, 2)[valid])
    return o.view_as(call.v).to(call.v.dtype), last_state(call, S)


def _blocks(bounds: list[tuple[int, int]], chunk: int, device: torch.device) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Groups of chunk steps. Each yields the token of every row [chunks, C] (-1 past a sequence's end), and for each
    step in it the sequences that have that chunk; chunks are ordered by step, then sequence."""
    steps = max((-(-(end - start) // chunk) for start, end in bounds), default=0)
    offsets = torch.arange(chunk, device=device)
    for first in range(0, steps, CHUNKS_AT_ONCE):
        rows, sequences = [], []
        for step in range(first, min(first + CHUNKS_AT_ONCE, steps)):
            active = [n for n, (start, end) in enumerate(bounds) if start + step * chunk < end]
            starts, ends = (torch.tensor([bounds[n][i] for n in active], device=device)[:, None] for i in (0, 1))
            tokens = starts + step * chunk + offsets
            rows.append(torch.where(tokens < ends, tokens, -1))
            sequences.append(torch.tensor(active, device=device))
        yield torch.cat(rows), sequences


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    """Tokens [M, HV, ...] to chunks [chunks, HV, C, ...]; rows past a sequence's end are 0, whatever lies there."""
    chunks = x[rows.clamp(min=0)].transpose(1, 2)
    outside = (rows < 0)[:, None, :]
    return chunks.masked_fill(outside if x.dim() == 2 else outside[..., None], 0.0)
