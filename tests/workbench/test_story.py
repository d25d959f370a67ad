"""What the report's page is made from: a ledger sorted for reading, and its reasons in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_ledger import FASTER, RUN, SHIPPED, SPILT, Writing, family, stage_code

from kda2.workbench import ledger as ledgers
from kda2.workbench.records import Verdict
from kda2.workbench.report import tell
from kda2.workbench.report.sections import common_reason
from kda2.workbench.report.story import Speed, Story
from kda2.workbench.verifier.words import reasons


def predicted(folder: Path) -> Story:
    w = Writing(folder / "ledger.jsonl", RUN | {"environment": {"device": "cpu"}})
    w.candidate(SHIPPED)
    w.candidate(FASTER, parent=SHIPPED)
    w.candidate("torch", impl="torch")
    w.code(SHIPPED, stage_code() | {"bytes": 9_600_000})
    w.code(FASTER, stage_code())
    w.verdict(SHIPPED, "L3", families={"random": family(0.003)}, on="cpu")
    return tell(ledgers.read(w.path))


def test_without_a_gpu_times_come_from_the_model(tmp_path: Path) -> None:
    """A stage of 4.8 MB takes 1 us at 4.8 TB/s; its 1000 instructions of 4 warps on 4 schedulers 0.5 us at 1.98 GHz."""
    story = predicted(tmp_path)
    shipped, faster, torch = story.rows.values()
    assert (story.label, story.shipped) == ("predicted", shipped)
    assert story.stages_us(shipped) == {"prepare": 1.0, "state": 2.0, "output": 1.0}
    assert (story.us(shipped), story.us(faster), story.us(torch)) == (4.0, 3.0, None)
    assert story.speed(faster) == Speed(4 / 3)
    assert story.speed(shipped) is None and story.speed(torch) is None
    assert (shipped.status, faster.status) == ("correct", "not shown")


def test_what_was_refuted_has_no_time(tmp_path: Path) -> None:
    story = predicted(tmp_path)
    faster = story.rows[FASTER]
    faster.verdicts["L3"] = Verdict(stage="L3", outcome="fail")
    assert story.us(faster) is None and story.speed(faster) is None
    faster.verdicts["L6"] = Verdict(stage="L6", outcome="invalid", evidence={"median_us": 1.0})
    assert faster.latency == {}


@pytest.mark.parametrize(
    ("said", "common"),
    [
        (SPILT, "pruned: it spills more than what ships"),
        ("its modelled time, 9.5 us, is not below the 8 us of x", "its modelled time is not below the best so far"),
        ("it needs a GPU: run raised RuntimeError: no\nGPU", "it needs a GPU"),
        ("no interpreter runs Gluon kernels", "no interpreter runs Gluon kernels"),
        ("plain torch: it has no kernels of its own", "plain torch: it has no kernels of its own"),
    ],
)
def test_reasons_that_differ_in_particulars_only_are_one(said: str, common: str) -> None:
    assert common_reason(said) == common


def test_the_words_of_older_ledgers() -> None:
    older = {"failures": {"state": "out of resources"}, "arch": 90}
    assert reasons(Verdict(stage="L1", outcome="fail", evidence=older)) == ["state: out of resources"]
    odd = {"not_powers_of_two": ["prepare num_warps=3"]}
    assert reasons(Verdict(stage="L0", outcome="fail", evidence=odd)) == ["prepare num_warps=3"]
    assert reasons(Verdict(stage="L3", outcome="fail", evidence={"ended": "killed"})) == ["killed"]
    assert reasons(Verdict(stage="L3", outcome="fail")) == ["see its evidence"]
