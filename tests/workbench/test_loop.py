"""The main job on a tiny capture: every stage runs, the ledger tells it all, the report comes from the ledger alone."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import IO

import pytest

from kda2 import device
from kda2.contract import KernelConfig
from kda2.errors import InvalidValue
from kda2.testing import Problem, make
from kda2.workbench import ledger as ledgers
from kda2.workbench import loop, predict
from kda2.workbench.candidates import TRITON, Proposal, meta_call, propose
from kda2.workbench.capture import Capture
from kda2.workbench.ladder import Builder, parse
from kda2.workbench.loop import Options, Outcome
from kda2.workbench.predict import StageLoad
from kda2.workbench.records import STAGES, Verdict
from kda2.workbench.report import render, write_report
from kda2.workbench.report.render import tell
from kda2.workbench.verifier import Task, numerics, verify_candidate
from kda2.workbench.verifier.numerics import CAPTURE

FAMILIES = ("random", "one_token")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capture") / "tiny.safetensors"
    Capture(make(Problem(T=20, H=1, HV=1, K=32, V=32)), {"layer": "none"}).save(path)
    return path


@pytest.fixture(scope="module")
def outcome(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("run")
    options = Options(folder, 90, inputs, families=FAMILIES, variants=False, seed=1)
    return loop.run(options, lambda *_: None)


def task(inputs: Path, **changes: object) -> Task:
    fields = {
        "impl": "torch", "configs": None, "capture": str(inputs), "tokens": None, "families": ("random",),
        "sizes": loop.INTERPRETER_SIZES, "device": "cpu", "seed": 0, "interpreted": False,
    }  # fmt: skip
    return Task(**{**fields, **changes})  # type: ignore[arg-type]


def test_every_implementation_is_judged(outcome: Outcome) -> None:
    assert {c.name for c in outcome.candidates} == {"triton", "torch", "reference"}
    assert outcome.ok
    for c in outcome.candidates:
        assert [v.stage for v in c.verdicts] == list(STAGES)
        assert c.correct


def test_stages_that_cannot_run_say_why_and_nothing_is_measured(outcome: Outcome) -> None:
    if outcome.label == "measured":
        pytest.skip("this machine has a GPU")
    by_stage = {v.stage: v.outcome for v in outcome.candidates[0].verdicts}
    assert all(by_stage[stage] == "not_run(no CUDA device)" for stage in ("L4", "L5", "L6", "L7"))
    assert outcome.label == "predicted"
    assert all(c.latency_us is None for c in outcome.candidates)


def test_the_evidence_of_a_pass(outcome: Outcome) -> None:
    triton = next(c for c in outcome.candidates if c.name == TRITON)
    stages = next(v for v in triton.verdicts if v.stage == "L1").evidence["stages"]
    assert set(stages) == {"prepare", "state", "output"}
    assert all(s["registers"] > 0 and s["shared"] > 0 and s["instructions"] > 100 for s in stages.values())
    numerics = next(v for v in triton.verdicts if v.stage in ("L3", "L4")).evidence["families"]
    assert list(numerics) == [CAPTURE, *FAMILIES]
    for result in numerics.values():
        assert 0 < result["margin"] <= 1
        assert set(result["quantities"]) == {"o", "final state"}


def test_the_ledger_tells_it_all(outcome: Outcome) -> None:
    assert ledgers.verify(outcome.ledger).ok
    kinds = [line.kind for line in ledgers.read(outcome.ledger)]
    assert kinds[0] == "run"
    assert kinds[-1] == "choice"
    assert kinds.count("verdict") == 3 * len(STAGES)


def test_the_report_needs_nothing_but_the_ledger(outcome: Outcome, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(outcome.ledger.read_bytes())
    page = render(copy)
    assert outcome.chosen is not None
    assert outcome.chosen in page
    assert ledgers.verify(copy).head in page
    # the page's own markup: plotly's script is full of addresses that it does not load
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)\s*=", markup)
    assert "@import" not in markup and "url(" not in markup


def test_what_a_ledger_says_is_escaped(outcome: Outcome, tmp_path: Path) -> None:
    ledger = ledgers.Ledger(tmp_path / "x.jsonl")
    for line in ledgers.read(outcome.ledger):
        payload = line.payload
        if line.kind == "run":
            payload["capture"]["origin"] = {"layer": "<script>alert(1)</script>"}
        ledger.append(line.kind, payload)
    assert "<script>alert(1)" not in render(ledger.path)


def test_a_gate_without_a_finite_decay_is_reported_too(outcome: Outcome, tmp_path: Path) -> None:
    """A capture of resets alone, or of no token, has no half-life."""
    ledger = ledgers.Ledger(tmp_path / "x.jsonl")
    for line in ledgers.read(outcome.ledger):
        payload = line.payload
        if line.kind == "run":
            payload["capture"]["regime"] = {"resets": 3}
        ledger.append(line.kind, payload)
    assert "median half-life" in render(outcome.ledger)
    assert "median half-life" not in render(ledger.path)


def test_stopping_keeps_what_was_found(inputs: Path, tmp_path: Path) -> None:
    def stop(candidate: str, stage: str, text: str) -> None:
        if (candidate, stage, text) == (TRITON, "L3", "queued"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.run(Options(tmp_path, 90, inputs, families=(), variants=False), stop)
    lines = list(ledgers.read(tmp_path / "ledger.jsonl"))
    assert [line.kind for line in lines][-4:] == ["verdict", "verdict", "verdict", "stopped"]
    assert tell(lines).stopped["reason"] == "KeyboardInterrupt"
    assert "Stopped before a choice" in (tmp_path / "report.html").read_text()


def test_a_folder_holds_one_run(outcome: Outcome, inputs: Path) -> None:
    folder = outcome.ledger.parent
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InvalidValue, match="--out must be a folder without a run's ledger"):
        loop.run(Options(folder, 90, inputs), lambda *_: None)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_of_runs_started_at_once_one_goes_on(tmp_path: Path) -> None:
    together = Barrier(8)

    def begin(_: int) -> bool:
        together.wait()
        try:
            loop._new_ledger(tmp_path / "run" / "ledger.jsonl")
        except InvalidValue:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(begin, range(8))) == 1


def test_a_run_that_never_began_leaves_its_folder_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Capture, path: Path) -> str:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Capture, "save", full)
    with pytest.raises(OSError, match="No space left"):
        loop.run(Options(tmp_path, 90, tokens=8), lambda *_: None)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_does_not_hide_why_a_run_stopped(inputs: Path, tmp_path: Path) -> None:
    def stop(candidate: str, stage: str, text: str) -> None:
        (tmp_path / "ledger.jsonl").write_text("spoilt")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as e:
        loop.run(Options(tmp_path, 90, inputs, families=(), variants=False), stop)
    assert "another writer" in e.value.__notes__[0]


def test_a_full_disk_while_compiling_stops_the_run(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing about the kernel."""

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("triton.compile", full)
    with pytest.raises(OSError, match="No space left"):
        loop.run(Options(tmp_path, 90, inputs, families=(), variants=False), lambda *_: None)
    lines = list(ledgers.read(tmp_path / "ledger.jsonl"))
    assert tell(lines).stopped == {"reason": "OSError", "says": "[Errno 28] No space left on device"}
    assert [p.payload["verdict"]["stage"] for p in lines if p.kind == "verdict"] == ["L0"]


