"""An OpSpec and its workloads as a FlashInfer-Trace data set."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kda2.contract import OpSpec, TensorSpec, Workload
from kda2.errors import InvalidValue
from kda2.workbench.extras import load as load_extra
from kda2.workbench.files import replace_whole
from kda2.workbench.interchange.calls import OPTIONS, Call, call_of
from kda2.workbench.interchange.schema import DTYPES, Definition, Line, parse

# A kernel is built for these, so they are constants, and other values another definition. Other axes are constant only
# where all of the spec's workloads agree.
BUILT_FOR = ("H", "HV", "K", "V")
SIDECAR, TAG = "kda2", "kda2:"
REFERENCES = Path(__file__).parent / "references"


def export(spec: OpSpec, folder: Path, workload: str | None = None) -> list[Path]:
    """Write `spec` for flashinfer-bench into `folder`, and return what was written:

        definitions/<op>/<definition>.json       one for each choice of heads, channels and dtypes
        workloads/<op>/<definition>.jsonl        its workloads
        blob/workloads/<op>/<definition>.safetensors   values that cannot be random: offsets, A_log, dt_bias
        kda2/<op>.json                           the spec itself, and the hashes of the files above

    The format has no options: the definitions fix those of released models (bounded gate at -5, l2norm, beta's sigmoid,
    states [K, V]) in name, tags and reference; `scale` is a scalar input. It has no room for tolerances, families and
    weights either: they are in the last file, which `load` finds from the definition. `workload` names the only one to
    export.

    Raises:
        InvalidValue: not an op of kda2's own, or no such workload.
        OSError: `folder` cannot be written to.
    """
    chosen = _chosen(spec, workload)
    variable = _variable_axes(spec)
    groups: dict[str, list[tuple[Workload, Call]]] = {}
    for w in chosen:
        call = call_of(spec, w)
        groups.setdefault(_name(spec, call), []).append((w, call))
    written = [path for name, cases in groups.items() for path in _write(spec, folder, name, cases, variable)]
    sidecar = folder / SIDECAR / f"{spec.name}.json"
    sidecar.parent.mkdir(parents=True, exist_ok=True)
    hashes = {path.relative_to(folder).as_posix(): digest(path) for path in written if path.suffix != ".safetensors"}
    plain = {"schema": 1, "spec": json.loads(spec.to_json()), "files": {**_before(sidecar, spec), **hashes}}
    replace_whole(sidecar, _pretty(plain))
    return [*written, sidecar]


def _before(sidecar: Path, spec: OpSpec) -> dict[str, str]:
    """The hashes of files that an earlier export of the same spec wrote here."""
    try:
        plain = json.loads(sidecar.read_text(encoding="utf-8"))
        return dict(plain["files"]) if OpSpec.from_json(json.dumps(plain["spec"])) == spec else {}
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return {}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _chosen(spec: OpSpec, workload: str | None) -> list[Workload]:
    named = [w for w in spec.workloads if workload in (None, w.name)]
    if not named:
        names = ", ".join(w.name for w in spec.workloads)
        raise InvalidValue("workload", f"one of {names}" if names else "one that the spec has", repr(workload))
    return named


def _variable_axes(spec: OpSpec) -> set[str]:
    seen = [call_of(spec, w).axes for w in spec.workloads]
    return {axis for axes in seen for axis in axes if any(other[axis] != seen[0][axis] for other in seen)} - {
        *BUILT_FOR
    }


def _name(spec: OpSpec, call: Call) -> str:
    """`<op>_<options>_<constants>`, as the format's definitions are named."""
    a, d = call.axes, call.dtypes
    state = d.get("initial_state", d.get("state"))
    parts = [spec.name, "bounded_l2norm", f"qk{a['H']}_v{a['HV']}_k{a['K']}_v{a['V']}", d["q"]]
    parts += [f"g_{d['g']}"] if d["g"] != d["q"] else []
    return "_".join([*parts, f"state_{state}" if state else "no_state"])


