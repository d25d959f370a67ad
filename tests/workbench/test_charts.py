"""The report's charts: what they show of the ledger's figures."""

from __future__ import annotations

import pytest

from kda2.workbench.growth import Curve, Growth, Point, fit
from kda2.workbench.planner import Problem, figures, plan
from kda2.workbench.report import charts


def test_a_slow_candidate_does_not_hide_how_the_others_differ() -> None:
    ranking = [{"name": "a", "us": 10.0}, {"name": "b", "us": 12.0}, {"name": "c", "us": 9000.0, "host_paced": True}]
    bar = charts.ranking({"ranking": ranking, "chosen": "a", "label": "measured"}).data[0]
    assert dict(zip(bar.y, bar.x, strict=True)) == {"a": 10.0, "b": 12.0, "c": 30.0}
    assert dict(zip(bar.y, bar.text, strict=True)) == {
        "a": "10.0", "b": "12.0", "c": "9,000.0, off the scale, paced by the host"
    }  # fmt: skip


@pytest.mark.parametrize("choice", [{}, {"ranking": []}])
def test_nothing_timed_gives_no_chart(choice: dict[str, object]) -> None:
    assert charts.ranking(choice) is None


def test_the_ranking_shows_the_first_and_the_chosen_one() -> None:
    ranking = [{"name": f"candidate {i}", "us": 10.0 + i, "earlier": i > 3} for i in range(30)]
    bar = charts.ranking({"ranking": ranking, "chosen": "candidate 29", "label": "measured"}).data[0]
    assert list(bar.y)[::-1] == [*(f"candidate {i}" for i in range(15)), "candidate 29"]
    assert bar.text[0] == "39.0, off the scale, in an earlier heat"
    assert bar.text[-1] == "10.0"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a < b & c", "a &lt; b &amp; c"),
        ("triton prepare BK=16 BV=128 num_warps=8, state BV=16 num_stages=2",
         "triton prepare BK=16 BV=128 num_warps=8,<br>state BV=16 num_stages=2"),
        ("", ""),
    ],
)  # fmt: skip
def test_names_are_wrapped_and_no_markup(text: str, shown: str) -> None:
    assert charts.wrapped(text) == shown


@pytest.mark.parametrize(
    ("cell", "number", "tooltip"),
    [
        ({}, "", ""),
        ({"margin": 0.5, "quantities": {"o": {"says": "o: 1; at <x>"}}}, "0.50", "o: 1<br>&nbsp;&nbsp;at &lt;x&gt;"),
        ({"margin": 120.4, "quantities": {}, "says": "far off"}, "120", "far off"),
        ({"margin": None, "quantities": {}, "ended": "refused", "says": "no vk states"}, "refused", "no vk states"),
        ({"margin": None, "quantities": {"o": {"says": "o has NaN"}}}, "fail", "o has NaN"),
    ],
)
def test_a_cell_of_the_margins(cell: dict[str, object], number: str, tooltip: str) -> None:
    assert (charts._number(cell), charts._words(cell)) == (number, tooltip)


def test_the_plans_blocks_stand_in_the_order_of_the_data_flow() -> None:
    """Of the resources, the first to be drawn binds one block alone."""
    drawn = figures(plan("kda", "sm_90", Problem()))["floors"]
    assert drawn.layout.yaxis.categoryarray == ("C output", "B state", "D solve", "A factors")  # from below


def growth(name: str, *gates: str) -> Growth:
    points = tuple(Point(tokens=t, errors={"o": 1e-6 * t, "final state": None}, seconds=1.0) for t in (64, 128))
    fits = {"o": fit((64, 128), (6.4e-5, 1.28e-4)), "final state": fit((), ())}
    curves = tuple(Curve(gate=gate, points=points, fits=fits) for gate in gates)
    return Growth(
        utc="", name=name, sizes={}, dtype="bf16", seed=0, environment={}, curves=curves,
    )  # fmt: skip


def test_error_growth_has_a_panel_for_each_quantity_and_a_line_for_each_gate() -> None:
    figure = charts.growth([growth("torch", "strong", "none"), growth("a<b.py", "none")])
    lines = [(line.name, line.yaxis, tuple(line.x), tuple(line.y), line.showlegend) for line in figure.data]
    names = ("torch, bf16, strong", "torch, bf16, none", "a&lt;b.py, bf16, none")
    assert lines == [
        line
        for name in names
        for line in (
            (name, "y", (64, 128), (6.4e-5, 1.28e-4), True), (name, "y2", (64, 128), (None, None), False),
        )
    ]  # fmt: skip
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type, figure.layout.yaxis2.type) == ("log", "log", "log")
    assert figure.layout.yaxis2.title.text == "relative error of final state"
    assert figure.layout.xaxis.domain[1] < figure.layout.xaxis2.domain[0]
    assert len({line.line.color for line in figure.data}) == 3


def test_no_growth_no_chart() -> None:
    assert charts.growth([]) is None
    assert charts.growth([growth("torch")]) is None
