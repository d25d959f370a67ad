"""Judging an implementation: run it on a family's inputs, hold every output to the oracle, within the op's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kda2.contract import Tolerance
from kda2.errors import InvalidValue
from kda2.ops.kda import kda_step
from kda2.ops.kda.spec import KDA
from kda2.testing.compare import ROW_AXES, STATE_AXES, TOKEN_AXES, Comparison, compare, error, rms
from kda2.testing.families import FAMILIES, Family
from kda2.testing.inputs import Problem, make
from kda2.testing.memory import fingerprint
from kda2.testing.oracle import Outputs, oracle, same_roundings, upcast

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Longer ones get the oracle's chunked form in fp64, which agrees with the token recurrence to 1e-12.
RECURRENT_TOKENS = 640
ROUNDINGS_FACTOR = 2.0
# Kernels multiply fp32 operands as three products of tf32 terms, good to 2^-21 where fp32 is to 2^-24 (8 times), and
# merge inverses block by block, which for near-singular chunks is 10 times coarser than substitution.
FP32_KERNEL_OVER_REFERENCE = 32.0
# No rounding excuses more than this, in relative L2 and in RMS per element: a reference that diverges excuses nothing.
CEILING_L2, CEILING_ELEMENT = 0.1, 1.0


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


def verify(run: Callable[..., Outputs], family: str | Family, problem: Problem) -> Verdict:
    """Hold `run(**kwargs) -> (o, final state or None)`, which takes the arguments of `kda2.kda`, to `family`."""
    if isinstance(family, str) and family not in FAMILIES:
        raise InvalidValue("family", f"one of {', '.join(FAMILIES)}", repr(family))
    chosen = FAMILIES[family] if isinstance(family, str) else family
    kwargs = chosen.build(problem)
    want = expected(kwargs)
    got, changed = _watched(run, kwargs)
    floors = None if chosen.name == "random" else random_rms(problem)
    limits = [own_limits(kwargs, x) for x in want if x is not None]
    if chosen.judge == "same_roundings":
        limits = _rounding_limits(kwargs, want, limits)
    if chosen.spoilt is not None:
        got, want, kwargs = _without(chosen.spoilt, got, want, kwargs)
    return Verdict(chosen.name, (*judge(got, want, kwargs, limits, floors), *changed))


def verify_call(run: Callable[..., Outputs], name: str, kwargs: Mapping[str, Any]) -> Verdict:
    """As `verify`, on the call `kwargs`, under the op's own limits."""
    want = expected(kwargs)
    got, changed = _watched(run, kwargs)
    return Verdict(name, (*judge(got, want, kwargs), *changed))


def _watched(run: Callable[..., Outputs], kwargs: Mapping[str, Any]) -> tuple[Outputs, tuple[Comparison, ...]]:
    """What `run` gives, and a failed comparison if it changed its inputs."""
    before = fingerprint(kwargs)
    got = run(**kwargs)
    changed = [name for name, now in fingerprint(kwargs).items() if now != before[name]]
    return got, (_failed("inputs", f"changed: {', '.join(changed)}"),) if changed else ()


def judge(
    got: Outputs,
    want: Outputs,
    kwargs: Mapping[str, Any],
    limits: list[Tolerance] | None = None,
    floors: tuple[float, float] | None = None,
) -> tuple[Comparison, ...]:
    """Compare (o, final state) with what is wanted for the call `kwargs`. `floors`: the RMS of o and of the state for
    random inputs, where a reference may be zero by nature."""
    limits = limits or [own_limits(kwargs, x) for x in want if x is not None]
    scales = [None, None] if floors is None else [_scale(f, x) for f, x in zip(floors, want, strict=True)]
    offsets = kwargs.get("cu_seqlens")
    o = compare(
        got[0], want[0], limits[0], axes=TOKEN_AXES, cu_seqlens=offsets, dtype=kwargs["v"].dtype, scale=scales[0]
    )
    if want[1] is None:
        return (o,) if got[1] is None else (o, _failed("final state", "wanted None, as none was asked for"))
    initial = kwargs.get("initial_state")
    dtype = torch.float32 if initial is None else initial.dtype
    axes = STATE_AXES[kwargs.get("state_layout", "kv")]
    if got[1] is None:
        return o, compare(torch.empty(0), want[1], limits[1], quantity="final state", axes=axes)
    state = compare(got[1], want[1], limits[1], quantity="final state", axes=axes, dtype=dtype, scale=scales[1])
    return o, state


