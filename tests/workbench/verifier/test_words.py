"""Verdicts in words: the outcome of many answers, the gate that refused, the room that is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kda2.testing.compare import Comparison
from kda2.workbench.records import Verdict
from kda2.workbench.verifier import numerics
from kda2.workbench.verifier.numerics import INPUTS
from kda2.workbench.verifier.stages import _outcome
from kda2.workbench.verifier.words import margins, reasons

OK: dict[str, Any] = {"ok": True, "quantities": {}}


def wrong(**fields: str) -> dict[str, Any]:
    return {"ok": False, "quantities": {}, **fields}


@pytest.mark.parametrize(
    ("results", "outcome"),
    [
        ({"a": OK, "b": OK}, "pass"),
        ({"a": OK, "b": OK, "other contents": OK}, "pass"),
        ({"a": OK}, "fail"),  # b was not answered
        ({"a": OK, "b": wrong(gate="numerics")}, "fail"),
        ({"a": OK, "b": OK, "other contents": wrong(gate="repeat")}, "fail"),
        ({"a": wrong(ended="raised", gate="process"), "b": OK}, "fail"),
        ({"a": OK, "b": wrong(ended="refused", gate="process")}, "inconclusive"),
        ({"a": OK, "b": wrong(ended="broken", gate="")}, "inconclusive"),
        ({"a": wrong(ended="needs a GPU", says="no driver"), "b": wrong(ended="refused")},
         "not_run(it needs a GPU: no driver)"),
        ({"a": wrong(ended="refused"), "b": wrong(gate="numerics")}, "fail"),
        ({"a": wrong(ended="changed", gate="policy"), "b": wrong(gate="numerics")}, "invalid"),
        ({"a": OK, "b": wrong(gate="tamper")}, "invalid"),
        ({"a": OK, "b": wrong(gate="imports")}, "invalid"),
        ({"a": OK, "b": wrong(gate="aliasing")}, "fail"),
    ],
)  # fmt: skip
def test_the_outcome_of_many_answers(results: dict[str, Any], outcome: str) -> None:
    assert _outcome(results, ("a", "b")) == outcome


def off(quantity: str, mismatch: str = "") -> Comparison:
    return Comparison(quantity, 1.0, 1.0, 0.0, None, 0, 0, mismatch=mismatch)


@pytest.mark.parametrize(
    ("found", "again", "gate"),
    [
        ([off("o")], False, "numerics"),
        ([off("o")], True, "repeat"),
        ([off("o", "wanted dtype"), off("final state")], False, "outputs"),
        ([off("o", "wanted dtype")], True, "outputs"),
        ([off("o"), off(INPUTS, "changed: q")], False, "inputs"),
    ],
)
def test_the_gate_of_comparisons(found: list[Comparison], again: bool, gate: str) -> None:
    assert numerics._gate(found, again) == gate


FIRST = "    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]\n"
GATED = {
    "numerics": ["scale * (S", "(S"],
    "outputs": ["o.to(v.dtype)", "o"],
    "inputs": [FIRST, f"    beta.zero_()\n{FIRST}"],
    "aliasing": ['"o": o.to(v.dtype)', '"o": given.copy_(o)', FIRST, f"    given = v\n{FIRST}"],
    "tamper": [FIRST, f"    torch.equal = torch.allclose\n{FIRST}"],
    "process": [FIRST, f"    raise ValueError('no')\n{FIRST}"],
}


@pytest.mark.parametrize("gate", GATED)
def test_evidence_names_the_gate(
    shared: Any, plain: str, changed: Callable[..., str], conditions: Callable[..., Any], gate: str
) -> None:
    if gate == "tamper":  # its process is of no use to others
        shared = type(shared)(shared.file("").parent)
    verdict = shared.numerics(shared.file(changed(plain, *GATED[gate])))
    assert verdict.evidence["families"]["random"]["gate"] == gate
    assert verdict.outcome == ("invalid" if gate == "tamper" else "fail")
    assert verdict.evidence["seed"] == 3 and verdict.evidence["on"] == "cpu, Triton's interpreter"
    if gate == "tamper":
        shared.children.kill()


# An answer by one that knows the protocol: the judge's own lines, from inside.
FORGED = """    import json, sys
    frame = sys._getframe()
    while frame.f_code.co_name != "main":
        frame = frame.f_back
    token = frame.f_locals["task"]["token"]
"""
SAY = '    print(json.dumps({LINE} | {"token": token}), file=frame.f_locals["answers"], flush=True)\n'


@pytest.mark.parametrize("line", ['{"done": True}', '{"gates": [1, 2]}', '{"gates": {"tamper": 3}}'])
def test_a_forged_answer_is_the_end_of_the_process_and_not_of_the_judge(
    shared: Any, plain: str, changed: Callable[..., str], line: str
) -> None:
    said = [line] if "done" in line else [line, '{"done": True}']
    lines = FORGED + "".join(SAY.replace("{LINE}", each) for each in said)
    forging = type(shared)(shared.file("").parent)
    verdict = forging.numerics(forging.file(changed(plain, FIRST, lines + FIRST)))
    forging.children.kill()
    assert verdict.outcome == "fail" and verdict.evidence["gate"] == "protocol"
    assert "what it answered is no answer" in reasons(verdict)[0]


@pytest.mark.parametrize("garbage", ["b'no tensors'", "b''"])
def test_an_answer_that_is_none_is_the_end_of_the_process(
    shared: Any, plain: str, changed: Callable[..., str], garbage: str
) -> None:
    lines = f"""    import sys
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("self"), "wire"):
        frame = frame.f_back
    type(frame.f_locals["self"].wire).give = lambda self, outputs: __import__("os").pwrite(
        self.descriptors[1], {garbage}, 0)
"""
    forging = type(shared)(shared.file("").parent)
    verdict = forging.numerics(forging.file(changed(plain, FIRST, lines + FIRST)))
    forging.children.kill()
    assert verdict.outcome == "fail" and verdict.evidence["gate"] == "protocol"
    assert "its answer is no safetensors file" in reasons(verdict)[0]


def test_margins_are_the_largest_of_each_quantity() -> None:
    def quantity(margin: float | None) -> dict[str, Any]:
        return {"ok": True, "margin": margin, "says": ""}

    families = {
        "random": {"ok": True, "quantities": {"o": quantity(0.25), "final state": quantity(0.5)}},
        "weak_gate": {"ok": True, "quantities": {"o": quantity(0.75), "final state": quantity(None)}},
        "one_token": wrong(ended="raised"),
    }
    found = margins([
        Verdict(stage="L0", outcome="pass", evidence={}, seconds=0.0),
        Verdict(stage="L3", outcome="pass", evidence={"families": families}, seconds=0.0),
    ])  # fmt: skip
    assert found == [
        "L3 o: 0.75 of its limit at most, on weak_gate",
        "L3 final state: 0.50 of its limit at most, on random",
    ]


def test_margins_of_a_right_kernel(shared: Any, plain: str) -> None:
    lines = margins([shared.numerics(shared.file(plain), "random", "one_token")])
    assert [line.partition(":")[0] for line in lines] == ["L3 o", "L3 final state"]
    room = [float(line.partition(": ")[2].split()[0]) for line in lines]
    assert 0 < room[0] < 1 and 0 <= room[1] < 1
