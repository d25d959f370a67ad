"""Runs that end early, by Ctrl-C, kill, a full disk or a power cut: nothing is lost, and the same command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from loop_events import FAMILIES, kinds, quiet, stopping, without_gpu

from kda2.errors import InvalidValue
from kda2.workbench import ledger as ledgers
from kda2.workbench import loop
from kda2.workbench.candidates import TRITON
from kda2.workbench.capture import Capture
from kda2.workbench.loop import Options, Outcome
from kda2.workbench.records import Verdict
from kda2.workbench.verifier.subject import Subject


@pytest.fixture
def stopped(simulated_cpu: None, inputs: Path, tmp_path: Path) -> Options:
    """Options of a run that was stopped when the first round's candidate had been built."""
    options = Options(tmp_path, 90, inputs, families=(), rounds=1, width=1, trials=1, seed=1)
    with pytest.raises(KeyboardInterrupt):
        loop.run(options, stopping(("*", "L2", "pass")))
    return options


@without_gpu
def test_stopping_keeps_what_was_found_and_says_what_was_best(stopped: Options) -> None:
    lines = list(ledgers.read(stopped.folder / "ledger.jsonl"))
    assert lines[-1].kind == "stopped"
    assert lines[-1].payload["best"] == TRITON and lines[-1].payload["label"] == "predicted"
    assert (stopped.folder / "report.html").exists()


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


@pytest.mark.slow
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
def test_the_table_of_a_run_that_goes_on_is_whole(stopped: Options) -> None:
    told: set[tuple[str, str, str]] = set()
    outcome = loop.run(stopped, lambda *event: told.add(event))  # type: ignore[arg-type,func-returns-value]
    assert {(c.name, v.stage, v.outcome) for c in outcome.candidates for v in c.verdicts} <= told
    assert outcome.rounds[0].interrupted and outcome.rounds[0].seconds_per_percent is None
