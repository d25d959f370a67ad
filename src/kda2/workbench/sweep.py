"""Faults that come only with some shape: many shapes, each asked several times and judged, and the smallest that fails.

Three kinds of shape: batches of one after another size, primes and more sequences than a GPU has multiprocessors among
them; lengths around the edges of tiles; heads and value heads. Then shapes drawn from all of these together, since a
fault may need two of them at once. What fails is made smaller, one dimension after another, as long as it fails; its
neighbours then tell which dimension the fault comes with.

Answers that differ between two calls with the same inputs are told. They are a fault only beyond the limits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kda2.errors import UnsupportedTarget
from kda2.testing import Problem, error, fingerprint, judge, make, oracle, poisoned_memory
from kda2.testing.oracle import Outputs

Run = Callable[..., Outputs]
EDGES = (16, 32, 64, 128)
HEADS = ((1, 1), (1, 2), (2, 2), (1, 3), (3, 3), (2, 6), (5, 5), (1, 8), (7, 7))
# Sequences beyond these of every GPU's multiprocessors, where there is none to ask.
_MANY = 149
# Tokens up to which the oracle goes one by one, by other code than the chunked implementations.
_RECURRENT = 640
# Shapes tried while a failing one is made smaller, more or less.
_MOST_PROBES = 80
OK, WRONG, RAISED, REFUSED = "ok", "wrong", "raised", "refused"
# Its multiples fall evenly between whole numbers.
_GOLDEN = 0.6180339887
_DIMENSIONS = ("B", "T", "H", "HV")


@dataclass(frozen=True, order=True)
class Shape:
    """B sequences of T tokens, H heads, HV value heads; packed ones have lengths of their own, T the longest."""

    B: int
    T: int
    H: int = 1
    HV: int = 1
    packed: bool = False

    def __str__(self) -> str:
        return f"B={self.B} T={self.T} H={self.H} HV={self.HV}{' packed' if self.packed else ''}"

    @property
    def size(self) -> int:
        return self.B * self.T * self.HV

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Of packed sequences: the first has T tokens, the others any number up to that, none among them."""
        if not self.packed:
            return None
        return tuple(self.T - int((self.T + 1) * (_GOLDEN * i % 1)) for i in range(self.B))

    def problem(self, base: Problem) -> Problem:
        return replace(base, B=self.B, T=self.T, H=self.H, HV=self.HV, lengths=self.lengths)


@dataclass(frozen=True)
class Tried:
    """What came of one shape. `margin` is the worst error over its limit; `spread` the largest relative difference
    between two answers to the same call, 0 if all have the same bits."""

    shape: Shape
    outcome: str
    says: str = ""
    margin: float | None = None
    spread: float = 0.0

    @property
    def failed(self) -> bool:
        return self.outcome in (WRONG, RAISED)


@dataclass(frozen=True)
class Swept:
    """All shapes in the order tried; the smallest failing one and what the fault comes with; why it ended early."""

    tried: tuple[Tried, ...]
    smallest: Tried | None
    comes_with: str
    stopped: str = ""

    @property
    def failing(self) -> list[Tried]:
        return [t for t in self.tried if t.failed]

    @property
    def nondeterministic(self) -> list[Tried]:
        return [t for t in self.tried if t.spread]

    def plain(self) -> dict[str, Any]:
        """As JSON has it: the failing, refused and nondeterministic shapes in full, the others counted."""
        told = [t for t in self.tried if t.outcome != OK or t.spread]
        return {
            "tried": len(self.tried), "failing": len(self.failing),
            "smallest": None if self.smallest is None else _plain(self.smallest),
            "comes_with": self.comes_with, "stopped": self.stopped, "shapes": [_plain(t) for t in told],
        }  # fmt: skip


def _plain(tried: Tried) -> dict[str, Any]:
    # a margin of what is not finite is infinite, which JSON has no word for
    margin = None if tried.margin is None or tried.margin == float("inf") else tried.margin
    return {**asdict(tried), "margin": margin}


