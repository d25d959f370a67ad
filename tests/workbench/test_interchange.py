"""Exchange with FlashInfer-Trace: what is exported is of the format and computes the op; it comes back as it was; what
others wrote becomes a spec or is refused with the field that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import kda2
from kda2.contract import OpSpec, TensorSpec, Workload
from kda2.ops.kda.spec import KDA, KDA_STEP, SPECS
from kda2.testing import upcast
from kda2.workbench.interchange import export, load

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}
AXES = {"seqlens": (5, 0, 9), "heads": 4, "qk_heads": 2, "k": 16, "v": 8}
SMALL = replace(
    KDA,
    workloads=(
        Workload("in-out", AXES, {"dtype": "bf16", "state": "fp32-in-out", "gate": "weak"}, weight=0.25),
        Workload("other", {**AXES, "seqlens": (3,)}, {"dtype": "bf16", "state": "fp32-in-out", "gate": "mixed"}),
        Workload("out", AXES, {"dtype": "fp32", "state": "none", "gate": "strong"}),
        Workload("still", AXES, {"dtype": "bf16", "g_dtype": "fp32", "state": "bf16-in-out", "gate": "none"}),
    ),
)
SMALL_STEP = replace(
    KDA_STEP,
    workloads=(Workload("b3", {"batch": 3, "heads": 4, "k": 16, "v": 8}, {"dtype": "bf16", "state_dtype": "bf16"}),),
)
# The example of the format's own documentation, with what other definitions have beside it.
FOREIGN: dict[str, Any] = {
    "name": "gemm_n4_k8",
    "op_type": "gemm",
    "description": "C = s * A @ B.T.",
    "tags": ["status:verified"],
    "axes": {
        "M": {"type": "var", "description": "rows"}, "L": {"type": "var"},
        "N": {"type": "const", "value": 4}, "K": {"type": "const", "value": 8, "description": "depth"},
    },
    "constraints": ["L == M + 1", "M == offsets[-1].item()"],
    "inputs": {
        "A": {"shape": ["M", "K"], "dtype": "bfloat16", "description": "rows"},
        "B": {"shape": ["N", "K"], "dtype": "bfloat16"},
        "offsets": {"shape": ["L"], "dtype": "int32"},
        "s": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"C": {"shape": ["M", "N"], "dtype": "float8_e4m3fn"}},
    "reference": "import torch\n\ndef run(A, B, offsets, s):\n    return s * A @ B.T\n",
    "source_of_truth": "a field of a later version",
}  # fmt: skip
LINE: dict[str, Any] = {
    "definition": "gemm_n4_k8",
    "workload": {
        "uuid": "u-1",
        "axes": {"M": 2, "L": 3},
        "inputs": {
            "A": {"type": "random"},
            "B": {"type": "safetensors", "path": "b.safetensors", "tensor_key": "B"},
            "offsets": {"type": "random"},
            "s": {"type": "scalar", "value": 0.5},
        },
    },
    "solution": None,
    "evaluation": None,
}


def definitions(folder: Path, spec: OpSpec) -> list[Path]:
    return sorted((folder / "definitions" / spec.name).iterdir())


def lines_of(definition: Path, folder: Path) -> list[dict[str, Any]]:
    path = folder / "workloads" / definition.parent.name / f"{definition.stem}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def made(d: dict[str, Any], line: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The inputs of a workload, in the definition's order, as flashinfer-bench makes them."""
    axes = {name: axis["value"] for name, axis in d["axes"].items() if axis["type"] == "const"}
    axes |= line["workload"]["axes"]
    inputs: dict[str, Any] = {}
    for name, spec in d["inputs"].items():
        origin = line["workload"]["inputs"][name]
        if origin["type"] == "scalar":
            inputs[name] = origin["value"]
            continue
        shape, dtype = [axes[a] for a in spec["shape"]], DTYPES[spec["dtype"]]
        if origin["type"] == "random":
            inputs[name] = torch.randn(shape).to(dtype)
        else:
            inputs[name] = load_file(folder / origin["path"])[origin["tensor_key"]]
        assert list(inputs[name].shape) == shape and inputs[name].dtype == dtype
    return inputs


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Equal but for one rounding to `dtype`."""
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def run_reference(d: dict[str, Any], inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """As arguments by name and by position: both must work."""
    scope: dict[str, Any] = {}
    exec(d["reference"], scope)
    by_name, by_position = scope["run"](**inputs), scope["run"](*inputs.values())
    assert all(torch.equal(a, b) for a, b in zip(by_name, by_position, strict=True))
    o, state = by_name
    return o, state


def test_every_definition_computes_kda(tmp_path: Path) -> None:
    export(SMALL, tmp_path)
    cases = 0
    for path in definitions(tmp_path, SMALL):
        d = json.loads(path.read_text())
        for line in lines_of(path, tmp_path):
            x = made(d, line, tmp_path)
            o, state = run_reference(d, x)
            want_o, want_state = kda2.kda(
                **upcast({name: x[name] for name in ("q", "k", "v", "g", "beta")}),
                gate=kda2.Gate.bounded(x["A_log"].double(), x["dt_bias"].double()),
                scale=x["scale"], qk_l2norm=True, beta_sigmoid=True, cu_seqlens=x["cu_seqlens"],
                initial_state=upcast(x.get("initial_state")), output_final_state=True, impl="reference",
            )  # fmt: skip
            outputs = d["outputs"]
            assert want_state is not None
            close(o, want_o, DTYPES[outputs["o"]["dtype"]])
            close(state, want_state, DTYPES[outputs["final_state"]["dtype"]])
            cases += 1
    assert cases == 4


def test_every_definition_computes_a_step(tmp_path: Path) -> None:
    export(SMALL_STEP, tmp_path)
    (path,) = definitions(tmp_path, SMALL_STEP)
    d = json.loads(path.read_text())
    (line,) = lines_of(path, tmp_path)
    x = made(d, line, tmp_path)
    o, state = run_reference(d, x)
    want_o, want_state = kda2.kda_step(
        **upcast({name: x[name] for name in ("q", "k", "v", "g", "beta", "state")}),
        gate=kda2.Gate.bounded(x["A_log"].double(), x["dt_bias"].double()),
        scale=x["scale"], qk_l2norm=True, beta_sigmoid=True, inplace=False, impl="reference",
    )  # fmt: skip
    assert list(d["outputs"]) == ["o", "new_state"]  # the format wants other names than the inputs'
    close(o, want_o, torch.bfloat16)
    close(state, want_state, torch.bfloat16)


def test_axes_and_groups(tmp_path: Path) -> None:
    """Axes that differ are variable; heads, channels and dtypes are another definition; the rest is constant."""
    export(SMALL, tmp_path)
    names = [p.stem for p in definitions(tmp_path, SMALL)]
    assert names == [
        "kda_bounded_l2norm_qk2_v4_k16_v8_bf16_g_fp32_state_bf16",
        "kda_bounded_l2norm_qk2_v4_k16_v8_bf16_state_fp32",
        "kda_bounded_l2norm_qk2_v4_k16_v8_fp32_no_state",
    ]
    d = json.loads(definitions(tmp_path, SMALL)[1].read_text())
    const = {name: axis.get("value") for name, axis in d["axes"].items()}
    assert const == {"B": 1, "T": None, "N": None, "H": 2, "HV": 4, "K": 16, "V": 8, "N_plus_1": None}
    assert d["constraints"] == ["HV % H == 0", "N_plus_1 == N + 1"]
    assert d["op_type"] == "kda" and d["inputs"]["scale"]["shape"] is None
    first, other = lines_of(definitions(tmp_path, SMALL)[1], tmp_path)
    assert first["workload"]["axes"] == {"T": 14, "N": 3, "N_plus_1": 4} and other["workload"]["axes"]["T"] == 3
    assert first["workload"]["inputs"]["scale"] == {"type": "scalar", "value": 0.25}
    assert first["solution"] is None and first["evaluation"] is None
    assert "initial_state" not in json.loads(definitions(tmp_path, SMALL)[2].read_text())["inputs"]


def test_stored_values(tmp_path: Path) -> None:
    export(SMALL, tmp_path)
    stored = load_file(tmp_path / "blob/workloads/kda/kda_bounded_l2norm_qk2_v4_k16_v8_bf16_state_fp32.safetensors")
    assert stored["in-out.cu_seqlens"].tolist() == [0, 5, 5, 14]
    assert 0 <= stored["in-out.A_log"].min() and stored["in-out.A_log"].max() < 1
    assert -8 <= stored["in-out.dt_bias"].min() and stored["in-out.dt_bias"].max() < -7  # the weak regime
    mixed = stored["other.dt_bias"]
    assert -8 <= mixed.min() and mixed.max() < 1 and (mixed.max(-1).values - mixed.min(-1).values).max() < 1


@pytest.mark.parametrize("spec", [SMALL, SMALL_STEP, *SPECS.values()])
def test_what_is_exported_comes_back(spec: OpSpec, tmp_path: Path) -> None:
    written = export(spec, tmp_path)
    assert all(path.is_file() for path in written) and written[-1] == tmp_path / "kda2" / f"{spec.name}.json"
    for path in definitions(tmp_path, spec):
        assert load(path) == spec
        assert load(path, tmp_path / "workloads" / spec.name / f"{path.stem}.jsonl").content_hash == spec.content_hash


def test_one_workload(tmp_path: Path) -> None:
    export(SMALL, tmp_path)
    uuids = {line["workload"]["uuid"] for p in definitions(tmp_path, SMALL) for line in lines_of(p, tmp_path)}
    written = export(SMALL, tmp_path / "one", workload="other")
    (path,) = definitions(tmp_path / "one", SMALL)
    (line,) = lines_of(path, tmp_path / "one")
    assert len(written) == 4 and line["workload"]["uuid"] in uuids
    assert json.loads(path.read_text())["axes"]["T"] == {"type": "var"}  # as among all workloads
    assert load(path) == SMALL
    # what an earlier export of the same spec left there still counts as unchanged
    export(SMALL, tmp_path / "one", workload="out")
    assert [load(p) for p in definitions(tmp_path / "one", SMALL)] == [SMALL, SMALL]
    with pytest.raises(kda2.InvalidValue, match="workload must be one of in-out, other, out, still, got 'nosuch'"):
        export(SMALL, tmp_path, workload="nosuch")


def test_an_edited_definition_speaks_for_itself(tmp_path: Path) -> None:
    export(SMALL_STEP, tmp_path)
    (path,) = definitions(tmp_path, SMALL_STEP)
    d = json.loads(path.read_text())
    d["axes"]["HV"]["value"] = 8
    path.write_text(json.dumps(d))
    spec = load(path)
    assert spec.name == path.stem and spec.options["HV"] == (8,) and spec.oracle == "definition.json:run"
    assert spec.reference_source == d["reference"] and spec.tolerances == ()


def test_other_workloads_of_an_exported_definition(tmp_path: Path) -> None:
    export(SMALL, tmp_path)
    path = definitions(tmp_path, SMALL)[1]
    lines = lines_of(path, tmp_path)
    lines[0]["workload"]["axes"]["T"] = 77
    (tmp_path / "mine.jsonl").write_text(json.dumps(lines[0]) + "\n\n")
    spec = load(path, tmp_path / "mine.jsonl")
    assert replace(spec, workloads=SMALL.workloads) == SMALL and len(spec.workloads) == 1
    assert spec.workloads[0].axes["T"] == 77 and spec.workloads[0].axes["HV"] == 4


def test_specs_that_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(kda2.InvalidValue, match="spec must be of kda or kda_step, got 'gemm'"):
        export(replace(KDA, name="gemm"), tmp_path)
    with pytest.raises(kda2.InvalidValue, match="workload must be one that the spec has, got None"):
        export(replace(KDA, workloads=()), tmp_path)
    lame = replace(KDA, workloads=(Workload("w", {"seqlens": (1,), "heads": 1, "k": 4}, {"dtype": "bf16"}),))
    with pytest.raises(kda2.InvalidValue, match="workload w must be a case with v, got seqlens, heads, k, dtype"):
        export(lame, tmp_path)
    odd = replace(SMALL, workloads=(replace(SMALL.workloads[0], options={"dtype": "bf16", "gate": "loud"}),))
    with pytest.raises(kda2.InvalidValue, match="gate must be one of strong, weak, none, mixed, got 'loud'"):
        export(odd, tmp_path)
    assert not list(tmp_path.iterdir())


def written(folder: Path, definition: Any, *lines: Any) -> tuple[Path, Path]:
    d, w = folder / "definition.json", folder / "workloads.jsonl"
    d.write_text(definition if isinstance(definition, str) else json.dumps(definition))
    w.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return d, w


def test_a_foreign_definition(tmp_path: Path) -> None:
    spec = load(*written(tmp_path, FOREIGN, LINE))
    assert spec == OpSpec(
        name="gemm_n4_k8",
        version=1,
        source="FlashInfer-Trace gemm. C = s * A @ B.T. constraints: M == offsets[-1].item()",
        inputs=(
            TensorSpec("A", ("M", "K"), ("bf16",), meaning="rows"),
            TensorSpec("B", ("N", "K"), ("bf16",)),
            TensorSpec("offsets", ("M + 1",), ("int32",)),
            TensorSpec("s", (), ("scalar fp32",)),
        ),
        outputs=(TensorSpec("C", ("M", "N"), ("float8_e4m3fn",)),),
        options={"N": (4,), "K": (8,)},
        oracle="definition.json:run",
        flops="",
        bytes="",
        families=(),
        tolerances=(),
        workloads=(
            Workload(
                "u-1",
                {"N": 4, "K": 8, "M": 2, "L": 3},
                {"A": "random", "B": ("b.safetensors", "B"), "offsets": "random", "s": 0.5},
            ),
        ),
        reference_source=FOREIGN["reference"],
    )
    assert OpSpec.from_json(spec.to_json()) == spec


def changed(plain: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(plain))
    *steps, last = path.split(".")
    inner = copy
    for step in steps:
        inner = inner[step]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return dict(copy)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("reference", None, "definition.json: reference must be a FlashInfer-Trace definition, got Field required"),
        ("reference", "def walk(): ...", "no function named run"),
        ("reference", "def run(:", "not Python"),
        ("axes.M.type", "dynamic", "definition.json: axes.M must be"),
        ("axes.K.value", -1, "definition.json: axes.K.const.value must be"),
        ("inputs.A.dtype", "float64", "definition.json: inputs.A.dtype must be"),
        ("inputs.A.shape", ["M", "Q"], "A has an axis Q that axes lacks"),
        ("outputs", {"A": {"shape": ["M"], "dtype": "int8"}}, "A is an input and an output"),
        ("name", "", "definition.json: name must be"),
    ],
)
def test_what_is_wrong_in_a_definition_is_named(path: str, value: Any, says: str, tmp_path: Path) -> None:
    d, _ = written(tmp_path, changed(FOREIGN, path, value))
    with pytest.raises(kda2.InvalidValue) as e:
        load(d)
    assert says in str(e.value)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("definition", "another", "line 2 must be of the definition gemm_n4_k8, got 'another'"),
        ("workload.axes.M", None, "line 2: axes must be L, M, got L"),
        ("workload.axes.Q", 3, "line 2: axes must be L, M, got L, M, Q"),
        ("workload.inputs.s", None, "line 2: inputs must be A, B, offsets, s, got A, B, offsets"),
        ("workload.inputs.s.type", "vector", "line 2: workload.inputs.s must be a FlashInfer-Trace line"),
        ("workload.inputs.B.path", None, "line 2: workload.inputs.B.safetensors.path must be"),
        ("workload.uuid", None, "line 2: workload.uuid must be a FlashInfer-Trace line, got Field required"),
    ],
)
def test_what_is_wrong_in_a_workload_is_named(path: str, value: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(kda2.InvalidValue) as e:
        load(*written(tmp_path, FOREIGN, LINE, changed(LINE, path, value)))
    assert says in str(e.value)


def test_files_that_are_absent_or_no_json(tmp_path: Path) -> None:
    d, w = written(tmp_path, FOREIGN, "{")
    with pytest.raises(kda2.InvalidValue, match="line 1 must be a FlashInfer-Trace line, got Invalid JSON"):
        load(d, w)
    with pytest.raises(kda2.InvalidValue, match=r"workloads must be a file, got .*nosuch, which does not exist"):
        load(d, tmp_path / "nosuch")
    d.write_bytes(b"\xff\xfe")
    with pytest.raises(kda2.InvalidValue, match="which is not UTF-8"):
        load(d)


def test_a_torn_sidecar_is_named(tmp_path: Path) -> None:
    export(SMALL_STEP, tmp_path)
    (path,) = definitions(tmp_path, SMALL_STEP)
    (tmp_path / "kda2/kda_step.json").write_text("{")
    with pytest.raises(kda2.InvalidValue, match=r"kda_step.json must be JSON.*export again, or remove it"):
        load(path)
    (tmp_path / "kda2/kda_step.json").unlink()
    assert load(path).oracle == "definition.json:run"
