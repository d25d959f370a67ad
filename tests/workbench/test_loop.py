"""The main job on a tiny capture: what ships is judged, rounds improve on it, the ledger tells it all."""

from __future__ import annotations

from pathlib import Path

import pytest
from loop_events import FAMILIES, kinds, quiet, without_gpu

from kda2.device import Gpu
from kda2.errors import InvalidValue
from kda2.testing import Problem, make
from kda2.workbench import candidates, loop
from kda2.workbench import ledger as ledgers
from kda2.workbench.candidates import TRITON
from kda2.workbench.capture import Capture
from kda2.workbench.loop import Options, Outcome
from kda2.workbench.records import STAGES, Verdict
from kda2.workbench.verifier.conditions import CAPTURE
from kda2.workbench.verifier.subject import Subject


@pytest.mark.parametrize(
    ("arch", "K", "first"),
    [(90, 64, "hopper"), (90, 32, TRITON), (100, 64, TRITON), (70, 64, "torch"), (None, 64, TRITON)],
)
def test_what_is_judged_is_what_serves_the_call_here(
    arch: int | None, K: int, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [] if arch is None else [Gpu("a GPU", arch, 132, 2**36, 2**25)]
    monkeypatch.setattr("kda2.workbench.candidates.device.gpus", lambda: gpus)
    every = ("hopper", TRITON, "torch", "reference")
    found = candidates.shipped(Capture(make(Problem(T=4, K=K, V=64))))
    assert tuple(c.name for c in found) == every[every.index(first) :]
    assert [bool(c.parameters) for c in found] == [c.name == TRITON for c in found]


def test_every_implementation_is_judged(outcome: Outcome) -> None:
    assert outcome.shipped == (TRITON, "torch", "reference")
    assert outcome.ok
    for c in outcome.candidates:
        assert [v.stage for v in c.verdicts] == list(STAGES)
        assert c.correct or c.name not in outcome.shipped


@without_gpu
def test_stages_that_cannot_run_say_why_and_nothing_is_measured(outcome: Outcome) -> None:
    by_stage = {v.stage: v.outcome for v in outcome.candidates[0].verdicts}
    assert all(by_stage[stage] == "not_run(no CUDA device)" for stage in ("L4", "L5", "L6", "L7"))
    assert outcome.label == "predicted"
    assert all(c.latency_us is None for c in outcome.candidates)


def test_the_evidence_of_a_pass(outcome: Outcome) -> None:
    triton = next(c for c in outcome.candidates if c.name == TRITON)
    stages = next(v for v in triton.verdicts if v.stage == "L1").evidence["stages"]
    assert set(stages) == {"prepare", "state", "output"}
    assert all(s["registers"] > 0 and s["shared"] > 0 and s["instructions"] > 100 for s in stages.values())
    assert triton.build["arch"] == "sm_90" and len(triton.artifacts["state cubin"]) == 64
    numerics = next(v for v in triton.verdicts if v.stage in ("L3", "L4")).evidence["families"]
    assert list(numerics) == [CAPTURE, *FAMILIES]
    for result in numerics.values():
        assert 0 < result["margin"] <= 1
        assert set(result["quantities"]) == {"o", "final state"}


def test_rounds_plan_write_verify_and_tune(outcome: Outcome) -> None:
    assert 1 <= len(outcome.rounds) <= 2
    tried = [c for c in outcome.candidates if c.name not in outcome.shipped]
    assert {c.writer for c in tried} == {"kda2 template", "kda2 search"}
    first = outcome.rounds[0]
    assert len(first.candidates) == 3  # two written, one searched for
    assert all(c.hypothesis and c.parent for c in tried)
    assert (
        set(first.hypotheses.values()) <= {"held", "no faster", "refuted", "not tested"} and len(first.hypotheses) == 2
    )
    assert outcome.rounds[-1].decision == outcome.stopped_by != "go on"


def test_the_ledger_tells_it_all(outcome: Outcome) -> None:
    assert ledgers.verify(outcome.ledger).ok
    told = kinds(outcome.ledger)
    assert told[0] == "run" and told[-1] == "choice"
    assert told.count("plan") == 1 and told.count("round") == len(outcome.rounds)
    assert told.count("verdict") == len(outcome.candidates) * len(STAGES)
    plan = next(line.payload for line in ledgers.read(outcome.ledger) if line.kind == "plan")
    assert set(plan["floors_us"]) == {"prepare", "state", "output"} and plan["book"]["op"] == "kda"


@without_gpu
def test_without_a_gpu_only_what_the_model_likes_is_proved(outcome: Outcome) -> None:
    for c in outcome.candidates:
        l3 = next(v.outcome for v in c.verdicts if v.stage == "L3")
        assert l3 == "pass" or any(why in l3 for why in ("modelled time", "same machine code", "pruned: "))


@without_gpu
@pytest.mark.parametrize(
    ("wrong", "chosen", "rule"),
    [
        ({"triton"}, "torch", "the first implementation that is correct, as none of the modelled kernels is"),
        ({"triton", "torch", "reference"}, None, "no candidate is correct"),
    ],
)
def test_the_rule_says_why_nothing_modelled_was_chosen(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: set[str], chosen: str | None, rule: str
) -> None:
    def numerics(children: object, subject: Subject, on: object, heard: object, parts: int) -> Verdict:
        return Verdict(stage="L3", outcome="fail" if subject.impl in wrong else "pass", evidence={"families": {}})

    monkeypatch.setattr("kda2.workbench.judge.stages.numerics", numerics)
    outcome = loop.run(Options(tmp_path, 90, inputs), quiet)
    assert (outcome.chosen, outcome.rule, outcome.rounds) == (chosen, rule, [])


@pytest.mark.parametrize("where", ["q", "initial_state"])
def test_a_call_that_no_tolerance_judges_is_refused(tmp_path: Path, where: str) -> None:
    file, out = tmp_path / "wide.safetensors", tmp_path / "run"
    kwargs = make(Problem(T=4, H=1, HV=1, K=16, V=16))
    names = ("q", "k", "v", "g", "beta", "initial_state") if where == "q" else ("initial_state",)
    Capture(kwargs | {name: kwargs[name].double() for name in names}).save(file)
    with pytest.raises(
        InvalidValue, match=f"--inputs must be a call in bf16, fp16, fp32, got {where} in torch.float64"
    ):
        loop.run(Options(out, 90, file), quiet)
    assert not out.exists()


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_a_seed_that_no_generator_takes(tmp_path: Path, seed: int) -> None:
    with pytest.raises(InvalidValue, match=r"--seed must be at least 0 and below 2\*\*31"):
        Options(tmp_path, 90, seed=seed)


def test_a_run_needs_an_end(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="--budget must be given where --rounds is not"):
        Options(tmp_path, 90, rounds=None)


@pytest.mark.parametrize("names", [("a/mine.py", "b/mine.py"), ("triton",), ("mine.txt",)])
def test_files_whose_names_do_not_tell_them_apart(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def run(**inputs): ...\n")
    with pytest.raises(InvalidValue, match="--kernel must be"):
        loop.run(Options(tmp_path / "run", 90, tokens=8, kernels=tuple(tmp_path / name for name in names)), quiet)
