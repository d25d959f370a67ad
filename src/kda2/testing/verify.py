"""Judging an implementation: run it on a family's inputs, hold every output to the oracle, within the op's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kda2.contract import Tolerance
from kda2.errors import InvalidValue
from kda2.memory import fingerprint
from kda2.ops.kda import kda_step
from kda2.testing.compare import ROW_AXES, STATE_AXES, TOKEN_AXES, Comparison, compare
from kda2.testing.families import FAMILIES, Family
from kda2.testing.inputs import Problem
from kda2.testing.limits import (
    CEILING_ELEMENT,
    CEILING_L2,
    NAMES,
    ROUNDINGS_FACTOR,
    ZERO_BY_NATURE,
    copies_needed,
    expected,
    finite_rms,
    own_limits,
    random_rms,
    with_signs,
    yardstick,
)
from kda2.testing.oracle import Outputs, upcast

__all__ = [
    "CEILING_ELEMENT", "CEILING_L2", "INPUTS", "NAMES", "ROUNDINGS_FACTOR", "Trial", "Verdict", "call_trial",
    "expected", "judge", "judge_step", "trial", "verify", "verify_call",
]  # fmt: skip

INPUTS = "inputs"  # the quantity under which changed inputs are told


@dataclass(frozen=True)
class Verdict:
    """The comparisons of one run on one family, o first, then the final state."""

    family: str
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.comparisons)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def margin(self) -> float:
        """The worst error over its limit."""
        return max(c.margin for c in self.comparisons)

    def explain(self) -> str:
        return "\n".join(f"[{self.family}] {c.explain()}" for c in self.comparisons)

    __str__ = explain


@dataclass(frozen=True)
class Trial:
    """One call of `kda2.kda` with its right answer and the limits that it is held to: all that a judge needs, and
    nothing of what is judged. `spoilt`: the sequence whose inputs are NaN, which is not compared."""

    name: str
    kwargs: Mapping[str, Any]
    want: Outputs
    limits: tuple[Tolerance, ...]
    floors: tuple[float, float] | None = None
    spoilt: int | None = None

    def judge(self, got: Outputs, changed: Sequence[str] = ()) -> Verdict:
        """Hold (o, final state) to the answer; `changed` names the inputs that were written to."""
        want, kwargs = self.want, self.kwargs
        if self.spoilt is not None:
            got, want, kwargs = _without(self.spoilt, got, want, kwargs)
        found = judge(got, want, kwargs, self.limits, self.floors)
        spoils = (_failed(INPUTS, f"changed: {', '.join(changed)}"),) if changed else ()
        return Verdict(self.name, (*found, *spoils))


def trial(family: str | Family, problem: Problem) -> Trial:
    """The family's call for `problem`. Raises `InvalidValue` for an unknown family."""
    if isinstance(family, str) and family not in FAMILIES:
        raise InvalidValue("family", f"one of {', '.join(FAMILIES)}", repr(family))
    chosen = FAMILIES[family] if isinstance(family, str) else family
    kwargs = chosen.build(problem)
    want = expected(kwargs)
    by = yardstick(kwargs, want, chosen.name, amplifies=chosen.judge == "same_roundings")
    return Trial(chosen.name, kwargs, want, by.limits, least(by.floors, chosen, problem), chosen.spoilt)


def call_trial(name: str, kwargs: Mapping[str, Any]) -> Trial:
    """The call `kwargs`, under the op's own limits."""
    want = expected(kwargs)
    by = yardstick(kwargs, want)
    return Trial(name, kwargs, want, by.limits, by.floors)


def verify(run: Callable[..., Outputs], family: str | Family, problem: Problem) -> Verdict:
    """Hold `run(**kwargs) -> (o, final state or None)`, which takes the arguments of `kda2.kda`, to `family`."""
    return _tried(run, trial(family, problem))


def verify_call(run: Callable[..., Outputs], name: str, kwargs: Mapping[str, Any]) -> Verdict:
    """As `verify`, on the call `kwargs`, under the op's own limits."""
    return _tried(run, call_trial(name, kwargs))


def _tried(run: Callable[..., Outputs], on: Trial) -> Verdict:
    before = fingerprint(on.kwargs)
    got = run(**on.kwargs)
    return on.judge(got, [name for name, now in fingerprint(on.kwargs).items() if now != before[name]])


