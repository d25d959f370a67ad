"""Mutants of `kda_step` alone: what a decode kernel does with its pool of states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda2.ops.kda.check import StepCall
from kda2.testing.mutants.sequences import from_state, other_layout
from kda2.testing.mutants.table import register_step
from kda2.testing.recurrence import Arguments, Kwargs, Slots, evaluate_step, slots_of

# Rows of `STEP_PROBLEM` in a pool of `SLOTS`, the last slot free: with a row of padding, and with slot 0 as padding.
_INDICES, _INDICES_0 = (4, -1, 0, 5, 2), (4, 0, 3, 5, 2)
StepOutputs = tuple[Tensor, Tensor]


def _reading(slots: Slots) -> Any:
    return lambda **kwargs: evaluate_step(kwargs, reads=slots)


def _writing(slots: Slots) -> Any:
    return lambda **kwargs: evaluate_step(kwargs, writes=slots)


def _both(slots: Slots) -> Any:
    return lambda **kwargs: evaluate_step(kwargs, reads=slots, writes=slots)


def _rows(call: StepCall) -> Tensor:
    return torch.arange(len(call.q)).masked_fill(slots_of(call) < 0, -1)


def _next_slots(call: StepCall) -> Tensor:
    slots = slots_of(call)
    return torch.where(slots < 0, slots, (slots + 1) % len(call.state))


def _none(call: StepCall) -> Tensor:
    return torch.full_like(slots_of(call), -1)


def _wrapped(call: StepCall) -> Tensor:
    """-1 is the last slot, as Python counts."""
    return slots_of(call) % len(call.state)


def _as_named(call: StepCall) -> Tensor:
    assert call.state_indices is not None
    return call.state_indices.long()


def _first_slot(call: StepCall) -> Tensor:
    slots = slots_of(call)
    return slots[:1].expand_as(slots).masked_fill(slots < 0, -1)


def _from(arguments: Arguments) -> Any:
    return lambda **kwargs: evaluate_step(kwargs, arguments=arguments)


def _state_transposed(**kwargs: Any) -> StepOutputs:
    o, state = evaluate_step(kwargs)
    return o, other_layout(state)


def _pool_cleared(**kwargs: Any) -> StepOutputs:
    o, state = evaluate_step(kwargs)
    free = torch.ones(len(state), dtype=torch.bool)
    free[_live(kwargs)] = False
    return o, state.masked_fill(free[:, None, None, None], 0.0)


def _live(kwargs: Kwargs) -> Tensor:
    named: Tensor = kwargs["state_indices"]
    return named[named != kwargs["pad_slot"]].long()


def _padding_unwritten(**kwargs: Any) -> StepOutputs:
    o, state = evaluate_step(kwargs)
    o[kwargs["state_indices"] == kwargs["pad_slot"]] = torch.nan
    return o, state


register_step("state_kept", "without writing the new state", _writing(_none))
register_step("no_state", "with a state of zeros before the token", _from(from_state(torch.zeros_like, "state")))
register_step("state_read_transposed", "with the state read in the other layout",
              _from(from_state(other_layout, "state")))  # fmt: skip
register_step("state_written_transposed", "with the state written in the other layout", _state_transposed)
register_step("slots_ignored", "with row b in slot b, whatever slot it names", _both(_rows), indices=_INDICES)
register_step("read_from_row", "with row b's state read from slot b", _reading(_rows), indices=_INDICES)
register_step("written_to_row", "with row b's state written to slot b", _writing(_rows), indices=_INDICES)
register_step("state_of_next_slot", "with each state read from the slot after its own", _reading(_next_slots),
              indices=_INDICES)  # fmt: skip
register_step("state_of_first_row", "with the first row's state read for every row", _reading(_first_slot),
              indices=_INDICES)  # fmt: skip
register_step("padding_wraps", "with rows of slot -1 in the last slot of the pool", _both(_wrapped), indices=_INDICES)
register_step("pad_slot_ignored", "with rows of the pad slot computed like others", _both(_as_named),
              indices=_INDICES_0, pad_slot=0)  # fmt: skip
register_step("padding_unwritten", "with o of padded rows never written", _padding_unwritten, indices=_INDICES)
register_step("pool_cleared", "with zeros in the slots that no row names", _pool_cleared, indices=_INDICES)
