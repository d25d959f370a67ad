"""The loop where times are measured, on a simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from loop_events import quiet, stopping

from kda2.workbench import loop
from kda2.workbench.candidates import TRITON
from kda2.workbench.journal import Journal
from kda2.workbench.loop import Options
from kda2.workbench.verifier.subject import Subject


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


def test_a_last_heat_that_cannot_be_timed_leaves_the_leader(
    inputs: Path, tmp_path: Path, simulated_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated_gpu(small_values_are_fast)
    monkeypatch.setattr("kda2.workbench.judge.Judge.again", lambda *_: {})
    outcome = loop.run(Options(tmp_path, 90, inputs, families=(), rounds=3, width=4, trials=2, seed=1), quiet)
    chosen = next(c for c in outcome.candidates if c.name == outcome.chosen)
    assert chosen.parameters["state"]["BV"] == 16 and "earlier heats" in outcome.rule
    assert all(entry["earlier"] for entry in outcome.ranking)