def shapes(sms: int | None, draws: int, seed: int) -> list[Shape]:
    """What is tried, each shape once, small ones first. `sms` is the number of multiprocessors (None: no GPU, where
    lengths and batches stay small); `draws` shapes are drawn from all dimensions together."""
    many = (sms - 1, sms, sms + 1, 2 * sms + 1, 1009) if sms else (_MANY,)
    batches = (*range(1, 10), 11, 13, 16, 17, 31, 64, *many)
    lengths = [1, 2, *(edge + d for edge in (*EDGES, *((256, 512) if sms else ())) for d in (-1, 0, 1))]
    found = [Shape(B, 17 if B < _MANY else 5, packed=packed) for B in batches for packed in (False, True)]
    found += [Shape(B, T, 1, 2, packed) for T in lengths for B, packed in ((1, False), (3, True))]
    found += [Shape(2, 33, H, HV, packed) for H, HV in HEADS for packed in (False, True)]
    rng = random.Random(seed)
    for _ in range(draws):
        B, T = rng.choice(batches[:12]), rng.choice([rng.randint(1, 2 * max(lengths) // 3), *lengths])
        found.append(Shape(B, T, *rng.choice(HEADS), packed=rng.random() < 0.5))
    return sorted(dict.fromkeys(found), key=lambda s: (s.size, s))


def sweep(
    run: Run, base: Problem, every: Sequence[Shape], repeats: int = 3, budget_s: float = float("inf"),
    say: Callable[[Tried], None] = lambda tried: None, clock: Callable[[], float] = time.perf_counter,
) -> Swept:  # fmt: skip
    """Try `run`, which takes the arguments of `kda2.kda`, on every shape; sizes of channels, dtype, gate, device and
    seed are `base`'s. The budget holds for the shapes, not for making the failing one smaller."""
    start, tried, stopped = clock(), list[Tried](), ""
    for shape in every:
        if clock() - start > budget_s:
            stopped = f"stopped after {len(tried)} of {len(every)} shapes: budget"
            break
        tried.append(attempt(run, shape, base, repeats))
        say(tried[-1])
        if "CUDA error" in tried[-1].says:  # nothing runs on this device any more
            stopped = f"stopped after {len(tried)} of {len(every)} shapes: the GPU faulted at {shape}"
            return Swept(tuple(tried), tried[-1], f"{shape}, or an earlier shape whose fault showed late", stopped)
    first = min((t for t in tried if t.failed), key=lambda t: (t.shape.size, t.shape), default=None)
    if first is None:
        return Swept(tuple(tried), None, "", stopped)
    known = {t.shape: t for t in tried}
    smallest, comes_with = _shrunk(first, known, lambda shape: attempt(run, shape, base, repeats))
    return Swept(tuple(tried), smallest, comes_with, stopped)


def attempt(run: Run, shape: Shape, base: Problem, repeats: int) -> Tried:
    """Ask for one shape `repeats` times; fresh memory is NaN meanwhile. The worst answer counts."""
    kwargs = make(shape.problem(base))
    before, answers = fingerprint(kwargs), list[Outputs]()
    try:
        for _ in range(repeats):
            with poisoned_memory():
                got = run(**kwargs)
            if base.device.startswith("cuda"):
                torch.cuda.synchronize()
            if not any(_same(got, other) for other in answers):
                answers.append(got)
            if changed := [name for name, now in fingerprint(kwargs).items() if now != before[name]]:
                return Tried(shape, WRONG, f"it wrote into its inputs: {', '.join(changed)}")
    except (NotImplementedError, UnsupportedTarget) as e:
        return Tried(shape, REFUSED, _line(e))
    except Exception as e:  # any code may stand behind run
        return Tried(shape, RAISED, f"{type(e).__name__}: {_line(e)}")
    return _judged(shape, answers, kwargs)


def _judged(shape: Shape, answers: Sequence[Outputs], kwargs: Mapping[str, Any]) -> Tried:
    want = oracle(kwargs, "reference" if shape.T <= _RECURRENT else "torch")
    found = [c for got in answers for c in judge(got, want, kwargs)]
    worst = max(found, key=lambda c: c.margin)
    wrong = [c for c in found if not c.ok]
    says = wrong[0].explain() if wrong else ""
    if wrong and len(answers) > 1:
        says += f"; one of {len(answers)} different answers to the same call"
    spread = 0.0 if wrong else max((_spread(answers[0], other) for other in answers[1:]), default=0.0)
    return Tried(shape, WRONG if wrong else OK, says, worst.margin, spread)


def _same(a: Outputs, b: Outputs) -> bool:
    return all(_equal(x, y) for x, y in zip(a, b, strict=True))


def _equal(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    return x.shape == y.shape and x.dtype == y.dtype and bool(((x == y) | (x.isnan() & y.isnan())).all())


def _spread(a: Outputs, b: Outputs) -> float:
    return max(error(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None)


# --- making a failing shape smaller ---


def _shrunk(first: Tried, known: dict[Shape, Tried], ask: Callable[[Shape], Tried]) -> tuple[Tried, str]:
    """The smallest shape that still fails, reached from `first` one dimension at a time, and what it comes with."""

    def fails(shape: Shape) -> bool:
        if shape not in known:
            known[shape] = ask(shape)
        return known[shape].failed

    most, shape, last = len(known) + _MOST_PROBES, first.shape, None
    while shape != last and len(known) < most:
        last = shape
        shape = next((smaller for smaller in _smaller(shape) if fails(smaller)), shape)
    return known[shape], _comes_with(shape, fails)


def _smaller(shape: Shape) -> Iterator[Shape]:
    """Shapes below this one, the boldest step of each dimension first."""
    if shape.packed:
        yield replace(shape, packed=False)
    for name in ("B", "T"):
        value = getattr(shape, name)
        for n in sorted({n for n in (1, 2, 3, value // 4, value // 2, value - 2, value - 1) if 0 < n < value}):
            yield _with(shape, name, n)
    ratio = shape.HV // shape.H
    for H in sorted({H for H in (1, shape.H // 2, shape.H - 1) if 0 < H < shape.H}):
        yield replace(shape, H=H, HV=H * ratio)
    for less in sorted({r for r in (1, ratio // 2, ratio - 1) if 0 < r < ratio}):
        yield replace(shape, HV=shape.H * less)


def _comes_with(shape: Shape, fails: Callable[[Shape], bool]) -> str:
    """Each dimension with what its neighbours do: those that are right show what the fault needs."""
    needs, free = [], []
    for name in _DIMENSIONS:
        others = [s for s in _neighbours(shape, name) if not fails(s)]
        if others:
            needs.append(f"{name}={getattr(shape, name)} (right with {_values(others, name)})")
        else:
            free.append(name)
    if shape.packed:
        needs.append("packed sequences (right without)")
    if not needs:
        return f"any shape: the smallest, {shape}, and its neighbours fail alike"
    rest = f"; {', '.join(free)} {'does' if len(free) == 1 else 'do'} not matter" if free else ""
    return f"{', '.join(needs)}{rest}"


def _neighbours(shape: Shape, name: str) -> list[Shape]:
    """One less and one more of a dimension, as far as HV stays a multiple of H."""
    if name == "H":
        ratio = shape.HV // shape.H
        steps = [replace(shape, H=shape.H + d, HV=(shape.H + d) * ratio) for d in (-1, 1)]
    elif name == "HV":
        steps = [replace(shape, HV=shape.HV + d * shape.H) for d in (-1, 1)]
    else:
        steps = [_with(shape, name, getattr(shape, name) + d) for d in (-1, 1)]
    return [s for s in steps if min(s.B, s.T, s.H, s.HV) > 0]


def _with(shape: Shape, name: str, value: int) -> Shape:
    changed: dict[str, Any] = {name: value}
    return replace(shape, **changed)


def _values(shapes: Sequence[Shape], name: str) -> str:
    return " and ".join(f"{name}={getattr(s, name)}" for s in shapes)


def _line(e: BaseException) -> str:
    return (str(e).splitlines() or [""])[0]
