"""Judging a foreign kernel of one stage: each output on its own, and the whole call with this one stage replaced.

    from kda2.testing import Problem, verify_stage
    print(verify_stage(my_state, "state", "random", Problem(T=200)))

`kda2.testing.stages` says what a stage kernel takes and returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kda2.contract import TensorSpec, Tolerance
from kda2.errors import InvalidValue
from kda2.memory import fingerprint, poisoned_memory
from kda2.ops.kda.spec import KDA
from kda2.ops.kda.transforms import sequence_bounds
from kda2.testing.compare import Comparison, compare
from kda2.testing.families import FAMILIES, Family
from kda2.testing.inputs import Problem
from kda2.testing.limits import (
    NAMES,
    ZERO_BY_NATURE,
    expected,
    finite_rms,
    rounding_factor,
    widened,
    yardstick,
)
from kda2.testing.oracle import Outputs, checked, upcast
from kda2.testing.stages import (
    Run,
    Stage,
    Tensors,
    chunk_rows,
    dtypes_of,
    find_stage,
    operands,
    replaced,
    rounding,
    stage_inputs,
)
from kda2.testing.verify import Verdict, judge, least

_AXES = {"NT": "chunk", "N": "sequence", "HV": "head", "C": "token", "K": "key", "V": "value"}


def verify_stage(run: Run, stage: str, family: str | Family, problem: Problem, C: int = 64) -> Verdict:
    """Hold the stage kernel `run` to `family`, in two ways.

    Each output against the stage's reference in fp64 on the same stored inputs; and the whole call with this one stage
    replaced, quantities "o (whole call)" and "final state (whole call)", against the fp64 token recurrence on the same
    stored operands. Limits are the op's, or twice the error of the torch stage with a kernel's roundings where that is
    larger, up to the ceilings of `kda2.testing.verify`.

    An output that is missing, extra, or of the wrong shape or dtype, and inputs that `run` has changed, fail in words.
    Raises `InvalidValue` for an unknown stage or family, or a C that is not 16, 32, 64 or 128.
    """
    chosen = find_stage(stage)
    if isinstance(family, str) and family not in FAMILIES:
        raise InvalidValue("family", f"one of {', '.join(FAMILIES)}", repr(family))
    which = FAMILIES[family] if isinstance(family, str) else family
    plain, want = _whole(which, problem)
    comparisons = _outputs(run, chosen, plain, C, which.spoilt)
    if any(c.mismatch for c in comparisons):
        return Verdict(which.name, (*comparisons, _failed("o (whole call)", f"not formed: mend {stage} first")))
    return Verdict(which.name, (*comparisons, *_whole_call(run, chosen, plain, want, C, which, problem)))


@lru_cache(maxsize=4)
def _whole(family: Family, problem: Problem) -> tuple[dict[str, Any], Outputs]:
    """The call on its own operands, which no kernel is given as they are, and the oracle's answer."""
    plain = operands(family.build(problem))
    return plain, expected(plain)


def _outputs(run: Run, stage: Stage, plain: Mapping[str, Any], C: int, spoilt: int | None) -> tuple[Comparison, ...]:
    """Every output against the reference, then what is wrong with the answer as a whole."""
    inputs = stage_inputs(stage.name, plain, C)
    want, honest = stage.reference(**upcast(inputs)), rounding(stage.name, plain["v"].dtype)(**inputs)
    floors, names = _floors(inputs), [spec.name for spec in stage.outputs]
    got, wrong = _watched(run, inputs)
    if not isinstance(got, dict):
        return (_failed("outputs", f"wanted a dict of {', '.join(names)}, got {type(got).__name__}"), *wrong)
    wrong += [_failed(str(name), f"not an output of {stage.name}") for name in got if name not in names]
    if spoilt is not None:
        chunks = chunk_rows(checked(plain), C)[1].tolist()[spoilt : spoilt + 2]
        got, want, honest = (_blanked(x, stage, spoilt, chunks) for x in (got, want, honest))
    found = [_compared(spec, got, want, honest, plain, floors.get(spec.name, 0.0)) for spec in stage.outputs]
    return (*found, *wrong)