def test_a_report_is_written_whole_or_not_at_all(
    outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.html").write_text("the last one")
    write = Path.write_text

    def full(self: Path, text: str, **options: str) -> int:
        write(self, text[:100], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(outcome.ledger, tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "the last one"


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
    if device.gpus():
        pytest.skip("with a GPU it measures")

    def verify(task: Task, heard: object, children: object) -> Verdict:
        return Verdict(stage="L3", outcome="fail" if task.impl in wrong else "pass", evidence={"families": {}})

    monkeypatch.setattr(loop, "verify_candidate", verify)
    outcome = loop.run(Options(tmp_path, 90, inputs, variants=False), lambda *_: None)
    assert (outcome.chosen, outcome.rule) == (chosen, rule)


@pytest.mark.parametrize("where", ["q", "initial_state"])
def test_a_call_that_no_tolerance_judges_is_refused(tmp_path: Path, where: str) -> None:
    file, out = tmp_path / "wide.safetensors", tmp_path / "run"
    kwargs = make(Problem(T=4, H=1, HV=1, K=16, V=16))
    names = ("q", "k", "v", "g", "beta", "initial_state") if where == "q" else ("initial_state",)
    Capture(kwargs | {name: kwargs[name].double() for name in names}).save(file)
    with pytest.raises(
        InvalidValue, match=f"--inputs must be a call in bf16, fp16, fp32, got {where} in torch.float64"
    ):
        loop.run(Options(out, 90, file), lambda *_: None)
    assert not out.exists()


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_a_seed_that_no_generator_takes(tmp_path: Path, seed: int) -> None:
    with pytest.raises(InvalidValue, match=r"--seed must be at least 0 and below 2\*\*31"):
        Options(tmp_path, 90, seed=seed)


def test_variants_are_the_shipped_configuration_with_one_change(inputs: Path) -> None:
    proposals = [p for p in propose(Capture.load(inputs)) if p.impl == TRITON]
    base, *variants = proposals
    assert base.shipped and not any(v.shipped for v in variants)
    assert 4 <= len(variants) <= 6
    assert len({p.name for p in proposals}) == len(proposals)
    for v in variants:
        assert v.parent == TRITON and v.parameters() != base.parameters()


def test_a_configuration_that_no_kernel_can_have_fails_before_it_is_built() -> None:
    odd = {"prepare": KernelConfig(3, 1, {"BT": 64})}
    verdict = parse(Proposal("odd", TRITON, odd, TRITON, ""))
    assert verdict.outcome == "fail"
    assert verdict.evidence["not_powers_of_two"] == ["prepare num_warps=3"]


def test_what_does_not_fit_a_device_fails_at_l1(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loop.device.SHARED_MEMORY_LIMIT, 90, 1024)
    capture = Capture.load(inputs)
    (base, *_) = [p for p in propose(capture) if p.impl == TRITON]
    l1, _ = Builder(90).judge(base, meta_call(capture))
    assert l1.outcome == "fail"
    assert "at most 972" in l1.evidence["checks"]["state"]["expected"]


def test_an_output_that_is_not_finite_fails(inputs: Path, tmp_path: Path) -> None:
    capture = Capture.load(inputs)
    spoilt = capture.kwargs["v"].clone()
    spoilt[0, 7] = float("nan")
    Capture({**capture.kwargs, "v": spoilt}).save(tmp_path / "nan.safetensors")
    verdict = verify_candidate(task(tmp_path / "nan.safetensors"), lambda _: None, set())
    assert verdict.outcome == "fail"
    assert verdict.stage == "L3"
    assert not verdict.evidence["families"][CAPTURE]["ok"]
    assert verdict.evidence["families"]["random"]["ok"]


def test_a_crash_is_a_failed_verdict(inputs: Path) -> None:
    verdict = verify_candidate(task(inputs, impl="nothing"), lambda _: None, set())
    assert verdict.outcome == "fail"
    assert "impl must be" in verdict.evidence["ended"]
    assert "killed" not in verdict.evidence["ended"]  # it ended by itself


def test_how_a_child_was_ended_is_said(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = numerics._start

    def killed(task: Task, words: IO[str]) -> subprocess.Popen[str]:
        child = start(task, words)
        child.kill()
        return child

    with monkeypatch.context() as m:
        m.setattr(numerics, "_start", killed)
        verdict = verify_candidate(task(inputs), lambda _: None, set())
    assert verdict.outcome == "fail"
    assert verdict.evidence["ended"] == "the process ended before 'captured call': killed by signal 9"
    monkeypatch.setattr(numerics, "TIMEOUT_S", 0.05)
    verdict = verify_candidate(task(inputs), lambda _: None, set())
    assert verdict.outcome == "fail"
    assert verdict.evidence["ended"] == "the process ended before 'captured call': no answer within 0.05 s"


def test_the_model_ranks_by_instructions_and_bytes() -> None:
    light, heavy = StageLoad(132, 4, 1000, 1, 0), StageLoad(132, 4, 2000, 1, 0)
    part = predict.PARTS[90]
    assert predict.stage_us(heavy, part) == pytest.approx(2 * predict.stage_us(light, part))
    assert predict.stage_us(StageLoad(264, 4, 1000, 1, 0), part) == pytest.approx(2 * predict.stage_us(light, part))
    assert predict.stage_us(StageLoad(1, 4, 1, 1, 4_800_000), part) == pytest.approx(1.0)
    assert predict.modelled_us([light], arch=75) is None


def test_the_model_displaces_the_shipped_one_only_by_a_margin() -> None:
    assert predict.best({"triton": 10.0, "other": 9.0}, "triton") == "triton"
    assert predict.best({"triton": 10.0, "other": 7.0}, "triton") == "other"
    assert predict.best({"other": 7.0}, "triton") == "other"
    assert predict.best({}, "triton") is None


def test_a_verdict_that_did_not_run_upgrades_nothing(outcome: Outcome) -> None:
    some = outcome.candidates[0]
    verdicts = [Verdict(stage=v.stage, outcome="not_run(x)") if v.stage in ("L3", "L4") else v for v in some.verdicts]
    assert not some.model_copy(update={"verdicts": tuple(verdicts)}).correct
