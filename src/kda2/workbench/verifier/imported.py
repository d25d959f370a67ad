"""Contracts that came from a file: an operator of somebody else's, whose oracle is Python source in the contract.

The oracle runs in a process of its own, once in fp64 (in the dtypes given where it will not take that) and once in the
dtypes given. What the second is off by is what an honest kernel may be off by, twice over.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda2.contract import OpSpec, TensorSpec, Tolerance
from kda2.errors import InvalidValue, KDA2Error
from kda2.testing.compare import compare
from kda2.testing.verify import CEILING_ELEMENT, CEILING_L2, ROUNDINGS_FACTOR, Verdict
from kda2.workbench.verifier.conditions import Conditions
from kda2.workbench.verifier.process import Child, Children, Ended, Limits
from kda2.workbench.verifier.questions import OTHER, RANDOM, Answer, spoilt
from kda2.workbench.verifier.subject import IMPORTED, ORACLE, Subject

_DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64, "int32": torch.int32,
    "int64": torch.int64, "int8": torch.int8, "bool": torch.bool,
}  # fmt: skip
# A kernel's own rounding of an output, beside what the oracle shows: two units in the last place.
_UNITS = 2.0
_SCALAR = "scalar "
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def contract(file: str | None) -> OpSpec:
    """The contract in `file`: what `kda2 spec show` and `import` write, or a FlashInfer-Trace definition beside its
    workloads. Raises `InvalidValue`."""
    from kda2.workbench import interchange

    path = Path(str(file))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidValue("--spec", "kda, kda_step or a contract's file", f"{file}: {e}") from e
    if '"schema"' in text:
        spec = OpSpec.from_json(text)
    else:
        beside = path.with_name("workloads.jsonl")
        spec = interchange.load(path, beside if beside.is_file() else None)
    if not spec.reference_source:
        raise InvalidValue("--spec", "a contract with the source of its oracle", f"{spec.name} without one")
    return spec


def sizes_of(spec: OpSpec) -> dict[str, int]:
    """The axes' extents: those of the first workload, and the constant ones."""
    constant = {name: int(values[0]) for name, values in spec.options.items() if len(values) == 1}
    first = {name: int(n) for name, n in spec.workloads[0].axes.items()} if spec.workloads else {}
    return {**constant, **first}


@dataclass(frozen=True)
class ImportedQuestion:
    """One call with random contents."""

    name: str
    spec: OpSpec
    given: Mapping[str, Any]
    want: Mapping[str, Tensor]
    limits: Mapping[str, Tolerance]
    in_place: tuple[str, ...] = ()
    axis: int = 0

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.spec.outputs)

    @property
    def inputs(self) -> Sequence[Mapping[str, Any]]:
        return [self.given]

    @property
    def moving(self) -> tuple[str, ...]:
        """Floating tensors with an axis of rows; whole rows change places, so that each stays what it was."""
        return tuple(
            n for n, x in self.given.items() if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1
        )

    def moved(self, places: Mapping[str, int]) -> ImportedQuestion:
        given = {n: x.roll(places[n], 0) if n in places else x for n, x in self.given.items()}
        return _asked(self.name, self.spec, given)

    def other(self) -> ImportedQuestion:
        return self.moved(dict.fromkeys(self.moving, 1))

    def judge(self, answers: Sequence[Answer], changed: Sequence[str]) -> Verdict:
        (answer,) = answers
        found = [
            compare(answer[t.name], self.want[t.name], self.limits[t.name], quantity=t.name, axes=_axes(t),
                    dtype=_DTYPES[t.dtypes[0]])
            for t in self.spec.outputs
        ]  # fmt: skip
        return Verdict(self.name, (*found, *([spoilt(changed)] if changed else [])))

    def says(self, verdict: Verdict, answers: Sequence[Answer]) -> str:
        return ""


def imported_question(on: Conditions, probe: str) -> ImportedQuestion:
    """Random inputs of the contract's shapes. Raises `InvalidValue` for a contract whose inputs cannot be made."""
    if probe not in (RANDOM, OTHER):
        raise InvalidValue("--families", RANDOM, repr(probe), "a contract from a file has no other families")
    spec, seed = contract(on.spec), on.seed + (probe == OTHER)
    rng = torch.Generator().manual_seed(seed)
    for t in spec.outputs:
        if t.dtypes[0] not in _DTYPES or not _DTYPES[t.dtypes[0]].is_floating_point:
            raise InvalidValue(
                f"{t.name}'s dtype", "bf16, fp16, fp32 or fp64", t.dtypes[0], "other outputs have no limits"
            )
    return _asked(probe, spec, {t.name: _made(t, {**sizes_of(spec), **on.sizes}, rng) for t in spec.inputs})


