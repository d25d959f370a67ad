"""The main job on a tiny capture: what ships is judged, rounds improve on it, the ledger tells it all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kda2 import device
from kda2.errors import InvalidValue
from kda2.testing import Problem, make
from kda2.workbench import ledger as ledgers
from kda2.workbench import loop
from kda2.workbench.candidates import TRITON
from kda2.workbench.capture import Capture
from kda2.workbench.journal import Journal
from kda2.workbench.loop import Options, Outcome
from kda2.workbench.records import STAGES, Verdict
from kda2.workbench.verifier.numerics import CAPTURE
from kda2.workbench.verifier.subject import Subject

FAMILIES = ("random", "one_token")
without_gpu = pytest.mark.skipif(bool(device.gpus()), reason="with a GPU it measures")


def quiet(*_: str) -> None:
    pass


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capture") / "tiny.safetensors"
    Capture(make(Problem(T=20, H=1, HV=1, K=32, V=32)), {"layer": "none"}).save(path)
    return path


@pytest.fixture(scope="module")
def outcome(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("run")
    return loop.run(Options(folder, 90, inputs, families=FAMILIES, rounds=2, width=2, trials=1, seed=1), quiet)


def kinds(ledger: Path) -> list[str]:
    return [line.kind for line in ledgers.read(ledger)]


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


def stopping(at: tuple[str, str, str]) -> Callable[[str, str, str], None]:
    """Ctrl-C at an event; the candidate "*" is any that does not ship."""

    def progress(*event: str) -> None:
        if event[1:] == at[1:] and (event[0] == at[0] or (at[0] == "*" and event[0].startswith("triton "))):
            raise KeyboardInterrupt

    return progress


@without_gpu
@pytest.mark.usefixtures("simulated_cpu")
def test_stopping_keeps_what_was_found_and_says_what_was_best(inputs: Path, tmp_path: Path) -> None:
    options = Options(tmp_path, 90, inputs, families=(), rounds=1, width=1, trials=1, seed=1)
    with pytest.raises(KeyboardInterrupt):
        loop.run(options, stopping(("*", "L2", "pass")))
    lines = list(ledgers.read(tmp_path / "ledger.jsonl"))
    assert lines[-1].kind == "stopped"
    assert lines[-1].payload["best"] == TRITON and lines[-1].payload["label"] == "predicted"
    assert (tmp_path / "report.html").exists()


@without_gpu
def test_an_ended_run_goes_on_and_comes_to_the_same(outcome: Outcome, inputs: Path, tmp_path: Path) -> None:
    """Stopped in the middle of its numerics and again in a round, it tries what the undisturbed run tried and finds
    what that found, and judges nothing twice."""
    options = Options(tmp_path, 90, inputs, families=FAMILIES, rounds=2, width=2, trials=1, seed=1)
    written = next(c.name for c in outcome.candidates if c.writer == "kda2 template")
    for at in ((TRITON, "L3", "queued"), (written, "L1", "pass")):
        with pytest.raises(KeyboardInterrupt):
            loop.run(options, stopping(at))
    again = loop.run(options, quiet)
    assert (again.chosen, again.rule, again.ranking) == (outcome.chosen, outcome.rule, outcome.ranking)
    assert [c.name for c in again.candidates] == [c.name for c in outcome.candidates]
    assert [r.candidates for r in again.rounds] == [r.candidates for r in outcome.rounds]
    lines = list(ledgers.read(again.ledger))
    assert [line.kind for line in lines].count("resumed") == 2
    judged = [(p["candidate"], p["verdict"]["stage"]) for line in lines if "verdict" in (p := line.payload)]
    assert len(judged) == len(set(judged))


@without_gpu
@pytest.mark.usefixtures("simulated_cpu")
def test_a_fresh_seed_is_kept_by_the_run_that_goes_on(inputs: Path, tmp_path: Path) -> None:
    options = Options(tmp_path, 90, inputs, families=(), rounds=0)
    with pytest.raises(KeyboardInterrupt):
        loop.run(options, stopping((TRITON, "L3", "queued")))
    loop.run(options, quiet)
    seeds = {line.payload["seed"] for line in ledgers.read(tmp_path / "ledger.jsonl") if line.kind == "run"}
    verdicts = [line.payload["verdict"] for line in ledgers.read(tmp_path / "ledger.jsonl") if line.kind == "verdict"]
    assert {v["evidence"]["seed"] for v in verdicts if "seed" in v["evidence"]} == seeds


@without_gpu
@pytest.mark.usefixtures("simulated_cpu")
@pytest.mark.parametrize(("change", "word"), [({"seed": 2}, "seed"), ({"families": ("random",)}, "families")])
def test_another_job_does_not_go_on_in_its_ledger(
    change: dict[str, object], word: str, inputs: Path, tmp_path: Path
) -> None:
    fields: dict[str, object] = {"families": (), "rounds": 0, "seed": 1}
    with pytest.raises(KeyboardInterrupt):
        loop.run(Options(tmp_path, 90, inputs, **fields), stopping((TRITON, "L3", "queued")))  # type: ignore[arg-type]
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(InvalidValue, match=f"--out must be a new folder.*of a run with another {word}"):
        loop.run(Options(tmp_path, 90, inputs, **fields | change), quiet)  # type: ignore[arg-type]
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


@without_gpu
@pytest.mark.usefixtures("simulated_cpu")
def test_the_capture_of_an_ended_run_survives_another_job(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        loop.run(Options(tmp_path, 90, tokens=8, families=(), rounds=0), stopping((TRITON, "L3", "queued")))
    before = (tmp_path / "capture.safetensors").read_bytes()
    with pytest.raises(InvalidValue, match="of a run with another capture"):
        loop.run(Options(tmp_path, 90, tokens=9, families=(), rounds=0), quiet)
    assert (tmp_path / "capture.safetensors").read_bytes() == before


def test_a_run_that_has_ended_is_not_gone_on_with(outcome: Outcome, inputs: Path) -> None:
    folder = outcome.ledger.parent
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InvalidValue, match="--out must be a folder without a finished run"):
        loop.run(Options(folder, 90, inputs, families=FAMILIES, seed=1), quiet)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def start(folder: Path, inputs: Path) -> subprocess.Popen[bytes]:
    words = ["run", "kda", "--inputs", str(inputs), "--out", str(folder), "--seed", "1", "--rounds", "1"]
    return subprocess.Popen(
        [sys.executable, "-m", "kda2.cli", *words, "--families", "one_token"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": "src"},
    )  # fmt: skip


def wait_for_lines(ledger: Path, count: int) -> None:
    for _ in range(600):
        if ledger.exists() and ledger.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.1)
    raise AssertionError("the run wrote nothing")


@without_gpu
def test_killed_outright_the_ledger_is_valid_and_the_run_goes_on(inputs: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    for lines in (4, 9):
        run = start(tmp_path, inputs)
        wait_for_lines(ledger, lines)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        assert ledgers.verify(ledger).ok
        with ledger.open("ab") as f:
            f.write(b'{"schema": 1, "seq"')  # what a power cut leaves
    last = start(tmp_path, inputs)
    _, said = last.communicate(timeout=200)
    assert last.returncode == 0, said
    assert ledgers.verify(ledger).ok and kinds(ledger)[-1] == "choice"
    resumed = [line.payload for line in ledgers.read(ledger) if line.kind == "resumed"]
    assert [p["torn_bytes_set_aside"] for p in resumed] == [19, 19]


@without_gpu
def test_of_two_runs_at_once_in_one_folder_one_goes_on(inputs: Path, tmp_path: Path) -> None:
    first = start(tmp_path, inputs)
    wait_for_lines(tmp_path / "ledger.jsonl", 1)
    second = start(tmp_path, inputs)
    _, said = second.communicate(timeout=60)
    assert second.returncode == 2
    assert b"--out must be a folder that no other run is writing to" in said
    first.kill()
    first.communicate()
    assert ledgers.verify(tmp_path / "ledger.jsonl").ok


def test_a_run_that_never_began_leaves_its_folder_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Capture, path: Path) -> str:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Capture, "save", full)
    with pytest.raises(OSError, match="No space left"):
        loop.run(Options(tmp_path, 90, tokens=8), quiet)
    assert not list(tmp_path.iterdir())


@without_gpu
@pytest.mark.usefixtures("simulated_cpu")
def test_a_full_disk_does_not_hide_why_a_run_stopped(inputs: Path, tmp_path: Path) -> None:
    def stop(candidate: str, stage: str, text: str) -> None:
        (tmp_path / "ledger.jsonl").write_text("spoilt")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as e:
        loop.run(Options(tmp_path, 90, inputs, families=(), rounds=0), stop)
    assert "another writer" in e.value.__notes__[0]


@without_gpu
def test_a_full_disk_while_compiling_stops_the_run(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing about the kernel."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kda2.workbench.judge.stages.code", full)
    with pytest.raises(OSError, match="No space left"):
        loop.run(Options(tmp_path, 90, inputs, families=(), rounds=0), quiet)
    lines = list(ledgers.read(tmp_path / "ledger.jsonl"))
    assert lines[-1].payload == {"reason": "OSError", "says": "[Errno 28] No space left on device"}
    assert not [line for line in lines if line.kind == "verdict"]


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


@without_gpu
@pytest.mark.usefixtures("simulated_cpu")
def test_a_file_that_has_moved_is_judged_where_it_is(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "a" / "mine.py", tmp_path / "b" / "mine.py"
    for path in (first, second):
        path.parent.mkdir()
        path.write_text("def run(**inputs): ...\n")
    fields: dict[str, Any] = {"families": (), "rounds": 0, "seed": 1}
    with pytest.raises(KeyboardInterrupt):
        loop.run(Options(tmp_path / "run", 90, inputs, kernels=(first,), **fields), stopping((TRITON, "L3", "queued")))
    first.unlink()
    judged: list[Subject] = []

    def numerics(children: object, subject: Subject, on: object, heard: object, parts: int) -> Verdict:
        judged.append(subject)
        return Verdict(stage="L3", outcome="pass")

    monkeypatch.setattr("kda2.workbench.judge.stages.numerics", numerics)
    outcome = loop.run(Options(tmp_path / "run", 90, inputs, kernels=(second,), **fields), quiet)
    assert [s.file for s in judged if s.file] == [str(second)]
    assert next(c for c in outcome.candidates if c.name == "mine.py").correct
    assert "not ranked as the model knows them not: mine.py" in outcome.rule or outcome.chosen == TRITON


@without_gpu
@pytest.mark.usefixtures("simulated_cpu")
def test_the_table_of_a_run_that_goes_on_is_whole(inputs: Path, tmp_path: Path) -> None:
    options = Options(tmp_path, 90, inputs, families=(), rounds=1, width=1, trials=1, seed=1)
    with pytest.raises(KeyboardInterrupt):
        loop.run(options, stopping(("*", "L2", "pass")))
    told: set[tuple[str, str, str]] = set()
    outcome = loop.run(options, lambda *event: told.add(event))  # type: ignore[arg-type,func-returns-value]
    assert {(c.name, v.stage, v.outcome) for c in outcome.candidates for v in c.verdicts} <= told
    assert outcome.rounds[0].interrupted and outcome.rounds[0].seconds_per_percent is None


@pytest.mark.parametrize("names", [("a/mine.py", "b/mine.py"), ("triton",), ("mine.txt",)])
def test_files_whose_names_do_not_tell_them_apart(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def run(**inputs): ...\n")
    with pytest.raises(InvalidValue, match="--kernel must be"):
        loop.run(Options(tmp_path / "run", 90, tokens=8, kernels=tuple(tmp_path / name for name in names)), quiet)


# --- with a simulated GPU ---------------------------------------------------------------------------------------------


def small_values_are_fast(subject: Subject) -> float:
    """90 us as shipped, 80 with half the value columns in a CTA of the state stage."""
    return 500.0 if subject.configs is None else 70.0 + 10.0 * subject.configs["state"]["BV"] / 16


def test_what_is_measured_faster_is_chosen_and_timed_once_more(
    inputs: Path, tmp_path: Path, simulated_gpu: Callable[..., None]
) -> None:
    simulated_gpu(small_values_are_fast)
    outcome = loop.run(Options(tmp_path, 90, inputs, families=(), rounds=3, width=4, trials=2, seed=1), quiet)
    assert outcome.label == "measured" and outcome.ok
    chosen = next(c for c in outcome.candidates if c.name == outcome.chosen)
    assert chosen.parameters["state"]["BV"] == 16
    assert chosen.latency_us == pytest.approx(80.0, rel=0.01)
    assert "timed once more" in outcome.rule
    assert outcome.ranking[0]["name"] == outcome.chosen
    assert outcome.rounds[0].gained and outcome.rounds[0].seconds_per_percent is not None


def test_noise_displaces_nothing_and_every_stage_is_tried_before_it_stagnates(
    inputs: Path, tmp_path: Path, simulated_gpu: Callable[..., None]
) -> None:
    simulated_gpu(lambda subject: 100.0)
    options = Options(tmp_path, 90, inputs, families=(), rounds=None, budget_s=600.0, width=1, trials=1, seed=1)
    outcome = loop.run(options, quiet)
    assert outcome.chosen == TRITON
    assert outcome.stopped_by == "stagnation"
    assert {r.stage for r in outcome.rounds} == {"prepare", "state", "output"} and len(outcome.rounds) == 3
    assert all("no per cent has been gained" in r.says for r in outcome.rounds)


def test_a_budget_that_is_used_up_still_ends_in_a_choice(
    inputs: Path, tmp_path: Path, simulated_gpu: Callable[..., None]
) -> None:
    simulated_gpu(small_values_are_fast)
    outcome = loop.run(Options(tmp_path, 90, inputs, families=(), rounds=None, budget_s=1.0, seed=1), quiet)
    assert (outcome.stopped_by, outcome.rounds, outcome.chosen) == ("budget", [], TRITON)


def test_a_wrong_candidate_is_never_timed(inputs: Path, tmp_path: Path, simulated_gpu: Callable[..., None]) -> None:
    """However fast it is; and the round says what became of it."""

    def narrow(subject: Subject) -> bool:
        return subject.configs is not None and subject.configs["state"]["BV"] == 16

    simulated_gpu(small_values_are_fast, wrong=narrow)
    outcome = loop.run(Options(tmp_path, 90, inputs, families=(), rounds=1, width=2, trials=1, seed=1), quiet)
    refused = [c for c in outcome.candidates if c.parameters and c.parameters["state"]["BV"] == 16]
    assert refused
    for c in refused:
        assert c.latency_us is None and not c.correct
        assert {v.stage: v.outcome for v in c.verdicts}["L6"] == "not_run(its numerics did not pass)"
        assert outcome.rounds[0].candidates[c.name] == "fail at L4"
    assert outcome.chosen not in {c.name for c in refused}


def test_a_measured_run_that_was_ended_goes_on_without_timing_again(
    inputs: Path, tmp_path: Path, simulated_gpu: Callable[..., None]
) -> None:
    simulated_gpu(small_values_are_fast)
    options = Options(tmp_path / "a", 90, inputs, families=(), rounds=2, width=2, trials=1, seed=1)
    whole = loop.run(options, quiet)
    stopped = Options(tmp_path / "b", 90, inputs, families=(), rounds=2, width=2, trials=1, seed=1)
    second = whole.rounds[1].candidates
    with pytest.raises(KeyboardInterrupt):
        loop.run(stopped, stopping((next(iter(second)), "L6", "timing")))
    again = loop.run(stopped, quiet)
    assert [c.name for c in again.candidates] == [c.name for c in whole.candidates]
    assert again.chosen == whole.chosen
    told = [json.loads(line)["kind"] for line in again.ledger.read_text().splitlines()]
    assert told.count("round") == 2 and told.count("stopped") == 1
    assert Journal.reading(again.ledger).choice["chosen"] == whole.chosen
