"""Contracts that came from a file: their oracle judges, in a process of its own, with limits from its own roundings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kda2.contract import OpSpec, TensorSpec, Tolerance, Workload
from kda2.errors import InvalidValue, KDA2Error
from kda2.workbench.verifier import Subject, imported
from kda2.workbench.verifier.imported import extent
from kda2.workbench.verifier.subject import IMPORTED
from kda2.workbench.verifier.words import reasons

RMSNORM = OpSpec(
    name="rmsnorm", version=1, source="a root mean square of each row",
    inputs=(
        TensorSpec("x", ("N", "D"), ("bf16",)), TensorSpec("w", ("D",), ("bf16",)),
        TensorSpec("eps", (), ("scalar fp32",)),
    ),
    outputs=(TensorSpec("y", ("N", "D"), ("bf16",)),),
    options={"D": (32,)}, oracle="file:run", flops="", bytes="", families=(), tolerances=(),
    reference_source=(
        "import torch\n\ndef run(x, w, eps):\n"
        "    wide = x.float() if x.dtype == torch.bfloat16 else x\n"
        "    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * w).to(x.dtype)\n"
    ),
)  # fmt: skip
RIGHT = """import torch


def run(x, w, eps):
    wide = x.float()
    return {"y": (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * w.float()).to(x.dtype)}
