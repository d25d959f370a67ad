"""The rules of the rounds, on rounds made up for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kda2.workbench import rounds
from kda2.workbench.rounds import GO_ON, Gap, Round

STAGES = ("prepare", "state", "output")


def a_round(number: int, stage: str, gain: float, seconds: float = 10.0) -> Round:
    return Round(
        round=number, stage=stage, why="because", candidates={"a": "correct, 9 us", "b": "not_run(pruned)"},
        hypotheses={"a": "held"}, best="a", best_us=9.0, label="measured", gain_percent=gain, seconds=seconds,
    )  # fmt: skip


def test_the_stage_that_loses_most_is_attacked() -> None:
    gaps = [Gap("prepare", 100.0, 90.0), Gap("state", 30.0, 5.0), Gap("output", 40.0, 20.0)]
    first = rounds.attack(gaps, frozenset())
    assert first is not None and first.stage == "state"  # 25 us over its floor, though prepare takes longest
    second = rounds.attack(gaps, frozenset({"state"}))
    assert second is not None and second.stage == "output"
    assert rounds.attack(gaps, frozenset(STAGES)) is None


def test_a_gap_in_words() -> None:
    assert str(Gap("state", 30.0, 5.0)) == "state takes 30 us, 6.0 times its floor of 5"


def test_stages_are_barren_until_something_is_gained() -> None:
    assert rounds.barren([a_round(1, "state", 0.4), a_round(2, "output", 0.0)]) == {"state", "output"}
    assert rounds.barren([a_round(1, "state", 0.4), a_round(2, "output", 3.0)]) == set()
    assert rounds.barren([a_round(1, "state", 5.0), a_round(2, "state", 0.99)]) == {"state"}


def decision(done: list[Round], most: int | None = None, left: float | None = None) -> str:
    return rounds.decided(done, STAGES, most, left).decision


def test_when_rounds_stop() -> None:
    gained = [a_round(1, "state", 10.0)]
    assert decision(gained) == GO_ON
    assert decision(gained, most=1) == "rounds"
    assert decision(gained, left=9.0) == "budget"  # another round of 10 s would not fit
    assert decision(gained, left=11.0) == GO_ON
    assert decision([a_round(i, s, 0.0) for i, s in enumerate(STAGES, 1)]) == "stagnation"
    assert decision([a_round(i, s, 0.0) for i, s in enumerate(STAGES[:2], 1)]) == GO_ON


def test_the_knee_is_where_a_per_cent_costs_much_more_than_the_cheapest() -> None:
    cheap, dear = a_round(1, "state", 10.0, seconds=10.0), a_round(2, "output", 2.0, seconds=17.0)
    assert cheap.seconds_per_percent == 1.0 and dear.seconds_per_percent == 8.5
    assert decision([cheap, dear]) == "knee"
    assert decision([cheap, a_round(2, "output", 2.0, seconds=15.9)]) == GO_ON  # 7.95 times
    assert decision([dear]) == GO_ON  # nothing to compare with
    assert decision([cheap, dear, a_round(3, "output", 0.0)]) == GO_ON  # it gained nothing: stagnation's business


def test_a_round_in_one_sentence() -> None:
    said = rounds.decided([a_round(1, "state", 10.0)], STAGES, 1, None).says
    assert said == (
        "round 1: because; 2 candidates for it (1 correct, 1 not run); best a, 9 us measured, 10 % gained in 10 s; "
        "hypotheses: 1 held; the next per cent would cost about 1 s if it costs what the last did; stops: as many "
        "rounds as were asked for"
    )
    nothing = rounds.decided([a_round(1, "state", 0.0)], STAGES, None, None).says
    assert "nothing gained in 10 s; hypotheses: 1 held; no per cent has been gained in 10 s; goes on" in nothing


def test_what_an_interrupted_round_cost_is_not_known() -> None:
    cheap = a_round(1, "state", 10.0, seconds=10.0)
    dear = replace(a_round(2, "output", 2.0, seconds=17.0), interrupted=True)
    assert dear.seconds_per_percent is None and decision([cheap, dear]) == GO_ON
    assert "2 % gained in 17 s since it was interrupted" in rounds.decided([cheap, dear], STAGES, None, None).says


def test_a_round_is_plain_data_and_back() -> None:
    done = rounds.decided([a_round(1, "state", 10.0)], STAGES, None, None)
    assert Round.from_plain(done.plain()) == done


@pytest.mark.parametrize("rule", ["rounds", "budget", "stagnation", "knee", "empty"])
def test_every_rule_is_told(rule: str) -> None:
    assert len(rounds.STOP_RULES[rule]) > 20
