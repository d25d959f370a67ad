"""Mutants that differ in the states and bounds of whole sequences, or miss a part of the tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda2.ops.kda.transforms import Transformed
from kda2.testing.mutants.table import (
    call,
    has_heads,
    has_initial_state,
    has_tokens,
    recurrence,
    register,
    wants_state,
)
from kda2.testing.mutants.tokens import decays
from kda2.testing.oracle import Outputs
from kda2.testing.recurrence import Arguments, Kwargs, evaluate, lengths, recur, tokens

# Channels of a tile: what is left of K or V beyond whole ones is easily forgotten.
TILE = 16
PACKED: dict[str, Any] = {"lengths": (9, 7)}


def _has_sequences(kwargs: Kwargs) -> bool:
    return len(lengths(kwargs)) > 1


def _hands_on(kwargs: Kwargs) -> bool:
    """Some sequence ends in a state that is not the next one's initial state."""
    return _has_sequences(kwargs) and (has_initial_state(kwargs) or max(lengths(kwargs)[:-1]) > 0)


def _has_matrices(kwargs: Kwargs) -> bool:
    """There are states, and transposed they are others."""
    return bool(lengths(kwargs) and kwargs["k"].shape[-1] > 1 and kwargs["v"].shape[-1] > 1)


# The initial state.


def from_state(change: Callable[[Tensor], Tensor], name: str = "initial_state") -> Arguments:
    return lambda kwargs: {**kwargs, name: change(kwargs[name])}


def other_layout(state: Tensor) -> Tensor:
    """What is read from memory that holds each matrix transposed."""
    return state.mT.contiguous().view(state.shape)