def _made(t: TensorSpec, sizes: Mapping[str, Any], rng: torch.Generator) -> Any:
    dtype = t.dtypes[0]
    if dtype.startswith(_SCALAR):
        return 1.0 if "int" not in dtype else 1
    shape = tuple(extent(term, sizes, t.name) for term in t.shape)
    if dtype not in _DTYPES:
        raise InvalidValue(f"{t.name}'s dtype", f"one of {', '.join(_DTYPES)}", dtype, "such inputs cannot be made yet")
    if not _DTYPES[dtype].is_floating_point:
        fix = "what integers mean is not in a contract, so they cannot be made up"
        raise InvalidValue(f"{t.name}", "of floating numbers, which can be random", dtype, fix)
    return torch.randn(shape, generator=rng).to(_DTYPES[dtype])


def extent(term: str, sizes: Mapping[str, Any], name: str = "shape") -> int:
    """The number that a term of a shape comes to: a sum or product of axes and integers."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and node.id in sizes:
            return int(sizes[node.id])
        fix = f"name it: --problem {ast.unparse(node)}=64"
        raise InvalidValue(f"{name}'s axis {ast.unparse(node)}", "an extent", "none", fix)

    return value(ast.parse(term, mode="eval").body)


def axes_of(spec: OpSpec) -> set[str]:
    """The axes that the shapes of a contract's inputs name, within terms too."""
    trees = (ast.walk(ast.parse(term, mode="eval")) for t in spec.inputs for term in t.shape)
    return {node.id for tree in trees for node in tree if isinstance(node, ast.Name)}


def _axes(t: TensorSpec) -> tuple[str, ...]:
    return tuple(f"{axis}" if t.shape.count(axis) == 1 else f"{axis}{i}" for i, axis in enumerate(t.shape))


def _asked(name: str, spec: OpSpec, given: Mapping[str, Any]) -> ImportedQuestion:
    """The question with the oracle's answers and the limits that follow from them."""
    plain, wide = _reference(spec, given)
    limits = {t.name: _limit(t, plain[t.name], wide[t.name], spec) for t in spec.outputs}
    return ImportedQuestion(name, spec, given, wide, limits)


def _reference(spec: OpSpec, given: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the oracle gives for inputs as they are, and in fp64."""
    names = tuple(t.name for t in spec.outputs)
    task = {
        "kind": "call", "subject": Subject(ORACLE, file=spec.reference_source, op=IMPORTED).plain(),
        "arguments": list(given), "outputs": names, "in_place": (), "device": "cpu",
    }  # fmt: skip
    fp64 = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in given.items()}
    found = []
    with Child(Children(), limits=Limits(600.0)) as child:
        for inputs in (given, fp64):
            try:
                said = list(child.ask(task, inputs))[-1]
            except Ended as e:
                raise KDA2Error(f"the oracle of {spec.name} does not answer: {e}") from e
            found.append(child.answer() if "ended" not in said else said)
    if "ended" in found[0]:
        raise KDA2Error(f"the oracle of {spec.name} does not answer: {found[0]['says']}")
    return found[0], found[0] if "ended" in found[1] else found[1]


def _limit(t: TensorSpec, plain: Tensor, wide: Tensor, spec: OpSpec) -> Tolerance:
    """The contract's own tolerance, or twice what the oracle is off by in the dtypes given."""
    dtype = t.dtypes[0]
    for own in spec.tolerances:
        if own.dtype == dtype:
            return own
    unit = _UNITS * torch.finfo(_DTYPES[dtype]).eps
    stored = plain.to(_DTYPES[dtype])
    c = compare(stored, wide, Tolerance(dtype, 1.0, 1.0))
    element = c.worst.rms_off if c.worst else 0.0
    says = f"{ROUNDINGS_FACTOR:g} times what the oracle itself is off by in {dtype}, and {_UNITS:g} units of rounding"
    return replace(
        Tolerance(dtype, 1.0, 1.0, says),
        relative_l2=min(ROUNDINGS_FACTOR * c.relative_l2 + unit, CEILING_L2),
        element_rms=min(ROUNDINGS_FACTOR * element + 4.0 * unit, CEILING_ELEMENT),
    )