def judge(
    got: Outputs,
    want: Outputs,
    kwargs: Mapping[str, Any],
    limits: Sequence[Tolerance] = (),
    floors: tuple[float, float] | None = None,
) -> tuple[Comparison, ...]:
    """Compare (o, final state) with what is wanted for the call `kwargs`, under the op's own limits unless others are
    given. `floors`: the RMS that o and the state are at least taken to have (see `kda2.testing.limits`)."""
    if not limits:
        by = yardstick(kwargs, want)
        limits, floors = by.limits, floors or by.floors
    least_o, least_state = floors or (0.0, 0.0)
    offsets, dtype = kwargs.get("cu_seqlens"), kwargs["v"].dtype
    o = compare(got[0], want[0], limits[0], axes=TOKEN_AXES, cu_seqlens=offsets, dtype=dtype, floor=least_o)
    if want[1] is None:
        return (o,) if got[1] is None else (o, _failed("final state", "wanted None, as none was asked for"))
    initial = kwargs.get("initial_state")
    dtype = torch.float32 if initial is None else initial.dtype
    axes = STATE_AXES[kwargs.get("state_layout", "kv")]
    if got[1] is None:
        return o, compare(torch.empty(0), want[1], limits[1], quantity="final state", axes=axes)
    return o, compare(got[1], want[1], limits[1], quantity="final state", axes=axes, dtype=dtype, floor=least_state)


def judge_step(got: tuple[Tensor, Tensor], kwargs: Mapping[str, Any]) -> tuple[Comparison, ...]:
    """Compare what `kda2.kda_step` gave with the fp64 recurrence. `kwargs` must hold the state as it was before."""
    want = _stepped(kwargs)
    axes = ("slot", *STATE_AXES[kwargs.get("state_layout", "kv")][1:])
    floors = _step_floors(kwargs, want)
    o = compare(got[0], want[0], own_limits(kwargs, "o"), axes=ROW_AXES, dtype=kwargs["v"].dtype, floor=floors[0])
    limits, dtype = own_limits({**kwargs, "initial_state": kwargs["state"]}, "final_state"), kwargs["state"].dtype
    return o, compare(got[1], want[1], limits, quantity="state", axes=axes, dtype=dtype, floor=floors[1])


def _stepped(kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    before = {name: x for name, x in kwargs.items() if name != "out"}
    return kda_step(**{**upcast(before), "inplace": False, "impl": "reference"})


def _step_floors(kwargs: Mapping[str, Any], want: tuple[Tensor, Tensor]) -> tuple[float, float]:
    count = copies_needed(kwargs, want)
    if not count:
        return 0.0, 0.0
    o, state = _stepped(with_signs(kwargs, count))
    return finite_rms(o), finite_rms(state)


def least(floors: tuple[float, float], family: Family, problem: Problem) -> tuple[float, float]:
    """`floors`, and no less than `ZERO_BY_NATURE` of what the outputs have for random inputs."""
    if family.name == "random":
        return floors
    o, state = random_rms(problem)
    return max(floors[0], ZERO_BY_NATURE * o), max(floors[1], ZERO_BY_NATURE * state)


def _failed(quantity: str, why: str) -> Comparison:
    return Comparison(quantity, 0.0, 0.0, 0.0, None, 0, 0, mismatch=why)


def _without(
    spoilt: int, got: Outputs, want: Outputs, kwargs: Mapping[str, Any]
) -> tuple[Outputs, Outputs, dict[str, Any]]:
    """Outputs of a packed call with one sequence cut out, and the offsets of what is left. An output of another shape
    than is wanted stays as it is, beside the whole of what is wanted: it fails for its shape."""
    cu = kwargs["cu_seqlens"]
    start, end = int(cu[spoilt]), int(cu[spoilt + 1])
    others = torch.tensor([n for n in range(len(cu) - 1) if n != spoilt])
    offsets = torch.cat([cu[: spoilt + 1], cu[spoilt + 2 :] - (end - start)])

    def cut(x: Any, ref: Tensor | None, is_state: bool) -> Any:
        if ref is None or not isinstance(x, Tensor) or x.shape != ref.shape:
            return x
        return x[others.to(x.device)] if is_state else torch.cat([x[:, :start], x[:, end:]], dim=1)

    left = [(cut(x, ref, i == 1), cut(ref, x, i == 1)) for i, (x, ref) in enumerate(zip(got, want, strict=True))]
    return (left[0][0], left[1][0]), (left[0][1], left[1][1]), {**kwargs, "cu_seqlens": offsets}
