"""Where a run stands: scores, the leader and what is pruned, on verdicts made up for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kda2.testing import Problem, make
from kda2.workbench.capture import Capture
from kda2.workbench.journal import Journal
from kda2.workbench.records import Candidate, Verdict
from kda2.workbench.standings import Standings

CALL = Capture(make(Problem(T=64, H=1, HV=1, K=32, V=32)))


def code(spills: int = 0, sass: str = "a", ctas: int = 8) -> dict[str, Any]:
    return {
        "ctas": ctas, "num_warps": 4, "instructions": 1000, "trips": 1, "bytes": 10_000, "spills": spills,
        "sass_hash": sass, "versions": {"triton": "3", "ptxas": "12.8"}, "arch": 90, "artifacts": {},
    }  # fmt: skip


class Board:
    """Standings over a journal that tests fill."""

    def __init__(self, path: Path, measures: bool = True) -> None:
        self.journal = Journal(path / "ledger.jsonl")
        self.standings = Standings(self.journal, CALL, 90, measures)

    def add(
        self, name: str, us: float | None = None, speed: float | None = None, faster: str = "faster", **more: Any
    ) -> None:
        configs = {"prepare": {"BT": 32}, "state": {"BV": 32}}
        impl = more.get("impl", "triton")
        self.journal.propose(Candidate(name=name, op="kda", impl=impl, writer="x", parameters=configs))
        stages = {"state": more.get("code", code(sass=name))}
        self.journal.found(name, Verdict(stage="L1", outcome="pass", evidence={"stages": stages}))
        numerics = "L4" if self.standings.measures else "L3"
        self.journal.found(name, Verdict(stage=numerics, outcome=more.get("numerics", "pass")))
        if us is not None:
            evidence: dict[str, Any] = {"median_us": us, "stages_us": {"state": us / 2}}
            if speed is not None:
                evidence |= {"against": "triton", "speed": {"value": speed, "verdict": faster}}
            self.journal.found(name, Verdict(stage="L6", outcome="pass", evidence=evidence))
        self.standings.tried.append(name)


@pytest.fixture
def board(tmp_path: Path) -> Board:
    made = Board(tmp_path)
    made.add("triton", 100.0)
    return made


def test_times_are_relative_to_the_baseline_of_the_same_measurement(board: Board) -> None:
    """The device was 10 % slower when `late` was timed, and so was the baseline beside it."""
    board.add("late", 99.0, speed=1.25)
    assert board.standings.score("late") == 80.0
    assert board.standings.score("triton") == 100.0


def test_what_ships_leads_unless_another_is_faster_beyond_noise(board: Board) -> None:
    board.add("noise", 99.0, speed=1.01, faster="inconclusive")
    assert board.standings.lead() == ("triton", 100.0)
    board.add("fast", 90.0, speed=1.25)
    assert board.standings.lead() == ("fast", 80.0)


def test_a_wrong_or_untimed_candidate_never_leads(board: Board) -> None:
    board.add("wrong", numerics="fail")
    board.add("untimed")
    assert board.standings.score("wrong") is None and board.standings.score("untimed") is None
    assert board.standings.lead() == ("triton", 100.0)
    assert board.standings.became("wrong") == "fail at L4"
    assert board.standings.became("untimed") == "correct"


def test_files_of_ones_own_may_lead_but_are_not_tuned(board: Board) -> None:
    board.add("mine.py", 50.0, speed=2.0, impl="file")
    assert board.standings.lead() == ("mine.py", 50.0)
    assert board.standings.lead(tunable=True) == ("triton", 100.0)
    assert board.standings.modelled("mine.py") is None


def test_the_oracle_contends_for_nothing(board: Board) -> None:
    board.add("reference", 1.0, speed=100.0, impl="reference")
    assert not board.standings.contends("reference")
    assert board.standings.lead() == ("triton", 100.0)


def test_without_a_gpu_the_model_scores(tmp_path: Path) -> None:
    board = Board(tmp_path, measures=False)
    board.add("triton", code=code(ctas=264))
    board.add("half", code=code(ctas=132))
    us = board.standings.score("triton")
    assert us == pytest.approx(2 * 1000 / 1.98e9 * 1e6, abs=1e-3)  # two CTAs of 4 warps on the fullest of 132 SMs
    assert board.standings.score("half") == pytest.approx(us / 2, abs=1e-3)
    assert board.standings.lead() == ("half", board.standings.score("half"))


def test_what_is_another_or_spills_more_than_what_ships_is_pruned(board: Board) -> None:
    board.add("same", code=code(sass="triton"))
    board.add("spills", code=code(spills=64, sass="s"))
    board.add("fine", code=code(sass="f"))
    assert board.standings.pruned("same") == "the same machine code as triton"
    assert board.standings.pruned("spills") == "pruned: state spills 64 bytes a thread, the shipped one 0"
    assert board.standings.pruned("fine") == ""
    other_grid = code(sass="triton", ctas=16)
    board.add("grid", code=other_grid)
    assert board.standings.pruned("grid") == ""


def test_gaps_are_measured_times_beside_the_plans_floors(board: Board) -> None:
    (gap,) = board.standings.gaps("triton")
    assert (gap.stage, gap.us) == ("state", 50.0)
    # W, Kr, U, the states before each chunk in, Vn out and decay, state in and out: at 4.24 TB/s far below 1 us
    assert 0.0 < gap.floor_us < 1.0
