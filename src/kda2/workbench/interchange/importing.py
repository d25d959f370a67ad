"""An OpSpec from a FlashInfer-Trace definition and its workloads."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kda2.contract import OpSpec, TensorSpec, Workload
from kda2.errors import InvalidValue
from kda2.workbench.interchange.export import SIDECAR, TAG, digest
from kda2.workbench.interchange.schema import (
    DTYPES,
    Case,
    Const,
    Definition,
    Line,
    Safetensors,
    Scalar,
    Tensor,
    parse,
    read,
)

ORACLE = "definition.json:run"
_SHORT = {long: short for short, long in DTYPES.items()}


def load(definition: Path, workloads: Path | None = None) -> OpSpec:
    """The spec of `definition` (a definition.json), with the workloads of `workloads` (a .jsonl).

    What `export` wrote, and nobody has changed since, gives the very spec that was exported, all of its workloads
    included. Another definition becomes a spec without families, tolerances, flops and bytes: its oracle is
    "definition.json:run" and `reference_source` holds that source. Constant axes are options of one value; scalar
    inputs have the shape () and the dtype "scalar fp32" (or another); constraints such as "L == N + 1" become terms of
    shapes, others are quoted in `source`. A workload is named by its uuid; its options say where each input comes from.

    Raises:
        InvalidValue: a file is absent or not of the format (with the field that is wrong), or a line is of another
            definition.
    """
    d = parse(Definition, read(definition, "definition"), f"definition {definition}")
    ours = _exported(definition, d)
    if ours is None:
        return _foreign(d, _lines(workloads, d))
    spec, hashes = ours
    if workloads is None or digest_or_none(workloads) in hashes.values():
        return spec
    return replace(spec, workloads=_workloads(d, _lines(workloads, d)))


def digest_or_none(path: Path) -> str | None:
    return digest(path) if path.is_file() else None


def _exported(path: Path, d: Definition) -> tuple[OpSpec, Mapping[str, str]] | None:
    """The spec beside the definition and the hashes of the files exported with it, if the definition is as it was."""
    wanted = [tag.removeprefix(TAG) for tag in d.tags if tag.startswith(TAG)]
    for folder in path.resolve().parents[:3] if wanted else ():
        sidecar = folder / SIDECAR / f"{d.op_type}.json"
        if not sidecar.is_file():
            continue
        plain = _sidecar(sidecar)
        spec = OpSpec.from_json(json.dumps(plain["spec"]))
        if spec.content_hash in wanted and digest(path) in plain["files"].values():
            return spec, plain["files"]
    return None


def _sidecar(path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(read(path, "sidecar"))
    except ValueError as e:
        raise InvalidValue(str(path), "JSON", f"text that is not: {e}", "export again, or remove it") from e
    if not isinstance(plain, dict) or plain.get("schema") != 1 or not isinstance(plain.get("files"), dict):
        raise InvalidValue(
            str(path), "what kda2 exports, with schema 1", "something else", "export again, or remove it"
        )
    return plain


def _lines(path: Path | None, d: Definition) -> list[Case]:
    if path is None:
        return []
    cases = []
    for number, text in enumerate(read(path, "workloads").splitlines(), start=1):
        if not text.strip():
            continue
        where = f"workloads {path}, line {number}"
        line = parse(Line, text, where)
        if line.definition != d.name:
            raise InvalidValue(where, f"of the definition {d.name}", repr(line.definition))
        _check(line.workload, d, where)
        cases.append(line.workload)
    return cases


def _check(case: Case, d: Definition, where: str) -> None:
    """A workload gives every variable axis and every input, and none that the definition lacks."""
    variable = {name for name, axis in d.axes.items() if not isinstance(axis, Const)}
    for what, got, wanted, known in (
        ("axes", {*case.axes}, variable, {*d.axes}),
        ("inputs", {*case.inputs}, {*d.inputs}, {*d.inputs}),
    ):
        if not wanted <= got <= known:
            raise InvalidValue(f"{where}: {what}", ", ".join(sorted(wanted)), ", ".join(sorted(got)) or "none")


def _foreign(d: Definition, cases: list[Case]) -> OpSpec:
    terms, rest = _terms(d)
    about = [f"FlashInfer-Trace {d.op_type}", *([d.description] if d.description else [])]
    about += [f"constraints: {'; '.join(rest)}"] if rest else []
    return OpSpec(
        name=d.name,
        version=1,
        source=". ".join(words.removesuffix(".") for words in about),
        inputs=tuple(_spec(name, t, terms) for name, t in d.inputs.items()),
        outputs=tuple(_spec(name, t, terms) for name, t in d.outputs.items()),
        options={name: (axis.value,) for name, axis in d.axes.items() if isinstance(axis, Const)},
        oracle=ORACLE,
        flops="",
        bytes="",
        families=(),
        tolerances=(),
        workloads=_workloads(d, cases),
        reference_source=d.reference,
    )


def _terms(d: Definition) -> tuple[dict[str, str], list[str]]:
    """Axes that a constraint defines by others ("L == N + 1"), and the constraints that do not."""
    terms, rest = {}, []
    for constraint in d.constraints:
        axis, equals, term = (part.strip() for part in constraint.partition("=="))
        if equals and axis in d.axes and not isinstance(d.axes[axis], Const) and _is_algebra(term, {*d.axes} - {axis}):
            terms[axis] = term
        else:
            rest.append(constraint)
    return terms, rest


def _is_algebra(term: str, axes: set[str]) -> bool:
    """Sums and products of axes and integers."""
    try:
        tree = ast.parse(term, mode="eval").body
    except SyntaxError:
        return False
    allowed = (ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Name, ast.Load, ast.Constant)
    nodes = list(ast.walk(tree))
    return all(isinstance(n, allowed) for n in nodes) and {n.id for n in nodes if isinstance(n, ast.Name)} <= axes


def _spec(name: str, t: Tensor, terms: Mapping[str, str]) -> TensorSpec:
    dtype = _SHORT.get(t.dtype, t.dtype)
    shape = tuple(terms.get(axis, axis) for axis in t.shape or ())
    return TensorSpec(name, shape, (f"scalar {dtype}" if t.shape is None else dtype,), meaning=t.description or "")


def _workloads(d: Definition, cases: list[Case]) -> tuple[Workload, ...]:
    const = {name: axis.value for name, axis in d.axes.items() if isinstance(axis, Const)}
    return tuple(Workload(c.uuid, {**const, **c.axes}, {x: _origin(o) for x, o in c.inputs.items()}) for c in cases)


def _origin(source: Any) -> Any:
    """Where an input comes from: its value, "random", or the file and the key in it."""
    if isinstance(source, Scalar):
        return source.value
    return (source.path, source.tensor_key) if isinstance(source, Safetensors) else "random"
