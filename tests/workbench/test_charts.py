"""The report's charts: what they show of the ledger's figures."""

from __future__ import annotations

import pytest

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