def judge_step(got: tuple[Tensor, Tensor], kwargs: Mapping[str, Any]) -> tuple[Comparison, ...]:
    """Compare what `kda2.kda_step` gave with the fp64 recurrence. `kwargs` must hold the state as it was before."""
    before = {name: x for name, x in kwargs.items() if name != "out"}
    want = kda_step(**{**upcast(before), "inplace": False, "impl": "reference"})
    axes = ("slot", *STATE_AXES[kwargs.get("state_layout", "kv")][1:])
    o = compare(got[0], want[0], own_limits(kwargs, want[0]), axes=ROW_AXES, dtype=kwargs["v"].dtype)
    limits = own_limits({**kwargs, "initial_state": kwargs["state"]}, want[1])
    return o, compare(got[1], want[1], limits, quantity="state", axes=axes, dtype=kwargs["state"].dtype)


def expected(kwargs: Mapping[str, Any]) -> Outputs:
    """The oracle's outputs for a call."""
    return oracle(kwargs, "reference" if kwargs["q"].shape[1] <= RECURRENT_TOKENS else "torch")


def own_limits(kwargs: Mapping[str, Any], want: Tensor) -> Tolerance:
    """The op's tolerance for the call's inputs, or that of the stored state where it is coarser."""
    initial = kwargs.get("initial_state")
    dtypes = {kwargs["v"].dtype} | ({initial.dtype} if want.dim() == 4 and initial is not None else set())
    return max((KDA.tolerance(NAMES[d]) for d in dtypes), key=lambda t: t.relative_l2)


def _rounding_limits(kwargs: Mapping[str, Any], want: Outputs, limits: list[Tolerance]) -> list[Tolerance]:
    """Twice the error of the reference with the same roundings, no less than the op's own limits, up to a ceiling."""
    is_fp32 = kwargs["q"].dtype == torch.float32
    factor = ROUNDINGS_FACTOR * (FP32_KERNEL_OVER_REFERENCE if is_fp32 else 1.0)
    rounded, widened = same_roundings(kwargs, operand=None if is_fp32 else torch.bfloat16), []
    for got, ref, limit in zip(rounded, want, limits, strict=False):
        if got is None or ref is None:
            continue
        l2 = factor * error(got, ref)
        worst = compare(got, ref, limit).worst
        element = factor * (worst.rms_off if worst else 0.0)
        widened.append(
            replace(
                limit,
                relative_l2=min(max(limit.relative_l2, l2), CEILING_L2),
                element_rms=min(max(limit.element_rms, element), CEILING_ELEMENT),
                provenance=f"{factor:g} times the error of the reference with the same roundings",
            )
        )
    return widened


@lru_cache(maxsize=64)
def _random_rms(problem: Problem) -> tuple[float, float]:
    o, state = oracle(make(problem))
    return rms(o), rms(state) if state is not None else 0.0


def random_rms(problem: Problem) -> tuple[float, float]:
    """RMS of o and of the final state for random inputs of the problem's sizes, from a short sequence."""
    small = replace(problem, lengths=None, tail=0, B=1, T=min(problem.T, 32) or 1, seed=0, device="cpu")
    return _random_rms(replace(small, strides="contiguous", final_state=True))


def _scale(random: float, want: Tensor | None) -> float | None:
    return None if want is None else 1e-3 * random * want.numel() ** 0.5


def _failed(quantity: str, why: str) -> Comparison:
    return Comparison(quantity, 0.0, 0.0, 0.0, None, 0, 0, mismatch=why)


def _without(
    spoilt: int, got: Outputs, want: Outputs, kwargs: Mapping[str, Any]
) -> tuple[Outputs, Outputs, dict[str, Any]]:
    """Outputs of a packed call with one sequence cut out."""
    cu = kwargs["cu_seqlens"]
    start, end = int(cu[spoilt]), int(cu[spoilt + 1])
    others = torch.tensor([n for n in range(len(cu) - 1) if n != spoilt])
    offsets = torch.cat([cu[: spoilt + 1], cu[spoilt + 2 :] - (end - start)])

    def cut(outputs: Outputs) -> Outputs:
        o, state = outputs
        o = torch.cat([o[:, :start], o[:, end:]], dim=1)
        return o, None if state is None else state[others.to(state.device)]

    return cut(got), cut(want), {**kwargs, "cu_seqlens": offsets}
