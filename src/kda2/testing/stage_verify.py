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
from kda2.ops.kda.spec import KDA
from kda2.ops.kda.transforms import sequence_bounds
from kda2.testing.compare import Comparison, compare, error
from kda2.testing.families import FAMILIES, Family
from kda2.testing.inputs import Problem
from kda2.testing.memory import fingerprint, poisoned_memory
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
from kda2.testing.verify import (
    CEILING_ELEMENT,
    CEILING_L2,
    FP32_KERNEL_OVER_REFERENCE,
    NAMES,
    ROUNDINGS_FACTOR,
    Verdict,
    expected,
    judge,
    random_rms,
)

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
    found = [_compared(spec, got, want, honest, plain, floors.get(spec.name)) for spec in stage.outputs]
    return (*found, *wrong)


def _watched(run: Run, inputs: Tensors) -> tuple[Any, list[Comparison]]:
    """What `run` gives where fresh memory is NaN, and a failed comparison if it changed its inputs."""
    before = fingerprint(inputs)
    with poisoned_memory():
        got = run(**inputs)
    changed = [name for name, now in fingerprint(inputs).items() if now != before[name]]
    return got, [_failed("inputs", f"changed: {', '.join(changed)}")] if changed else []


def _compared(
    spec: TensorSpec, got: dict[str, Any], want: Tensors, honest: Tensors, plain: Mapping[str, Any], floor: float | None
) -> Comparison:
    """One output against the reference; `floor` is the RMS below which its errors are not relative."""
    name = spec.name
    if name not in got:
        return _failed(name, f"missing: run returned {', '.join(map(str, got)) or 'nothing'}")
    scale = None if floor is None else 1e-3 * floor * want[name].numel() ** 0.5
    limit = _widened(honest[name], want[name], _own_limits(plain), plain["v"].dtype, scale)
    dtype = dtypes_of(plain)[name]
    return compare(got[name], want[name], limit, quantity=name, axes=_axis_names(spec), dtype=dtype, scale=scale)


def _whole_call(
    run: Run, stage: Stage, plain: Mapping[str, Any], want: Outputs, C: int, family: Family, problem: Problem
) -> tuple[Comparison, ...]:
    got = replaced(stage.name, run, plain, C)
    honest = replaced(stage.name, rounding(stage.name, plain["v"].dtype), plain, C)
    if family.spoilt is not None:
        got, want, honest = (_blanked_call(x, family.spoilt, plain) for x in (got, want, honest))
    limits = [
        _widened(x, ref, _own_limits(plain), plain["v"].dtype)
        for x, ref in zip(honest, want, strict=True)
        if x is not None and ref is not None
    ]
    floors = None if family.name == "random" else random_rms(problem)
    return tuple(replace(c, quantity=f"{c.quantity} (whole call)") for c in judge(got, want, plain, limits, floors))


def _own_limits(plain: Mapping[str, Any]) -> Tolerance:
    return KDA.tolerance(NAMES[plain["v"].dtype])


def _widened(honest: Tensor, want: Tensor, own: Tolerance, dtype: torch.dtype, scale: float | None = None) -> Tolerance:
    """The op's limits, or twice the error of the torch stage with the same roundings, up to a ceiling."""
    factor = ROUNDINGS_FACTOR * (FP32_KERNEL_OVER_REFERENCE if dtype == torch.float32 else 1.0)
    worst = compare(honest, want, own, scale=scale).worst
    element = factor * (worst.rms_off if worst else 0.0)
    return replace(
        own,
        relative_l2=min(max(own.relative_l2, factor * error(honest, want, scale)), CEILING_L2),
        element_rms=min(max(own.element_rms, element), CEILING_ELEMENT),
        provenance=f"at least {factor:g} times the error of the torch stage with the same roundings",
    )


def _floors(inputs: Tensors) -> dict[str, float]:
    """The RMS that a decayed factor has where nothing decays: deep gates leave references of 1e-100, which fp32 does
    not hold and nobody misses."""
    known = {"decay": 1.0}
    for name, source in (("Qd", "q"), ("Kd", "k"), ("Kr", "k")):
        if source in inputs:
            known[name] = _finite_rms(inputs[source])
    return known


def _finite_rms(x: Tensor) -> float:
    wide = x.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return wide.square().mean().sqrt().item() if x.numel() else 0.0


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