def _without_half(kwargs: dict[str, Any]) -> dict[str, Any]:
    state, K = kwargs["initial_state"].clone(), kwargs["k"].shape[-1]
    (state if kwargs.get("state_layout", "kv") == "kv" else state.mT)[..., K // 2 :, :] = 0
    return {**kwargs, "initial_state": state}


def _undecayed(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    g = x.g.clone()
    g[:1] = 0.0
    return recur(S, x._replace(g=g))


call("no_initial_state", "without the initial state", from_state(torch.zeros_like), has_initial_state)
call(
    "initial_state_transposed", "with the initial state read in the other layout", from_state(other_layout),
    has_initial_state, _has_matrices,
)  # fmt: skip
call(
    "initial_state_of_sequence_0", "with the initial state of sequence 0 in every sequence",
    from_state(lambda state: state[:1].expand_as(state)), has_initial_state, _has_sequences, **PACKED,
)  # fmt: skip
call(
    "initial_state_of_neighbour", "with the initial state of another head in each head",
    from_state(lambda state: state.roll(1, 1)), has_initial_state, has_heads,
)  # fmt: skip
call(
    "initial_state_halved", "without the second half of the initial state's key channels", _without_half,
    has_initial_state,
)  # fmt: skip
recurrence(
    "initial_state_undecayed", "without the decay of the initial state by the first token", _undecayed,
    has_initial_state, decays, regime="strong",
)  # fmt: skip


# The final state.


def _without_last_token(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    return recur(S, x)[0], recur(S, tokens(x, 0, -1))[1]


def _final_transposed(**kwargs: Any) -> Outputs:
    o, state = evaluate(kwargs)
    return o, None if state is None else other_layout(state)


def _final_is_initial(**kwargs: Any) -> Outputs:
    return evaluate(kwargs)[0], kwargs["initial_state"].clone()


def _empty_is_zero(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    return recur(S, x) if len(x.q) else (x.v, torch.zeros_like(S))


def _empty_is_zero_run(**kwargs: Any) -> Outputs:
    return evaluate(kwargs, _empty_is_zero)


def _has_empty(kwargs: Kwargs) -> bool:
    return 0 in lengths(kwargs)


recurrence("final_state_early", "with a final state that lacks the last token", _without_last_token, wants_state)
register(
    "final_state_transposed", "with the final state written in the other layout", _final_transposed,
    wants_state, _has_matrices,
)  # fmt: skip
register(
    "final_state_is_initial", "with the initial state returned as the final one", _final_is_initial,
    has_tokens, wants_state, has_initial_state,
)  # fmt: skip
register(
    "empty_sequence_zero", "with a final state of zeros where a sequence has no token", _empty_is_zero_run,
    _has_empty, wants_state, has_initial_state, lengths=(9, 0, 7),
)  # fmt: skip


# Bounds: what a sequence takes from its neighbours.


def _to_the_end(kwargs: dict[str, Any]) -> dict[str, Any]:
    offsets = kwargs["cu_seqlens"].clone()
    offsets[-1] = kwargs["q"].shape[1]
    return {**kwargs, "cu_seqlens": offsets}


def _has_tail(kwargs: Kwargs) -> bool:
    return bool(lengths(kwargs)) and sum(lengths(kwargs)) < kwargs["q"].shape[0] * kwargs["q"].shape[1]


def _has_tokens_before(kwargs: Kwargs) -> bool:
    """Some sequence that another's token goes before has one of its own, or hands a state on."""
    return _has_sequences(kwargs) and sum(lengths(kwargs)[:-1]) > 0


def _has_tokens_after(kwargs: Kwargs) -> bool:
    return _has_sequences(kwargs) and sum(lengths(kwargs)[1:]) > 0 and wants_state(kwargs)


register(
    "sequences_joined", "with each sequence started from the state in which the one before ended",
    lambda **kwargs: evaluate(kwargs, joined=True), _hands_on, **PACKED,
)  # fmt: skip
register(
    "starts_a_token_early", "with the last token of the sequence before as each sequence's first",
    lambda **kwargs: evaluate(kwargs, reach=(1, 0)), _has_tokens_before, **PACKED,
)  # fmt: skip
register(
    "ends_a_token_late", "with the first token of the next sequence in each final state",
    lambda **kwargs: evaluate(kwargs, reach=(0, 1)), _has_tokens_after, **PACKED,
)  # fmt: skip
call(
    "tail_owned", "with the tokens past the last offset taken for the last sequence's", _to_the_end, _has_tail,
    tail=3, **PACKED,
)  # fmt: skip


# Parts that are missing, or another's.


def _without_last_columns(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    V = x.v.shape[-1]
    keep = torch.arange(V) < (V - V % TILE or V)
    return recur(S * keep, x._replace(v=x.v * keep))


def _without_last_channels(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    K = x.k.shape[-1]
    keep = torch.arange(K) < (K - K % TILE or K)
    return recur(S, x._replace(q=x.q * keep, k=x.k * keep))


def _last_column_repeats(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    columns = torch.arange(x.v.shape[-1])
    columns[-1] -= 1
    return recur(S, x._replace(v=x.v[..., columns]))


def _without_last_row(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    o, after = recur(S, x)
    o[-1:] = 0.0
    return o, after


def _without_last_head(S: Tensor, x: Transformed) -> tuple[Tensor, Tensor]:
    o, after = recur(S, x)
    o[:, -1], after[-1] = 0.0, S[-1]
    return o, after


def _nan_columns(**kwargs: Any) -> Outputs:
    o, state = evaluate(kwargs)
    o[..., ::2] = torch.nan
    return o, state


def _has_rest(name: str) -> Callable[[Kwargs], bool]:
    """The last axis of `name` holds whole tiles and a part of one."""
    return lambda kwargs: bool(kwargs[name].shape[-1] > TILE and kwargs[name].shape[-1] % TILE)


def _has_columns(kwargs: Kwargs) -> bool:
    return bool(kwargs["v"].shape[-1] > 1)


recurrence(
    "last_columns_skipped", f"without the value channels past the last whole {TILE}", _without_last_columns,
    _has_rest("v"), V=36,
)  # fmt: skip
recurrence(
    "last_channels_skipped", f"without the key channels past the last whole {TILE}", _without_last_channels,
    _has_rest("k"), K=36,
)  # fmt: skip
recurrence("last_column_repeats", "with the values of the last but one channel in the last", _last_column_repeats,
           _has_columns)  # fmt: skip
recurrence("last_row_unwritten", "with o of each sequence's last token left at 0", _without_last_row)
recurrence("last_head_skipped", "without the last head: its o is 0, its state the initial one", _without_last_head,
           has_heads)  # fmt: skip
register("nan_columns", "with NaN in every second channel of o", _nan_columns, has_tokens)
