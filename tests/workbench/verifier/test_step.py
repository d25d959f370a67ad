"""Files that compute `kda_step`: rows with a slot each, in place or not, and rows that are padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kda2.workbench.verifier import Subject
from kda2.workbench.verifier.questions import AGAIN, OTHER_DTYPES, probes_of
from kda2.workbench.verifier.words import reasons

TEXT = (Path(__file__).parent / "kernels" / "step.py").read_text()
SIZES = {"B": 5, "H": 1, "HV": 2, "K": 16, "V": 12}
IN_PLACE = ("states, o = state.clone(), ", "states, o = state, ")


def judged(shared: Any, text: str, *probes: str) -> Any:
    return shared.numerics(Subject.of_file(shared.file(text), op="kda_step"), *probes, sizes=SIZES)


@pytest.mark.parametrize("pairs", [(), IN_PLACE], ids=["a new pool", "in place"])
def test_a_right_step_passes_every_probe(shared: Any, changed: Callable[..., str], pairs: tuple[str, ...]) -> None:
    probes = probes_of("kda_step")
    assert probes[-2:] == ("state_pool", "padded_rows") and "weak_gate" in probes
    verdict = judged(shared, changed(TEXT, *pairs), *probes)
    assert verdict.outcome == "pass", reasons(verdict)
    assert list(verdict.evidence["families"]) == ["random", *AGAIN, *probes[1:], *OTHER_DTYPES]
    assert list(verdict.evidence["families"]["padded_rows"]["quantities"]) == ["o", "state"]


WRONG = {
    "no delta": ("random", ["v32[b] - (S * k[b][..., None]).sum(1)", "v32[b]"], "numerics", "o is off: relative L2 "),
    "a state that is not written": (
        "random", ["        states[slot] = (S if state_layout == \"kv\" else S.mT).to(state.dtype)\n", ""], "numerics",
        "state is off: relative L2 ",
    ),
    "padding that is written": (
        "padded_rows", ["slot == pad_slot", "False"], "numerics", "state is off: relative L2 ",
    ),
    "padding with an answer": (
        "padded_rows", ["            continue\n", "            o[b] = v32[b]\n            continue\n"], "numerics",
        "o is off: relative L2 ",
    ),
    "padding left as it is found": (
        "padded_rows", ["torch.zeros(B, HV, V)", "torch.empty(B, HV, V)"], "numerics", "elements are NaN or inf",
    ),
    "the slot of another row": (
        "state_pool", ["        S = (state[slot]", "        slot = b\n        S = (state[slot]"], "numerics", "is off",
    ),
    "slots that are cleared": (
        "state_pool", ["state.clone(), ", "torch.zeros_like(state), "], "numerics", "state is off: relative L2 ",
    ),
    "keys written to": (
        "random", ["    q, k, v32", "    given = k\n    q, k, v32", "    return {", "    given.zero_()\n    return {"],
        "inputs", "inputs: changed: k",
    ),
    "no state": ("random", [', "state": states', ""], "outputs", "state is missing, it returned o"),
    "another dtype": ("random", ["o.to(v.dtype)", "o"], "outputs", "o: wanted dtype torch.bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_is_refused(shared: Any, changed: Callable[..., str], name: str) -> None:
    probe, pairs, gate, says = WRONG[name]
    verdict = judged(shared, changed(TEXT, *pairs), probe)
    assert verdict.outcome == "fail"
    assert verdict.evidence["families"][probe]["gate"] == gate
    assert says in reasons(verdict)[0]


def test_a_step_that_keeps_its_answers_is_refused(shared: Any, changed: Callable[..., str]) -> None:
    kept = "KEPT = {}\n\n\ndef run(**x):\n    key = x['q'].data_ptr()\n    if key not in KEPT:\n" \
        "        KEPT[key] = compute(**x)\n    return {name: y.clone() for name, y in KEPT[key].items()}\n"  # fmt: skip
    verdict = judged(shared, f"{changed(TEXT, 'def run(', 'def compute(')}\n\n{kept}", "random")
    assert verdict.outcome == "fail" and verdict.evidence["families"]["random"]["ok"]
    assert {verdict.evidence["families"][name]["gate"] for name in AGAIN} == {"repeat"}
