"""Files that compute one stage of chunked KDA, through the children."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kda2.testing import STAGES
from kda2.workbench.verifier.words import reasons

TEXT = (Path(__file__).parent / "kernels" / "stages.py").read_text()


def kernel(stage: str) -> str:
    """The file whose `run` is the stage. A function called prepare would be another thing there."""
    names = ", ".join(t.name for t in STAGES[stage].inputs)
    stage_of_all = TEXT.replace("def prepare(", "def both(").replace("def state(", "def states(")
    called = {"prepare": "both", "state": "states"}.get(stage, stage)
    return f"{stage_of_all}\n\ndef run({names}):\n    return {called}({names})\n"


@pytest.mark.parametrize("stage", STAGES)
def test_a_right_stage_passes(shared: Any, stage: str) -> None:
    verdict = shared.numerics(shared.file(kernel(stage)), "random", "ragged", stage=stage)
    assert (verdict.stage, verdict.outcome) == ("L3", "pass")
    wanted = [t.name for t in STAGES[stage].outputs] + ["o (whole call)", "final state (whole call)"]
    assert list(verdict.evidence["families"]["random"]["quantities"]) == wanted


WRONG = {
    "factors": (["decay_from = G.exp(), (G[..., -1:, :] - G)", "decay_from = G.exp(), (G[..., -1:, :] + 0 * G)"], "Kr"),
    "factors ": (["A.tril(-1)", "A.tril()"], "A"),
    "solve": (["solve_triangular(A, ", "solve_triangular(0 * A, "], "W"),
    "solve ": (["Tm @ v.float()", "v.float()"], "U"),
    "prepare": (["beta.float()[..., None] * torch", "torch"], "W"),
    "state": (["decay[i][..., None] * final[n]", "final[n]"], "Vn"),
    "state ": (["            before[i] = final[n]\n", ""], "S"),
    "output": ([".tril()\n", ".tril(-1)\n"], "o"),
    "output ": (["Qd.float() @ S.float() + ", ""], "o"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_stage_is_refused_for_the_tensor_that_is_wrong(
    shared: Any, changed: Callable[..., str], name: str
) -> None:
    stage, (pairs, first) = name.strip(), WRONG[name]
    outcome, says = shared.says(shared.file(changed(kernel(stage), *pairs)), "weak_gate", stage=stage)
    assert outcome == "fail"
    assert f"{says} ".startswith(f"weak_gate: {first} is off: relative L2 ")
    assert "worst element at chunk " in says and "(the probe: memory over many chunks" in says


def test_what_else_is_wrong_is_named(shared: Any, changed: Callable[..., str]) -> None:
    path = shared.file(changed(kernel("state"), "decay[i][..., None] * final[n]", "final[n]"))
    says = shared.says(path, stage="state")[1]
    assert "; S is off: " in says
    assert "; off too: final_state, o (whole call), final state (whole call) (the probe: the formula itself)" in says


@pytest.mark.parametrize(
    ("pairs", "phrase"),
    [
        ([', "S": before', ""], "a dict of Vn, S, final_state; S is missing, it returned Vn, final_state"),
        (['"S": before', '"S": before, "o": U'], "it also returned o"),
        (['"S": before', '"S": before.float()'], "S: wanted dtype torch.bfloat16, got torch.float32"),
        (['"S": before', '"S": before.mT[..., :1]'], "S: wanted shape (2, 2, 16, 16), got (2, 2, 16, 1)"),
        (["            final[n] = ", "            W[i] = 0\n            final[n] = "], "inputs: changed: W"),
        (["torch.zeros(*decay", "torch.empty(*decay", "            before[i] = final[n]\n", ""],
         "S: 1024 elements are NaN or inf"),
        (["def run(", "def prepare(**x):\n    raise ValueError('no plan')\n\n\ndef run("],
         "it raised ValueError: no plan (kernel.py, line "),
    ],
)  # fmt: skip
def test_a_stage_that_breaks_its_interface_is_refused(
    shared: Any, changed: Callable[..., str], pairs: list[str], phrase: str
) -> None:
    outcome, says = shared.says(shared.file(changed(kernel("state"), *pairs)), stage="state")
    assert outcome == "fail" and phrase in says


def test_wrong_names_of_inputs_are_refused_before_anything_runs(shared: Any, changed: Callable[..., str]) -> None:
    path = shared.file(changed(kernel("solve"), "def run(A, beta,", "def run(a, beta,"))
    found = shared.code(path, stage="solve")
    assert found["L0"].outcome == "fail"
    assert reasons(found["L0"]) == [
        "arguments: run asks for a and does not take A, wants arguments among A, beta, Kd, v; rename them; another "
        "operator is --spec, one stage only is --stage"
    ]


def test_a_stage_is_built_on_inputs_of_its_own(shared: Any) -> None:
    found = shared.code(shared.file(kernel("output")), stage="output")
    assert found["L0"].passed and found["L1"].outcome == "not_run(it launches no Triton kernel)"


KEEPS = """

KEPT = {}


def run(**x):
    key = tuple(y.data_ptr() for y in x.values())
    if key not in KEPT:
        KEPT[key] = compute(**x)
    return {name: y.clone() for name, y in KEPT[key].items()}
"""


@pytest.mark.parametrize("stage", ["solve", "output"])
def test_a_stage_is_asked_again(shared: Any, stage: str) -> None:
    kept = kernel(stage).replace("def run(", "def compute(") + KEEPS
    verdict = shared.numerics(shared.file(kept), "random", stage=stage)
    families = verdict.evidence["families"]
    assert verdict.outcome == "fail" and list(families) == ["random", "other contents"]
    assert families["random"]["ok"] and families["other contents"]["gate"] == "repeat"
    assert reasons(verdict)[0].startswith("other contents: asked again with other contents in the same tensors")
