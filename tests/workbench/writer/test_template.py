"""The template writer: every neighbour in the space once, each with a reason and what should show it."""

from __future__ import annotations

import pytest

from kda2.workbench.records import Candidate, Expected, Verdict
from kda2.workbench.writer import TemplateWriter, hypothesis_held
from kda2.workbench.writer.template import name_of

SPACE = {
    "prepare": {"BT": (16, 32), "num_warps": (1, 2, 4)},
    "state": {"BV": (16, 32, 64), "num_stages": (1, 2, 3)},
}
BASE = {"prepare": {"BT": 32, "num_warps": 1}, "state": {"BV": 32, "num_stages": 3}}


def best(parameters: dict[str, dict[str, int]] = BASE) -> Candidate:
    name = name_of(BASE, parameters, "triton")
    return Candidate(name=name, op="kda", impl="triton", writer="kda2", source="0" * 64, parameters=parameters)


def test_neighbours_of_the_best() -> None:
    proposed = TemplateWriter(SPACE, BASE).propose(best(), "state", frozenset(), most=9)
    assert [c.name for c in proposed] == ["triton state BV=64", "triton state BV=16", "triton state num_stages=2"]
    assert [c.parameters["state"] for c in proposed] == [
        {"BV": 64, "num_stages": 3}, {"BV": 16, "num_stages": 3}, {"BV": 32, "num_stages": 2},
    ]  # fmt: skip
    assert all(c.parameters["prepare"] == BASE["prepare"] and c.parent == "triton" for c in proposed)


def test_each_says_why_and_what_should_change() -> None:
    proposed = {c.name: c for c in TemplateWriter(SPACE, BASE).propose(best(), "state", frozenset(), most=9)}
    fewer = proposed["triton state BV=16"]
    assert fewer.hypothesis.startswith("state BV=16: more CTAs")
    assert fewer.expected == Expected(metric="state: ctas", change="higher")
    assert all(c.hypothesis and c.expected and c.writer == "kda2 template" for c in proposed.values())


def test_names_tell_all_that_differs_from_what_ships() -> None:
    changed = {"prepare": {"BT": 16, "num_warps": 1}, "state": {"BV": 16, "num_stages": 2}}
    proposed = TemplateWriter(SPACE, BASE).propose(best(changed), "prepare", frozenset(), most=1)
    assert proposed[0].name == "triton state BV=16 num_stages=2"  # BT is back at 32
    assert proposed[0].parent == "triton prepare BT=16, state BV=16 num_stages=2"


def test_what_was_seen_is_left_out_and_the_width_kept() -> None:
    writer = TemplateWriter(SPACE, BASE)
    seen = frozenset({"triton state BV=64"})
    assert [c.name for c in writer.propose(best(), "state", seen, most=1)] == ["triton state BV=16"]
    every = frozenset(c.name for c in writer.propose(best(), "state", frozenset(), most=9))
    assert writer.propose(best(), "state", every, most=9) == []


def verdicts(registers: int, us: float | None = None) -> dict[str, Verdict]:
    code = {"registers": registers, "instructions": 10, "num_warps": 4, "ctas": 5, "shared": 0}
    found = {"L1": Verdict(stage="L1", outcome="pass", evidence={"stages": {"state": code}})}
    if us is not None:
        found["L6"] = Verdict(stage="L6", outcome="pass", evidence={"stages_us": {"state": us}})
    return found


@pytest.mark.parametrize(
    ("metric", "change", "own", "gain", "held"),
    [
        ("state: registers", "lower", verdicts(90), 0.05, "held"),
        ("state: registers", "lower", verdicts(90), 0.005, "no faster"),
        ("state: registers", "lower", verdicts(90), -0.2, "no faster"),
        ("state: registers", "lower", verdicts(90), None, "not tested"),
        ("state: registers", "lower", verdicts(100), 0.05, "refuted"),
        ("state: registers", "higher", verdicts(101), 0.05, "held"),
        ("state: issued", "lower", verdicts(90), 0.05, "refuted"),
        ("state: us", "lower", verdicts(90), 0.05, "not tested"),
        ("state: us", "lower", verdicts(90, 4.0), 0.05, "held"),
        ("output: registers", "lower", verdicts(90), 0.05, "not tested"),
        ("state: registers", "lower", {}, 0.05, "not tested"),
    ],
)
def test_whether_a_hypothesis_held(
    metric: str, change: str, own: dict[str, Verdict], gain: float | None, held: str
) -> None:
    """Moving its metric is not enough: the call must have become faster."""
    expected = Expected.model_validate({"metric": metric, "change": change})
    assert hypothesis_held(expected, own, verdicts(100, 5.0), gain) == held
    assert hypothesis_held(None, own, verdicts(100), gain) == "not tested"
