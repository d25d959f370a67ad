"""What a mutant is, the two tables of them, and how one gets there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from kda2.errors import InvalidValue
from kda2.testing.families import FAMILIES
from kda2.testing.inputs import Problem, as_step, make_step
from kda2.testing.oracle import Outputs
from kda2.testing.recurrence import (
    Arguments,
    Kwargs,
    Operands,
    Recur,
    Rule,
    evaluate,
    evaluate_step,
    lengths,
    recur,
)

Applies = Callable[[Kwargs], bool]
# What the problems that show mutants start from.
PROBLEM = Problem(T=40, H=2, HV=4, K=32, V=32)
STEP_PROBLEM = replace(PROBLEM, B=5, T=1)
# Pools of states: some slots belong to no row.
SLOTS = 7


@dataclass(frozen=True)
class Mutant:
    """A wrong KDA. `says` completes "it computes KDA ..."; `run` takes the arguments of `kda2.kda`, on the CPU;
    `applies` says whether they are such that the change can show. On `family`, for `PROBLEM` with `changes`, it exceeds
    a limit three times over, in bf16 and in fp32."""

    name: str
    says: str
    run: Callable[..., Outputs]
    applies: Applies
    family: str
    changes: Mapping[str, Any]

    def problem(self, **own: Any) -> Problem:
        """Where it shows; `own` may name a dtype, a seed, a device."""
        return replace(PROBLEM, **{**self.changes, **own})


@dataclass(frozen=True)
class StepMutant:
    """A wrong `kda2.kda_step`, as `Mutant` is a wrong `kda2.kda`. `run` takes its arguments and gives (o, state); it
    writes into nothing. With `indices`, one a row, the state is a pool of `SLOTS` slots."""

    name: str
    says: str
    run: Callable[..., tuple[Tensor, Tensor]]
    family: str
    changes: Mapping[str, Any]
    indices: tuple[int, ...] | None
    pad_slot: int

    def call(self, **own: Any) -> dict[str, Any]:
        """The arguments of a call that shows it; `own` may name a dtype, a seed, a device."""
        problem = replace(STEP_PROBLEM, **{**self.changes, **own})
        if self.indices is None:
            return as_step(FAMILIES[self.family].build(problem))
        return make_step(problem, slots=SLOTS, indices=self.indices, pad_slot=self.pad_slot)


MUTANTS: dict[str, Mutant] = {}
STEP_MUTANTS: dict[str, StepMutant] = {}


def register(
    name: str, says: str, run: Callable[..., Outputs], *applies: Applies, family: str = "random", **changes: Any
) -> None:
    """Put a mutant of `kda2.kda` into the table."""
    if name in MUTANTS:
        raise InvalidValue("name", "a new mutant's name", repr(name))
    _known(family)

    def all_apply(kwargs: Kwargs) -> bool:
        return all(condition(kwargs) for condition in applies)

    MUTANTS[name] = Mutant(name, says, run, all_apply, family, MappingProxyType(changes))


def register_step(
    name: str,
    says: str,
    run: Callable[..., tuple[Tensor, Tensor]],
    *,
    family: str = "random",
    indices: tuple[int, ...] | None = None,
    pad_slot: int = -1,
    **changes: Any,
) -> None:
    """Put a mutant of `kda2.kda_step` into the table. Pools come with the family `random` alone."""
    if name in STEP_MUTANTS:
        raise InvalidValue("name", "a new mutant's name", repr(name))
    _known(family)
    if indices is not None and family != "random":
        raise InvalidValue("family", "'random' for a pool of states", repr(family))
    STEP_MUTANTS[name] = StepMutant(name, says, run, family, MappingProxyType(changes), indices, pad_slot)


def _known(family: str) -> None:
    if family not in FAMILIES:
        raise InvalidValue("family", f"one of {', '.join(FAMILIES)}", repr(family))


def recurrence(name: str, says: str, over: Recur, *applies: Applies, **where: Any) -> None:
    """A mutant with another recurrence over each sequence."""
    register(name, says, lambda **kwargs: evaluate(kwargs, over), has_tokens, *applies, **where)


def call(name: str, says: str, arguments: Arguments, *applies: Applies, **where: Any) -> None:
    """A mutant that computes another call."""
    register(name, says, lambda **kwargs: evaluate(kwargs, arguments=arguments), *applies, **where)


# What does not look beyond a token is a mutant of both calls.


def token_rule(name: str, says: str, rule: Rule, *applies: Applies, **where: Any) -> None:
    """Another step of a token."""
    recurrence(name, says, partial(recur, rule=rule), *applies, **where)
    register_step(name, says, lambda **kwargs: evaluate_step(kwargs, rule=rule), **where)


def token_operands(name: str, says: str, operands: Operands, *applies: Applies, **where: Any) -> None:
    """The formula on other operands: what the options have made of the inputs is changed."""
    recurrence(name, says, lambda S, x: recur(S, operands(x)), *applies, **where)
    register_step(name, says, lambda **kwargs: evaluate_step(kwargs, operands=operands), **where)


def token_call(name: str, says: str, arguments: Arguments, *applies: Applies, **where: Any) -> None:
    """Another call, whose change is the same for tensors with an axis of tokens and without."""
    call(name, says, arguments, has_tokens, *applies, **where)
    register_step(name, says, lambda **kwargs: evaluate_step(kwargs, arguments=arguments), **where)


# When a change can show.


def has_tokens(kwargs: Kwargs) -> bool:
    return max(lengths(kwargs), default=0) > 0


def longer_than(count: int) -> Applies:
    return lambda kwargs: max(lengths(kwargs), default=0) > count


def asks(option: str) -> Applies:
    return lambda kwargs: bool(kwargs.get(option))


wants_state = asks("output_final_state")


def has_initial_state(kwargs: Kwargs) -> bool:
    state = kwargs.get("initial_state")
    return state is not None and state.numel() > 0


def has_heads(kwargs: Kwargs) -> bool:
    return bool(kwargs["v"].shape[-2] > 1)
