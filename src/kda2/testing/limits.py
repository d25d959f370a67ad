"""What an output is held to: the op's calibrated limits, and for calls of few numbers a yardstick of their own.

A relative error says something where many numbers average out. The only token of a call may have q . k close to 0 by
chance, and then any rounding is large beside its output; a state of one key channel may be erased to its last digits.
Such a call is compared with copies of itself that have other signs in q and v: everything that is summed is as large as
before, and only the luck of the sum is another. The copies say how large the outputs are on the average, which is the
least that errors are relative to, and what roundings do to so few numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kda2.contract import Tolerance
from kda2.ops.kda.gate import Gate
from kda2.ops.kda.spec import KDA
from kda2.testing.compare import rms
from kda2.testing.inputs import Problem, make
from kda2.testing.oracle import Outputs, oracle, same_roundings

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
COARSEST = tuple(NAMES)  # first
OUTPUTS = ("o", "final_state")
# Longer ones get the oracle's chunked form in fp64, which agrees with the token recurrence to 1e-12.
RECURRENT_TOKENS = 640
ROUNDINGS_FACTOR = 2.0
# Kernels multiply fp32 operands as three products of tf32 terms, good to 2^-21 where fp32 is to 2^-24 (8 times), and
# merge inverses block by block, which for near-singular chunks is 10 times coarser than substitution.
FP32_KERNEL_OVER_REFERENCE = 32.0
# No rounding excuses more than this, in relative L2 and in RMS per element: a reference that diverges excuses nothing.
# (The worst that was seen of one that does not: 0.15, for repeated keys with negative eigenvalues in fp16.)
CEILING_L2, CEILING_ELEMENT = 0.2, 1.0
# Rows of o (a token of a head), and elements of a state, over which the luck of a sum averages out.
ENOUGH = 64
# With fewer key channels the keys of a chunk are close to parallel whatever they are, which amplifies roundings.
ENOUGH_CHANNELS = 24
# Tokens of a chunk, as kernels have them: where roundings are amplified, it matters which.
CHUNKS = (16, 32, 64)
# Part of what the same output has for random inputs: where it is zero by nature, errors are relative to that.
ZERO_BY_NATURE = 1e-3


# (relative L2, element) for each output that there is
Pairs = list[tuple[float, float]]


@dataclass(frozen=True)
class Yardstick:
    """Limits of o, then of the final state if there is one; and the RMS that each of them is at least taken to have."""

    limits: tuple[Tolerance, ...]
    floors: tuple[float, float]


def yardstick(kwargs: Mapping[str, Any], want: Outputs, family: str = "", amplifies: bool = False) -> Yardstick:
    """What the outputs of the call `kwargs` are held to; `want` is the oracle's answer.

    `amplifies`: the inputs amplify every rounding. Then, and in calls of few numbers, the limits are twice the error of
    the reference with the same roundings where that is larger than the op's own.
    """
    limits = tuple(own_limits(kwargs, name, family) for name, x in zip(OUTPUTS, want, strict=True) if x is not None)
    floors, worst = (0.0, 0.0), [(0.0, 0.0) for _ in limits]
    if count := copies_needed(kwargs, want):
        signed = with_signs(kwargs, count)
        right = expected(signed)
        floors = finite_rms(right[0]), finite_rms(right[1])
        worst = _larger(worst, _worst(signed, right, count, floors))
    if amplifies:
        worst = _larger(worst, _worst(kwargs, want, 1, floors))
    if amplifies or count:
        factor = rounding_factor(kwargs["q"].dtype)
        limits = tuple(widened(limit, *errors, factor) for limit, errors in zip(limits, worst, strict=True))
    return Yardstick(limits, floors)


def _larger(a: Pairs, b: Pairs) -> Pairs:
    return [(max(x[0], y[0]), max(x[1], y[1])) for x, y in zip(a, b, strict=True)]


def expected(kwargs: Mapping[str, Any]) -> Outputs:
    """The oracle's outputs for a call."""
    return oracle(kwargs, "reference" if kwargs["q"].shape[1] <= RECURRENT_TOKENS else "torch")


def own_limits(kwargs: Mapping[str, Any], output: str, family: str = "") -> Tolerance:
    """The op's tolerance for an output ("o", "final_state"); a state that is stored in fewer digits than the inputs
    have is held to the limits of its own dtype."""
    initial, dtypes = kwargs.get("initial_state"), [kwargs["v"].dtype]
    if output == "final_state" and initial is not None:
        dtypes.append(initial.dtype)
    return KDA.tolerance(NAMES[min(dtypes, key=COARSEST.index)], family, output)


