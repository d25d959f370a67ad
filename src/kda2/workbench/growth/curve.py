"""Relative error against the length of the sequence, for any implementation and several gates.

All lengths of a curve are beginnings of one sequence, so that neighbouring points differ by what the tokens between
them add. The oracle, chunks in fp64, walks that sequence once and hands its state on; the implementation starts from
zero every time, since that is what is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from kda2.errors import InvalidValue, KDA2Error
from kda2.testing import Problem, error, make, oracle
from kda2.testing.inputs import Regime
from kda2.testing.oracle import Outputs
from kda2.testing.verify import NAMES
from kda2.workbench.growth.fit import Fit, fit
from kda2.workbench.journal import Journal
from kda2.workbench.profiler.environment import machine, utc_now
from kda2.workbench.records import Record

GATES: tuple[Regime, ...] = get_args(Regime)
KIND = "growth"
# The last tokens of a sequence, where what has piled up shows; an error over all of them hides it among the first.
TAIL = 64
WHOLE, LAST, STATE = "o", f"o, last {TAIL} tokens", "final state"
_BY_TOKEN = ("q", "k", "v", "g", "beta")
Run = Callable[..., Outputs]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is measured: the problem's sizes, dtype, device and seed (one sequence; its T, state and regime are the
    curves' own), the gates, the lengths in increasing order, and the seconds that all of it may take."""

    problem: Problem
    gates: tuple[Regime, ...]
    tokens: tuple[int, ...]
    budget_s: float = math.inf

    def __post_init__(self) -> None:
        if unknown := [g for g in self.gates if g not in GATES]:
            raise InvalidValue("gates", f"among {', '.join(GATES)}", repr(unknown[0]))
        if not self.gates or not self.tokens or any(b <= a for a, b in pairwise((0, *self.tokens))):
            raise InvalidValue("tokens", "lengths above 0 in increasing order, and a gate", f"{self.tokens}")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Point(_Part):
    """Relative L2 errors at one length, by quantity; None where something was not finite."""

    tokens: int
    errors: dict[str, float | None]
    seconds: float


class Curve(_Part):
    """One gate. `ended` says why lengths are missing, "" if none is."""

    gate: str
    points: tuple[Point, ...]
    fits: dict[str, Fit]
    ended: str = ""
    failed: bool = False


class Growth(Record):
    """The curves of one implementation: a ledger's line of kind "growth". Sizes are those of the one sequence."""

    utc: str
    name: str
    sizes: dict[str, int]
    dtype: str
    seed: int
    environment: dict[str, Any]
    curves: tuple[Curve, ...]

    @property
    def failed(self) -> bool:
        return any(curve.failed for curve in self.curves)


def doublings(text: str) -> tuple[int, ...]:
    """The lengths of a range such as 64:65536, each twice the one before. Raises `InvalidValue`."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise InvalidValue("--tokens", "a range such as 64:65536", repr(text))
    return tuple(int(first) << i for i in range((int(last) // int(first)).bit_length()))


def measure(
    run: Run, name: str, plan: Plan, say: Say, journal: Journal | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Growth:  # fmt: skip
    """The curves of `run`, which takes the arguments of `kda2.kda`. What it raises ends a curve, unless it is kda2's
    own error before the first point; the budget ends one too, with a share for each gate that is left."""
    p, start, curves = plan.problem, clock(), list[Curve]()
    for i, gate in enumerate(plan.gates):
        until = start + plan.budget_s * (i + 1) / len(plan.gates)
        curves.append(_curve(run, gate, plan, until, say, clock))
    sizes = {"H": p.H, "HV": p.HV, "K": p.K, "V": p.V}
    growth = Growth(
        utc=utc_now(), name=name, sizes=sizes, dtype=NAMES[p.dtype], seed=p.seed,
        environment=machine(torch.device(p.device)), curves=tuple(curves),
    )  # fmt: skip
    if journal is not None:
        journal.note(KIND, growth.model_dump(mode="json", by_alias=True))
    return growth


def _curve(run: Run, gate: Regime, plan: Plan, until: float, say: Say, clock: Callable[[], float]) -> Curve:
    longest = replace(plan.problem, lengths=None, B=1, T=plan.tokens[-1], tail=0, regime=gate, state=None)
    kwargs = make(replace(longest, final_state=True))
    right, points, ended, failed = _Oracle(kwargs), list[Point](), "", False
    for T in plan.tokens:
        began = clock()
        if points and (late := began + points[-1].seconds * T / points[-1].tokens - until) > 0:
            ended = f"stopped at T={points[-1].tokens}: budget, which T={T} would exceed by about {late:.0f} s"
            break
        try:
            if not points:  # the first call may compile, which longer ones need not
                run(**_first(kwargs, 0, T))
                began = clock()
            errors = _errors(run(**_first(kwargs, 0, T)), right.to(T))
        except Exception as e:  # any code may stand behind run
            if isinstance(e, KDA2Error) and not points:
                raise
            ended, failed = f"stopped before T={T}: it raised {type(e).__name__}: {_line(e)}", True
            break
        points.append(Point(tokens=T, errors=errors, seconds=clock() - began))
        say(f"{gate} T={T}: " + ", ".join(f"{n} {number(x)}" for n, x in errors.items()))
        if None in errors.values():
            ended, failed = f"stopped at T={T}: not finite", True
            break
    return Curve(gate=gate, points=tuple(points), fits=_fits(points), ended=ended, failed=failed)


class _Oracle:
    """The right answer for ever longer beginnings of one sequence."""

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        self.kwargs, self.tokens = kwargs, 0
        self.o: list[Tensor] = []
        self.state: Tensor | None = None

    def to(self, T: int) -> Outputs:
        """(o, final state) of the first T tokens, no fewer than asked for before."""
        part = {**_first(self.kwargs, self.tokens, T), "initial_state": self.state}
        o, self.state = oracle(part, impl="torch")
        self.o, self.tokens = [torch.cat([*self.o, o], dim=1)], T
        return self.o[0], self.state


def _first(kwargs: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    return {n: x[:, start:end] if n in _BY_TOKEN else x for n, x in kwargs.items()}


def _errors(got: Outputs, want: Outputs) -> dict[str, float | None]:
    pairs = {WHOLE: (got[0], want[0]), LAST: (got[0][:, -TAIL:], want[0][:, -TAIL:]), STATE: (got[1], want[1])}
    found = {name: _error(name, a, b) for name, (a, b) in pairs.items()}
    return {name: x if math.isfinite(x) else None for name, x in found.items()}


def _error(name: str, got: Tensor | None, want: Tensor | None) -> float:
    if got is None or want is None or got.shape != want.shape:
        shape = None if got is None else tuple(got.shape)
        raise ValueError(f"{name} has shape {shape}, wanted {None if want is None else tuple(want.shape)}")
    return error(got, want)


def _fits(points: Sequence[Point]) -> dict[str, Fit]:
    finite = [p for p in points if None not in p.errors.values()]
    names = finite[0].errors if finite else ()
    return {n: fit([p.tokens for p in finite], [p.errors[n] or 0.0 for p in finite]) for n in names}


def number(x: float | None) -> str:
    """An error as text; None was not finite."""
    return "not finite" if x is None else f"{x:.2e}"


def _line(e: BaseException) -> str:
    return (str(e).splitlines() or [""])[0]