"""
# Half of what it makes goes through a gate; the width of the input is no axis by itself.
SWIGLU = replace(
    RMSNORM, name="swiglu",
    inputs=(TensorSpec("x", ("N", "2*D"), ("fp32",)),), outputs=(TensorSpec("y", ("N", "D"), ("fp32",)),), options={},
    reference_source=(
        "import torch\n\ndef run(x):\n    a, b = x.chunk(2, -1)\n    return torch.nn.functional.silu(a) * b\n"
    ),
)  # fmt: skip


def save(folder: Path, spec: OpSpec) -> str:
    file = folder / f"{spec.name}.json"
    file.write_text(spec.to_json())
    return str(file)


@pytest.fixture(scope="module")
def rmsnorm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("rmsnorm"), RMSNORM)


def judged(shared: Any, text: str, spec: str, **sizes: int) -> Any:
    own = imported.sizes_of(imported.contract(spec))
    return shared.numerics(Subject.of_file(shared.file(text), op=IMPORTED), spec=spec, sizes={**own, **sizes})


@pytest.mark.parametrize("returns", ["dict", "tensor", "tuple"])
def test_a_right_file_passes(shared: Any, rmsnorm: str, returns: str) -> None:
    text = {
        "dict": RIGHT,
        "tensor": RIGHT.replace('{"y": ', "").replace("}", ""),
        "tuple": RIGHT.replace('{"y": ', "").replace("}", ","),
    }
    verdict = judged(shared, text[returns], rmsnorm, N=9)
    assert verdict.outcome == "pass", reasons(verdict)
    assert list(verdict.evidence["families"]) == ["random", "other contents"]
    assert list(verdict.evidence["families"]["random"]["quantities"]) == ["y"]


WRONG = {
    "no weight": ([" * w.float()", ""], "fail", "numerics", "y is off: relative L2 "),
    "no mean": ([".mean(-1", ".sum(-1"], "fail", "numerics", "y is off: relative L2 "),
    "the last row": (["    return", "    wide[-1] = 0\n    return"], "fail", "numerics", "worst element at N 8, D "),
    "dtype": ([".to(x.dtype)", ""], "fail", "outputs", "y: wanted dtype torch.bfloat16, got torch.float32"),
    "shape": (["* w.float())", "* w.float())[:, 1:]"], "fail", "outputs", "wanted shape (9, 32), got (9, 31)"),
    "writes": (["    return", "    x.zero_()\n    return"], "fail", "inputs", "inputs: changed: x"),
    "its input": (["wide = x.float()", "return {'y': x}"], "fail", "aliasing", "of inputs (y in that of x)"),
    "two": (["return {", "return {'z': x, "], "fail", "outputs", "it also returned z"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused(shared: Any, rmsnorm: str, name: str) -> None:
    (old, new), outcome, gate, says = WRONG[name]
    assert old in RIGHT
    verdict = judged(shared, RIGHT.replace(old, new), rmsnorm, N=9)
    assert verdict.outcome == outcome and verdict.evidence["families"]["random"]["gate"] == gate
    assert says in reasons(verdict)[0]


def test_a_kept_answer_is_refused(shared: Any, rmsnorm: str) -> None:
    kept = RIGHT.replace("def run(", "def compute(") + (
        "\n\nKEPT = {}\n\n\ndef run(x, w, eps):\n    key = x.data_ptr()\n    if key not in KEPT:\n"
        "        KEPT[key] = compute(x, w, eps)['y']\n    return KEPT[key].clone()\n"
    )
    verdict = judged(shared, kept, rmsnorm, N=9)
    assert verdict.evidence["families"]["random"]["ok"]
    assert verdict.evidence["families"]["other contents"]["gate"] == "repeat"


def test_limits_follow_from_the_dtype(rmsnorm: str, conditions: Any, tmp_path: Path) -> None:
    narrow = imported.imported_question(conditions(spec=rmsnorm, sizes={"N": 9, "D": 32}), "random")
    inputs = tuple(replace(t, dtypes=(t.dtypes[0].replace("bf16", "fp32"),)) for t in RMSNORM.inputs)
    wide = replace(RMSNORM, name="fine", inputs=inputs, outputs=(TensorSpec("y", ("N", "D"), ("fp32",)),))
    fine = imported.imported_question(conditions(spec=save(tmp_path, wide), sizes={"N": 9, "D": 32}), "random")
    assert narrow.want["y"].dtype == torch.float64 and narrow.given["x"].dtype == torch.bfloat16
    assert 1e-3 < narrow.limits["y"].relative_l2 < 5e-2 and fine.limits["y"].relative_l2 < 1e-5
    assert "bf16" in narrow.limits["y"].provenance


def test_a_contracts_own_tolerance_counts(shared: Any, tmp_path: Path) -> None:
    spec = save(tmp_path, replace(RMSNORM, name="wide", tolerances=(Tolerance("bf16", 0.5, 50.0),)))
    assert judged(shared, RIGHT.replace(" + eps", ""), spec, N=9).outcome == "pass"
    assert judged(shared, RIGHT.replace("return {", "wide = 0 * wide\n    return {"), spec, N=9).outcome == "fail"


def test_workloads_name_the_sizes(tmp_path: Path) -> None:
    spec = replace(RMSNORM, name="sized", workloads=(Workload("a", {"N": 5}), Workload("b", {"N": 7})))
    assert imported.sizes_of(imported.contract(save(tmp_path, spec))) == {"D": 32, "N": 5}


@pytest.mark.parametrize(
    ("term", "value"), [("N", 3), ("N + 1", 4), ("2 * N * D", 24), ("D // 3 - 1", 0), ("7", 7), ("(N + D) * 2", 14)]
)
def test_terms_of_shapes(term: str, value: int) -> None:
    assert extent(term, {"N": 3, "D": 4}) == value


def test_an_axis_without_an_extent_says_how_to_name_it(shared: Any, rmsnorm: str, conditions: Any) -> None:
    with pytest.raises(InvalidValue, match=r"x's axis N must be an extent, got none; name it: --problem N=64"):
        imported.imported_question(conditions(spec=rmsnorm, sizes={"D": 32}), "random")


def test_integers_cannot_be_random(conditions: Any, tmp_path: Path) -> None:
    inputs = (*RMSNORM.inputs, TensorSpec("offsets", ("N",), ("int32",)))
    spec = save(tmp_path, replace(RMSNORM, name="offsets", inputs=inputs))
    with pytest.raises(InvalidValue, match="offsets must be of floating numbers, which can be random, got int32"):
        imported.imported_question(conditions(spec=spec, sizes={"N": 9, "D": 32}), "random")


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int32"])
def test_outputs_that_cannot_be_compared_are_refused(conditions: Any, tmp_path: Path, dtype: str) -> None:
    spec = save(tmp_path, replace(RMSNORM, name="out", outputs=(TensorSpec("y", ("N", "D"), (dtype,)),)))
    with pytest.raises(KDA2Error, match="y"):
        imported.imported_question(conditions(spec=spec, sizes={"N": 9, "D": 32}), "random")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def run(x, w, eps):\n    raise ValueError('no oracle')\n", "it raised ValueError: no oracle"),
        ("def runs(x, w, eps):\n    return x\n", "importing it raised KeyError: 'run'"),
        ("import os\n\ndef run(x, w, eps):\n    os._exit(3)\n", "it left with exit code 3"),
    ],
)
def test_an_oracle_that_does_not_answer(conditions: Any, tmp_path: Path, source: str, says: str) -> None:
    spec = save(tmp_path, replace(RMSNORM, name="mute", reference_source=source))
    with pytest.raises(KDA2Error, match="the oracle of mute does not answer: ") as raised:
        imported.imported_question(conditions(spec=spec, sizes={"N": 9, "D": 32}), "random")
    assert says in str(raised.value)


def test_an_oracle_that_takes_no_fp64_answers_in_its_own_dtype(conditions: Any, tmp_path: Path) -> None:
    source = f"{RMSNORM.reference_source}\n\nplain = run\n\n\ndef run(x, w, eps):\n" \
        "    assert x.dtype == torch.bfloat16\n    return plain(x, w, eps)\n"  # fmt: skip
    spec = save(tmp_path, replace(RMSNORM, name="narrow", reference_source=source))
    question = imported.imported_question(conditions(spec=spec, sizes={"N": 9, "D": 32}), "random")
    assert question.want["y"].dtype == torch.bfloat16


# A file of another project's.
DEFINITION: dict[str, Any] = {
    "name": "rmsnorm_d32", "op_type": "rmsnorm", "description": "a root mean square of each row",
    "axes": {"N": {"type": "var"}, "D": {"type": "const", "value": 32}},
    "inputs": {
        "x": {"shape": ["N", "D"], "dtype": "bfloat16"}, "w": {"shape": ["D"], "dtype": "bfloat16"},
        "eps": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"y": {"shape": ["N", "D"], "dtype": "bfloat16"}},
    "reference": RMSNORM.reference_source,
}  # fmt: skip
LINE = {
    "definition": "rmsnorm_d32",
    "workload": {
        "uuid": "u-1", "axes": {"N": 6},
        "inputs": {"x": {"type": "random"}, "w": {"type": "random"}, "eps": {"type": "scalar", "value": 1e-6}},
    },
    "solution": None, "evaluation": None,
}  # fmt: skip


def test_a_definition_of_flashinfer_trace(shared: Any, tmp_path: Path) -> None:
    (tmp_path / "definition.json").write_text(json.dumps(DEFINITION))
    (tmp_path / "workloads.jsonl").write_text(json.dumps(LINE) + "\n")
    spec = str(tmp_path / "definition.json")
    assert imported.sizes_of(imported.contract(spec)) == {"D": 32, "N": 6}
    verdict = judged(shared, RIGHT, spec)
    assert verdict.outcome == "pass", reasons(verdict)
    assert judged(shared, RIGHT.replace(" * w.float()", ""), spec).outcome == "fail"


def test_a_definition_without_its_workloads(tmp_path: Path) -> None:
    (tmp_path / "definition.json").write_text(json.dumps(DEFINITION))
    assert imported.sizes_of(imported.contract(str(tmp_path / "definition.json"))) == {"D": 32}


def test_an_axis_within_a_term_can_be_named(shared: Any, tmp_path: Path) -> None:
    text = "import torch\n\n\ndef run(x):\n    a, b = x.chunk(2, -1)\n    return a * a.sigmoid() * b\n"
    verdict = judged(shared, text, save(tmp_path, SWIGLU), N=5, D=8)
    assert verdict.outcome == "pass", reasons(verdict)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "--spec must be kda, kda_step or a contract's file, got "),
        ('{"schema": 7}', "schema must be 1, got 7"),
        ("[]", "definition "),
        (replace(RMSNORM, reference_source="").to_json(), "--spec must be a contract with the source of its oracle"),
    ],
)
def test_what_is_no_contract(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "spec.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidValue) as raised:
        imported.contract(str(file))
    assert says in str(raised.value)
