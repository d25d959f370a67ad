"""Mutants that differ in what a chunk does: its solve, its factors, what it hands on, sees of the future, or drops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kda2.ops.kda.transforms import Transformed
from kda2.testing.mutants.table import Applies, has_initial_state, longer_than, recurrence, wants_state
from kda2.testing.mutants.tokens import decays, log_decays
from kda2.testing.recurrence import (
    Kwargs,
    Recur,
    by_chunks,
    decayed,
    delta_rule,
    lengths,
    read,
    recur,
    tokens,
    written,
)

CHUNKS = (16, 32, 64, 128)
# The largest finite fp16, and the x from which exp(x) is infinite in fp32 (and bf16).
_FP16_MAX, _FP32_MAX_LOG = 65504.0, 88.73


def _has_partial(chunk: int) -> Applies:
    """Some sequence has whole chunks, and a partial one after them."""
    return lambda kwargs: any(n > chunk and n % chunk for n in lengths(kwargs))


def _shorter_than(chunk: int) -> Applies:
    return lambda kwargs: any(0 < n < chunk for n in lengths(kwargs))


def _sums_below(limit: float, chunk: int) -> Applies:
    """Log decays of some channel sum to less than `limit` within `chunk` tokens."""

    def reach(kwargs: Kwargs) -> bool:
        parts = log_decays(kwargs).split(lengths(kwargs))
        sums = [part.cumsum(0) for sequence in parts for part in sequence.split(chunk) if len(part)]
        return any(bool((x < limit).any()) for x in sums)

    return reach


def _same(S: Tensor) -> Tensor:
    return S


def _chunked(name: str, says: str, inside: Recur, chunk: int, *applies: Applies, **where: object) -> None:
    """A mutant that does something else inside each chunk."""
    over = partial(by_chunks, chunk=chunk, inside=inside, hand_on=_same)
    recurrence(name, says, over, *applies, **where)


# The solve: how the tokens of a chunk correct one another.


def _series(S: Tensor, x: Transformed, terms: int) -> tuple[Tensor, Tensor]:
    """One chunk with the first `terms` terms of the series I - A + A^2 - ... in place of (I + A)^-1. Each term more
    lets errors correct errors once more."""
    errors = torch.zeros_like(x.v)
    for _ in range(terms):
        errors = x.v - _with_errors(S, x, errors, x.k, own=False)[0]
    return _with_errors(S, x, errors, x.q, own=True)


def _with_errors(S: Tensor, x: Transformed, errors: Tensor, by: Tensor, own: bool) -> tuple[Tensor, Tensor]:
    """The state read by `by` at each token, before its own update or with it, and after all, where token t writes
    `errors[t]`."""
    seen = []
    for k, g, beta, e, asked in zip(x.k, x.g, x.beta, errors, by, strict=True):
        S = decayed(S, g)
        after = written(S, k, e, beta)
        seen.append(read(after if own else S, asked))
        S = after
    return torch.stack(seen), S


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _bf16_rule(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    S = _bf16(delta_rule(S, q, k, v, g, beta)[1])
    return read(S, q), S


recurrence(
    "bf16_state", "with the state rounded to bf16 after every token", partial(recur, rule=_bf16_rule),
    # what is rounded away is forgotten after K / beta tokens: it takes many channels to pile up
    family="no_decay", T=600, H=1, HV=1, K=256, V=16,
)  # fmt: skip


# What is handed on, and dropped.


def _without_partial(S: Tensor, x: Transformed, chunk: int, keep_o: bool) -> tuple[Tensor, Tensor]:
    """The partial chunk after the whole ones is not in the final state, nor (but for `keep_o`) in o."""
    whole = len(x.q) - len(x.q) % chunk or len(x.q)
    o, after = recur(S, tokens(x, 0, whole))
    rest, _ = recur(after, tokens(x, whole, None))
    return torch.cat([o, rest if keep_o else torch.zeros_like(rest)]), after


# A call with a partial chunk after whole ones.
_T = {16: 40, 32: 40, 64: 70, 128: 140}
for _C in CHUNKS:
    recurrence(
        f"state_lost_{_C}", f"with every chunk of {_C} tokens but the first started from an empty state",
        partial(by_chunks, chunk=_C, inside=recur, hand_on=torch.zeros_like), longer_than(_C), T=_T[_C],
    )  # fmt: skip
    _chunked(
        f"no_solve_{_C}", f"without the triangular solve: tokens of a chunk of {_C} do not correct one another",
        partial(_series, terms=1), _C, longer_than(1), T=_T[_C],
    )  # fmt: skip
    recurrence(
        f"tail_skipped_{_C}", f"without the partial chunk at the end, if chunks have {_C} tokens: o is 0 there",
        partial(_without_partial, chunk=_C, keep_o=False), _has_partial(_C), T=_T[_C],
    )  # fmt: skip
    recurrence(
        f"tail_state_{_C}", f"with a final state that lacks the partial chunk at the end, if chunks have {_C} tokens",
        partial(_without_partial, chunk=_C, keep_o=True), _has_partial(_C), wants_state, T=_T[_C],
    )  # fmt: skip
for _C in (16, 64):
    for _terms in (2, 4):
        _chunked(
            f"series_{_terms}_{_C}",
            f"with {_terms} terms of a series in place of the triangular solve, if chunks have {_C} tokens",
            partial(_series, terms=_terms), _C, longer_than(_terms), family="near_collinear_keys",
        )  # fmt: skip


def _short_skipped(S: Tensor, x: Transformed, chunk: int) -> tuple[Tensor, Tensor]:
    return (torch.zeros_like(x.v), S) if len(x.q) < chunk else recur(S, x)


def _short_memory(S: Tensor, x: Transformed, chunk: int) -> tuple[Tensor, Tensor]:
    """Each chunk starts from what the one before it wrote into an empty state."""
    o, after = [x.v[:0]], S
    for start in range(0, len(x.q), chunk):
        first = max(start - chunk, 0)
        at, after = recur(S if first == 0 else torch.zeros_like(S), tokens(x, first, start + chunk))
        o.append(at[start - first :])
    return torch.cat(o), after


def _uncorrected(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    """Errors are against what the chunk itself has written: W S is left out."""
    own, o = torch.zeros_like(S), []
    for q, k, v, g, beta in zip(*x, strict=True):
        S, own = decayed(S, g), decayed(own, g)
        own = written(own, k, v - read(own, k), beta)
        o.append(read(S + own, q))
    return torch.stack(o), S + own


def _unread(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    """Queries see what the chunk itself has changed: Qd S is left out."""
    o, after = recur(S, x)
    before = x.g.cumsum(0).exp()[..., None] * S
    return o - read(before, x.q), after


def _from_another(chunk: int) -> Applies:
    """Some chunk starts from a state that need not be empty."""
    return lambda kwargs: has_initial_state(kwargs) or longer_than(chunk)(kwargs)


recurrence(
    "short_skipped_16", "without the sequences that are shorter than a chunk of 16 tokens: o is 0 there",
    partial(_short_skipped, chunk=16), _shorter_than(16), family="one_token",
)  # fmt: skip
for _C, _tokens in ((16, 40), (64, 140)):
    recurrence(
        f"short_memory_{_C}", f"with chunks of {_C} tokens that remember nothing older than the chunk before",
        partial(_short_memory, chunk=_C), longer_than(2 * _C), family="weak_gate", T=_tokens,
    )  # fmt: skip
for _C in (16, 64):
    _chunked(
        f"state_uncorrected_{_C}", f"without W S: chunks of {_C} tokens correct nothing that was there before them",
        _uncorrected, _C, _from_another(_C),
    )  # fmt: skip
    _chunked(
        f"state_unread_{_C}", f"without Qd S: o of a chunk of {_C} tokens lacks the state before it",
        _unread, _C, _from_another(_C),
    )  # fmt: skip


# The future, and the row of another token.


def _gate_ahead(S: Tensor, x: Transformed, chunk: int) -> tuple[Tensor, Tensor]:
    ends = torch.arange(len(x.q))[chunk - 1 : -1 : chunk]
    q = x.q.index_copy(0, ends, x.g[ends + 1].exp() * x.q[ends])
    return recur(S, x._replace(q=q))


def _without_mask(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    _, after = recur(S, x)
    return read(after, x.q), after


def _first_rows_late(S: Tensor, x: Transformed, chunk: int) -> tuple[Tensor, Tensor]:
    o, after = recur(S, x)
    firsts = torch.arange(len(o))[chunk::chunk]
    return o.index_copy(0, firsts, o[firsts - 1]), after


recurrence(
    "future_gate_16", "with o of the last token of each chunk of 16 decayed by the gate of the token after it",
    partial(_gate_ahead, chunk=16), longer_than(16), decays, regime="strong",
)  # fmt: skip
_chunked(
    "no_causal_mask_16", "without the causal mask: o of every token is read from the state after its chunk of 16",
    _without_mask, 16, longer_than(1),
)  # fmt: skip
recurrence(
    "row_of_neighbour_16", "with o of the first token of each later chunk of 16 taken from the token before it",
    partial(_first_rows_late, chunk=16), longer_than(16),
)  # fmt: skip


# Factors: what exp(G) and exp(-G) lose.


def _bf16_sums(g: Tensor) -> Tensor:
    """The log decays that differences of sums give which are kept in bf16."""
    sums = [torch.zeros_like(g[0])]
    for at in g:
        sums.append(_bf16(sums[-1] + at))
    return torch.stack(sums).diff(dim=0)


def _with_bf16_sums(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    return recur(S, x._replace(g=_bf16_sums(x.g)))


def _factors(S: Tensor, x: Transformed, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """One chunk in which keys meet queries and keys of the same chunk with `change(G)` [tokens, HV, K] times their
    factor exp(-G). What is handed on does not pass through that factor."""
    seen, o = S, []
    for (q, k, v, g, beta), factor in zip(zip(*x, strict=True), change(x.g.cumsum(0)), strict=True):
        S, seen = decayed(S, g), decayed(seen, g)
        e = v - read(seen, k)
        S, seen = written(S, k, e, beta), written(seen, factor * k, e, beta)
        o.append(read(seen, q))
    return torch.stack(o), S


def _clipped(G: Tensor) -> Tensor:
    return (_FP16_MAX * G.exp()).clamp(max=1.0)


def _where_overflown(G: Tensor, value: float) -> Tensor:
    return torch.ones_like(G).masked_fill(-G > _FP32_MAX_LOG, value)


_chunked(
    "bf16_gate_sums_64", "with the sums of log decays in a chunk of 64 tokens kept in bf16", _with_bf16_sums, 64,
    longer_than(1), decays, regime="strong",
)  # fmt: skip
_chunked(
    "factors_clipped_16", "with exp(-G) in a chunk of 16 tokens clipped to the largest fp16",
    partial(_factors, change=_clipped), 16, _sums_below(-11.1, 16), family="saturated_gate",
)  # fmt: skip
_chunked(
    "factors_infinite_64", "with exp(-G) in a chunk of 64 tokens, which overflows",
    partial(_factors, change=partial(_where_overflown, value=torch.inf)), 64, _sums_below(-_FP32_MAX_LOG, 64),
    family="saturated_gate",
)  # fmt: skip
_chunked(
    "factors_zeroed_64", "with exp(-G) in a chunk of 64 tokens, and 0 where it overflows",
    partial(_factors, change=partial(_where_overflown, value=0.0)), 64, _sums_below(-_FP32_MAX_LOG, 64),
    family="saturated_gate",
)  # fmt: skip