def _write(
    spec: OpSpec, folder: Path, name: str, cases: list[tuple[Workload, Call]], variable: set[str]
) -> Iterator[Path]:
    definition = _definition(spec, name, cases[0][1], variable)
    blob = f"blob/workloads/{spec.name}/{name}.safetensors"
    lines = [_line(spec, definition, w, call, blob) for w, call in cases]
    tensors = {_key(w, x): value for w, call in cases for x, value in call.stored.items()}
    parse(Definition, json.dumps(definition), "definition")
    for line in lines:
        parse(Line, json.dumps(line), "workload")
    texts = {
        f"workloads/{spec.name}/{name}.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        f"definitions/{spec.name}/{name}.json": _pretty(definition),
    }
    _save(tensors, folder / blob)
    yield folder / blob
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        replace_whole(folder / path, text)
        yield folder / path


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Whole or not at all, as `replace_whole`."""
    safetensors = load_extra("safetensors.torch", "the export of workloads")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        safetensors.save_file(dict(tensors), part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _pretty(plain: Any) -> str:
    return json.dumps(plain, indent=2) + "\n"


def _definition(spec: OpSpec, name: str, call: Call, variable: set[str]) -> dict[str, Any]:
    inputs = [t for t in spec.inputs if t.name in call.dtypes]
    # the format's names of outputs are none of the inputs'
    taken = {t.name for t in inputs}
    outputs = [replace(t, name=f"new_{t.name}") if t.name in taken else t for t in spec.outputs]
    axes = {
        axis: {"type": "var"} if axis in variable else {"type": "const", "value": n} for axis, n in call.axes.items()
    }
    constraints = ["HV % H == 0", *(["slots == B"] if "slots" in axes else [])]
    for shape in {t.shape for t in (*inputs, *outputs)}:
        for term in shape:
            if term not in axes:
                axes[_axis(term)] = {"type": "var"}
                constraints.append(f"{_axis(term)} == {term}")
    # what may be absent comes last, so that the reference's arguments keep their order
    described = {t.name: _tensor(t, call) for t in inputs if t.name != "initial_state"}
    described["scale"] = {"shape": None, "dtype": "float32", "description": "factor of the output"}
    described |= {t.name: _tensor(t, call) for t in inputs if t.name == "initial_state"}
    return {
        "name": name,
        "op_type": spec.name,
        "description": f"{spec.name}: {spec.source}. {', '.join(f'{k} = {v}' for k, v in OPTIONS.items())}.",
        "tags": [f"{TAG}{spec.content_hash}", "fused", *(f"{k}:{v}" for k, v in OPTIONS.items())],
        "axes": axes,
        "constraints": constraints,
        "inputs": described,
        "outputs": {t.name: _tensor(t, call) for t in outputs},
        "reference": (REFERENCES / f"{spec.name}.py").read_text(encoding="utf-8"),
    }


def _tensor(t: TensorSpec, call: Call) -> dict[str, Any]:
    dtype = call.dtypes[t.name]
    return {"shape": [_axis(x) for x in t.shape], "dtype": DTYPES.get(dtype, dtype), "description": t.meaning}


def _axis(term: str) -> str:
    """A name for a term of the spec's shapes: "N + 1" becomes N_plus_1."""
    return re.sub(r"\W+", "_", term.replace("+", "plus").replace("-", "minus").replace("*", "times"))


def _line(spec: OpSpec, definition: Mapping[str, Any], w: Workload, call: Call, blob: str) -> dict[str, Any]:
    inputs: dict[str, Any] = {name: {"type": "random"} for name in definition["inputs"]}
    inputs |= {x: {"type": "safetensors", "path": blob, "tensor_key": _key(w, x)} for x in call.stored}
    inputs["scale"] = {"type": "scalar", "value": call.scale}
    axes = {axis: call.axes[axis] for axis in definition["axes"] if axis in call.axes}
    axes |= {_axis("N + 1"): call.axes["N"] + 1} if "N" in call.axes else {}
    return {
        "definition": definition["name"],
        "workload": {
            "uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{TAG}{spec.content_hash}/{w.name}")),
            "axes": {axis: n for axis, n in axes.items() if definition["axes"][axis]["type"] == "var"},
            "inputs": inputs,
        },
        "solution": None,
        "evaluation": None,
    }


def _key(w: Workload, tensor: str) -> str:
    return f"{w.name}.{tensor}"
