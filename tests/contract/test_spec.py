"""OpSpec as JSON: what is written comes back the same, and what is not a spec is refused with the place."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kda2 import InvalidValue
from kda2.contract import OpSpec, TensorSpec, Tolerance, Workload
from kda2.ops.kda.spec import SPECS

SMALL = OpSpec(
    name="scale",
    version=1,
    source="a test",
    inputs=(
        TensorSpec("x", ("T", "2 * K"), ("bf16",)),
        TensorSpec("s", (), ("fp32",), optional=True, meaning="factor"),
    ),
    outputs=(TensorSpec("y", ("T",), ("bf16",)),),
    options={"gate": ("log", None), "on": (False, True)},
    oracle="a.b",
    flops="a.flops",
    bytes="a.bytes",
    families=("random",),
    tolerances=(Tolerance("bf16", 6e-3, 0.08),),
    workloads=(Workload("w", {"seqlens": (1, (2, 3)), "heads": 4}, {"state": {"a": (1.0,)}}, weight=0.5),),
)


@pytest.mark.parametrize("spec", [SMALL, replace(SMALL, reference_source="def run(): ..."), *SPECS.values()])
def test_round_trip(spec: OpSpec) -> None:
    back = OpSpec.from_json(spec.to_json())
    assert back == spec and back.content_hash == spec.content_hash and back.to_json() == spec.to_json()
    assert type(back.inputs) is tuple and type(back.inputs[0].shape) is tuple
    assert type(back.workloads[0].axes.get("seqlens", ())) is tuple


def test_hashes_do_not_move() -> None:
    """Ledgers and exports name specs by them."""
    assert SMALL.content_hash == "e42a13704d87d05cb21952765384a91c4c3d49cebe408480574ee27204b56a11"
    assert "reference_source" not in SMALL.to_json()
    assert replace(SMALL, reference_source="x = 1").content_hash != SMALL.content_hash


def test_absent_fields_take_their_defaults() -> None:
    plain = json.loads(SMALL.to_json())
    del plain["workloads"], plain["inputs"][0]["meaning"], plain["tolerances"][0]["provenance"]
    plain["tolerances"][0]["element_rms"] = 1
    back = OpSpec.from_json(json.dumps(plain))
    assert back == replace(SMALL, workloads=(), tolerances=(Tolerance("bf16", 6e-3, 1.0),))
    assert type(back.tolerances[0].element_rms) is float


def test_the_nearest_tolerance_counts() -> None:
    rows = [("", ""), ("", "y"), ("deep", ""), ("deep", "y")]
    limits = [Tolerance("bf16", float(i), 0.1, family=f, output=o) for i, (f, o) in enumerate(rows)]
    spec = replace(SMALL, tolerances=(*limits, Tolerance("fp32", 9.0, 0.1)))
    assert spec.judged_dtypes == ("bf16", "fp32")
    asked = [("other", "z"), ("other", "y"), ("deep", "z"), ("deep", "y")]
    assert [spec.tolerance("bf16", *row).relative_l2 for row in asked] == [0.0, 1.0, 2.0, 3.0]
    assert spec.tolerance("fp32", "deep", "y").relative_l2 == 9.0
    with pytest.raises(KeyError, match=r"scale has no tolerance for fp16; it has \['bf16', 'fp32'\]"):
        spec.tolerance("fp16", "deep", "y")
    back = OpSpec.from_json(spec.to_json())
    assert back == spec and back.tolerances[3].family == "deep"


def test_a_tolerance_of_any_family_is_written_as_it_always_was() -> None:
    """Specs of before know no families."""
    old = {"dtype": "bf16", "element_rms": 0.08, "provenance": "", "relative_l2": 6e-3}
    assert json.loads(SMALL.to_json())["tolerances"] == [old]


def at(plain: Any, path: str, value: Any) -> None:
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        plain = plain[step]
    if value is None:
        del plain[last]
    else:
        plain[last] = value


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("name", None, "name must be given, got nothing"),
        ("name", 3, "name must be a string, got 3"),
        ("version", True, "version must be an integer, got true"),
        ("version", 1.0, "version must be an integer, got 1.0"),
        ("nosuch", 1, "nosuch must be absent: OpSpec has name, version, "),
        ("schema", 2, "schema must be 1, got 2; it comes from another version of kda2"),
        ("schema", True, "schema must be 1, got True"),
        ("schema", None, "schema must be 1, got None"),
        ("inputs", {}, "inputs must be an array, got an object"),
        ("inputs.1", "x", 'inputs[1] must be an object, got "x"'),
        ("inputs.1.dtypes", None, "inputs[1].dtypes must be given, got nothing"),
        ("inputs.0.shape.1", 4, "inputs[0].shape[1] must be a string, got 4"),
        ("inputs.1.optional", 1, "inputs[1].optional must be true or false, got 1"),
        ("inputs.1.layout", "kv", "inputs[1].layout must be absent: TensorSpec has name, shape, "),
        ("options", [], "options must be an object, got an array"),
        ("options.gate", "log", 'options.gate must be an array, got "log"'),
        ("tolerances.0.relative_l2", "6e-3", 'tolerances[0].relative_l2 must be a finite number, got "6e-3"'),
        ("tolerances.0.relative_l2", float("nan"), "tolerances[0].relative_l2 must be a finite number, got NaN"),
        ("workloads.0.axes.heads", float("inf"), "workloads[0].axes.heads must be finite, got inf"),
        ("workloads.0.weight", False, "workloads[0].weight must be a finite number, got false"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any, says: str) -> None:
    plain = json.loads(SMALL.to_json())
    at(plain, path, value)
    with pytest.raises(InvalidValue) as e:
        OpSpec.from_json(json.dumps(plain))
    assert str(e.value).startswith(says)


@pytest.mark.parametrize(("text", "says"), [("{", "spec must be JSON, got text that is not"), ("", "spec must be JSON"),
                                            ("[1]", "spec must be a JSON object, got an array"),
                                            ("null", "spec must be a JSON object, got null")])  # fmt: skip
def test_what_is_no_object_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidValue) as e:
        OpSpec.from_json(text)
    assert str(e.value).startswith(says)