def _watched(run: Run, inputs: Tensors) -> tuple[Any, list[Comparison]]:
    """What `run` gives where fresh memory is NaN, and a failed comparison if it changed its inputs."""
    before = fingerprint(inputs)
    with poisoned_memory():
        got = run(**inputs)
    changed = [name for name, now in fingerprint(inputs).items() if now != before[name]]
    return got, [_failed("inputs", f"changed: {', '.join(changed)}")] if changed else []


def _compared(
    spec: TensorSpec, got: dict[str, Any], want: Tensors, honest: Tensors, plain: Mapping[str, Any], floor: float
) -> Comparison:
    """One output against the reference; `floor` is the RMS below which its errors are not relative."""
    name = spec.name
    if name not in got:
        return _failed(name, f"missing: run returned {', '.join(map(str, got)) or 'nothing'}")
    dtype = dtypes_of(plain)[name]
    limit = _widened(honest[name], want[name], KDA.tolerance(NAMES[plain["v"].dtype]), plain["v"].dtype, floor)
    return compare(got[name], want[name], limit, quantity=name, axes=_axis_names(spec), dtype=dtype, floor=floor)


def _whole_call(
    run: Run, stage: Stage, plain: Mapping[str, Any], want: Outputs, C: int, family: Family, problem: Problem
) -> tuple[Comparison, ...]:
    got = replaced(stage.name, run, plain, C)
    honest = replaced(stage.name, rounding(stage.name, plain["v"].dtype), plain, C)
    if family.spoilt is not None:
        got, want, honest = (_blanked_call(x, family.spoilt, plain) for x in (got, want, honest))
    by = yardstick(plain, want, family.name)
    floors = least(by.floors, family, problem)
    limits = [
        _widened(x, ref, limit, plain["v"].dtype, floor)
        for x, ref, limit, floor in zip(honest, want, by.limits, floors, strict=False)
        if x is not None and ref is not None
    ]
    return tuple(replace(c, quantity=f"{c.quantity} (whole call)") for c in judge(got, want, plain, limits, floors))


def _widened(honest: Tensor, want: Tensor, own: Tolerance, dtype: torch.dtype, floor: float) -> Tolerance:
    """`own`, or twice the error of the torch stage with the same roundings, up to a ceiling."""
    c = compare(honest, want, own, floor=floor)
    element = c.worst.rms_off if c.worst else 0.0
    return widened(own, c.relative_l2, element, rounding_factor(dtype), "the torch stage")


def _floors(inputs: Tensors) -> dict[str, float]:
    """A part of the RMS that a decayed factor has where nothing decays: deep gates leave references of 1e-100, which
    fp32 does not hold and nobody misses."""
    known = {"decay": ZERO_BY_NATURE}
    for name, source in (("Qd", "q"), ("Kd", "k"), ("Kr", "k")):
        if source in inputs:
            known[name] = ZERO_BY_NATURE * finite_rms(inputs[source])
    return known


def _axis_names(spec: TensorSpec) -> tuple[str, ...]:
    if spec.name == "A":
        return "chunk", "head", "row", "column"
    names = tuple(_AXES[axis] for axis in spec.shape)
    return names if spec.name in ("S", "final_state") else (*names[:-1], "channel")


def _blanked(outputs: Mapping[str, Any], stage: Stage, spoilt: int, chunks: list[int]) -> dict[str, Any]:
    """Outputs with 0 for what belongs to the sequence `spoilt`, which owns chunks[0] up to chunks[1]."""
    blanked = dict(outputs)
    for spec in stage.outputs:
        x = blanked.get(spec.name)
        if isinstance(x, Tensor) and x.dim():
            where = slice(spoilt, spoilt + 1) if spec.shape[0] == "N" else slice(*chunks)
            blanked[spec.name] = x.clone()
            blanked[spec.name][where] = 0
    return blanked


def _blanked_call(outputs: Outputs, spoilt: int, plain: Mapping[str, Any]) -> Outputs:
    """(o, final state) with 0 for the sequence `spoilt`."""
    start, end = sequence_bounds(checked(plain))[spoilt]
    o, final = outputs[0].clone(), None if outputs[1] is None else outputs[1].clone()
    o.flatten(0, 1)[start:end] = 0
    if final is not None:
        final[spoilt] = 0
    return o, final


def _failed(quantity: str, why: str) -> Comparison:
    return Comparison(quantity, 0.0, 0.0, 0.0, None, 0, 0, mismatch=why)