def copies_needed(kwargs: Mapping[str, Any], want: Outputs) -> int:
    """How many copies with other signs the call needs, so that they have `ENOUGH` numbers; 0 if it has them itself."""
    K = kwargs["q"].shape[-1]
    numbers = [x.numel() for x in (kwargs["beta"], want[1]) if x is not None]
    if K < ENOUGH_CHANNELS:  # columns of a state share the luck of the keys
        numbers += [n // kwargs["v"].shape[-1] for n in numbers[1:]]
    fewest = min(numbers)
    if not fewest or (fewest >= ENOUGH and K >= ENOUGH_CHANNELS):
        return 0
    return -(-ENOUGH // fewest)


def with_signs(kwargs: Mapping[str, Any], count: int) -> dict[str, Any]:
    """A call of `kda` or `kda_step` with the heads of `count` copies, each with signs of its own in q and v."""
    rng = torch.Generator().manual_seed(0x516)
    axes = {"q": -2, "k": -2, "v": -2, "g": -2, "beta": -1, "initial_state": 1, "state": 1}
    copies = dict(kwargs)
    for name, axis in axes.items():
        if isinstance(x := kwargs.get(name), Tensor):
            copies[name] = torch.cat([x] * count, dim=axis)
    for name in ("q", "v"):
        signs = 2 * torch.randint(2, copies[name].shape, generator=rng) - 1
        copies[name] = copies[name] * signs.to(copies[name])
    if isinstance(gate := kwargs.get("gate"), Gate):
        A_log, dt_bias = (None if x is None else torch.cat([x] * count) for x in (gate.A_log, gate.dt_bias))
        copies["gate"] = replace(gate, A_log=A_log, dt_bias=dt_bias)
    return copies


def _worst(kwargs: Mapping[str, Any], want: Outputs, count: int, floors: tuple[float, float]) -> Pairs:
    """The worst errors of the reference with the same roundings, in chunks of any length, in any of the `count` copies
    that the call is made of."""
    operand = None if kwargs["q"].dtype == torch.float32 else torch.bfloat16
    worst = [(0.0, 0.0) for x in want if x is not None]
    for chunk in CHUNKS:
        parts = zip(same_roundings(kwargs, chunk, operand), want, (2, 1), floors, strict=True)
        found = [_errors(x, ref, axis, count, f) for x, ref, axis, f in parts if x is not None and ref is not None]
        worst = _larger(worst, found)
    return worst


def _errors(got: Tensor, ref: Tensor, axis: int, count: int, floor: float) -> tuple[float, float]:
    """As `compare` has them, the worst of the `count` parts of `axis`, each of which is a tensor of its own."""
    if not ref.numel():
        return 0.0, 0.0
    spoilt = ~ref.isfinite()  # NaN that a family puts into a sequence
    off, ref = ((got.double() - ref).masked_fill(spoilt, 0.0), ref.masked_fill(spoilt, 0.0))
    off, ref = (torch.stack(x.chunk(count, axis)) for x in (off, ref))
    size = ref.flatten(1).square().mean(1).sqrt().clamp(min=floor)
    unit = torch.maximum(ref.square().mean(-1, keepdim=True).sqrt(), size.view(-1, *[1] * (ref.dim() - 1)))
    return _highest(off.flatten(1).square().mean(1).sqrt(), size), _highest(off.abs(), unit)


def _highest(off: Tensor, unit: Tensor) -> float:
    return torch.where(off == 0, 0.0, off / unit).nan_to_num(nan=math.inf).max().item()


def rounding_factor(dtype: torch.dtype) -> float:
    """How many times the error of a reference with the same roundings a kernel may make for inputs of `dtype`."""
    return ROUNDINGS_FACTOR * (FP32_KERNEL_OVER_REFERENCE if dtype == torch.float32 else 1.0)


def widened(limit: Tolerance, l2: float, element: float, factor: float, of: str = "the reference") -> Tolerance:
    """`limit`, or `factor` times the errors of `of` with the same roundings where that is larger, up to a ceiling."""
    l2, element = (min(factor * x, most) for x, most in ((l2, CEILING_L2), (element, CEILING_ELEMENT)))
    if l2 <= limit.relative_l2 and element <= limit.element_rms:
        return limit
    provenance = f"{factor:g} times the error of {of} with the same roundings"
    return replace(
        limit,
        relative_l2=max(limit.relative_l2, l2),
        element_rms=max(limit.element_rms, element),
        provenance=provenance,
    )


def random_rms(problem: Problem) -> tuple[float, float]:
    """RMS of o and of the final state for random inputs of the problem's sizes, from a short sequence."""
    small = replace(problem, lengths=None, tail=0, B=1, T=min(problem.T, 32) or 1, seed=0, device="cpu")
    return _random_rms(replace(small, strides="contiguous", final_state=True))


@lru_cache(maxsize=64)
def _random_rms(problem: Problem) -> tuple[float, float]:
    o, state = oracle(make(problem))
    return rms(o), rms(state) if state is not None else 0.0


def finite_rms(x: Tensor | None) -> float:
    """RMS of what is finite in `x`, 0 without any."""
    return 0.0 if x is None else rms(x[x.isfinite()])
