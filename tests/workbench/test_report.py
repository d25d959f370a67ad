"""The report of a run: made from the ledger alone, whatever the ledger tells of, and nothing in it taken as markup."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_ledger import (
    BOOK,
    CAPTURE,
    DIAGNOSIS,
    FASTER,
    FILE,
    FLOORS,
    RUN,
    SAME,
    SHIPPED,
    SPILLS,
    SPILT,
    TWIN,
    Writing,
    family,
    finished,
    shipped_and_variants,
    stage_code,
)
from report_page import markup, table, words

from kda2.workbench import ledger as ledgers
from kda2.workbench.growth import Curve, Growth, Point, fit
from kda2.workbench.ledger import Ledger
from kda2.workbench.records import STAGES
from kda2.workbench.report import charts, render, tell, write_report
from kda2.workbench.report.sections import failures, undone
from kda2.workbench.report.story import Story

NOTES = Path(__file__).parents[2] / "docs" / "notes" / "2026-11-29-kda-triton"
PLOTLY, UNRUN = "/* plotly */", "\N{EN DASH}"


@pytest.fixture(autouse=True, scope="module")
def without_plotly() -> Iterator[None]:
    """Plotly's script is 5 MB that no test reads."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(charts, "script", lambda: PLOTLY)
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    w = Writing(tmp_path_factory.mktemp("measured") / "ledger.jsonl")
    shipped_and_variants(w)
    finished(w)
    return w.path


@pytest.fixture(scope="module")
def page(measured: Path) -> str:
    return markup(render(measured))


@pytest.fixture(scope="module")
def story(measured: Path) -> Story:
    return tell(ledgers.read(measured))


# --- the page of a measured run ---


def test_the_headline_says_what_why_and_what_more_would_cost(page: str) -> None:
    said = words(page)
    assert f"{FASTER} measured Why this one: lowest median of the 2 best." in said
    assert "Why the run ended: as many rounds as were asked for; the next per cent would cost 2 s." in said
    assert "40.00 us median time on the device 1.25x the speed of what ships, 1.22 to 1.27" in said
    assert "5 candidates, 2 rounds 2 correct on every probe 2 probes, the captured call among them" in said


def test_the_plan_shows_blocks_with_bytes_and_floors(page: str) -> None:
    rows = [cells for _, cells in table(page, "block", "computes", "memory")]
    assert [(r[""][1], r["block"][1]) for r in rows[:4]] == [
        ("A", "factors"), ("D", "solve"), ("B", "state"), ("C", "output"),
    ]  # fmt: skip
    state = rows[2]
    made = next(b for b in BOOK.blocks if b.stage == "state")
    assert {t.name for t in (*made.inputs, *made.outputs) if t.owner == "call"} == {
        "initial_state", "final_state",
    }  # fmt: skip
    assert state["call's bytes"][1] == "524.3 kB"  # two of 4 x 128 x 128 x 4
    assert state["chain"][1] == f"{made.floor_us:.2f}" and made.binds == "chain"
    assert (state["CTAs"][1], state["waves"][1], state["filled"][1]) == ("8", "1", "6 %")


def test_a_stages_time_stands_beside_its_floor(story: Story) -> None:
    figure = charts.stage_times(story)
    bars = {bar.name: dict(zip(bar.y, bar.x, strict=True)) for bar in figure.data}
    assert bars == {
        "floor": FLOORS,
        f"{FASTER} (chosen)": {"prepare": 5.0, "state": 21.0, "output": 4.0},
        "triton (what ships)": {"prepare": 5.0, "state": 30.0, "output": 4.0},
    }
    state = next(bar for bar in figure.data if bar.name == "triton (what ships)")
    assert state.text[state.y.index("state")] == f"30.00, {30 / FLOORS['state']:.1f} times its floor"


def test_a_row_for_each_round(page: str) -> None:
    first, second = (cells for _, cells in table(page, "attacked", "because"))
    assert first["because"][1] == "state takes 30.0 us, 9.6 times its floor of 3.1"
    assert first["candidates"][1].startswith("3: 1 correct, 2 not run")
    assert f"{FASTER}: correct, 40 us; hypothesis held" in first["candidates"][1]
    assert first["hypotheses"][1] == "1 held, 1 refuted"
    numbers = ("best, us", "gain", "seconds", "seconds a per cent", "then")
    assert [first[n][1] for n in numbers] == ["40.00", "20.00 %", "50.0", "2.5", "go on"]
    assert [second[n][1] for n in numbers] == [
        "40.00", "0.00 %", "8.0", "none gained", "stop: as many rounds as were asked for",
    ]  # fmt: skip


def test_the_rounds_chart_has_the_best_time_and_the_cost(story: Story) -> None:
    line, bars = charts.rounds(story.rounds).data
    assert list(zip(line.x, line.y, strict=True)) == [("before", 50.0), ("round 1", 40.0), ("round 2", 40.0)]
    assert list(zip(bars.x, bars.y, strict=True)) == [("round 1", 50.0), ("round 2", 8.0)]
    assert bars.text == ("50 s<br>2.5 s a per cent", "8 s")
    assert charts.rounds([]) is None


def test_one_table_has_every_candidate_and_sorts_by_numbers(page: str) -> None:
    rows = table(page, "candidate", "writer", "parent", "L0")
    by_name = {cells["candidate"][1].removesuffix(" chosen"): cells for _, cells in rows}
    assert list(by_name) == [SHIPPED, FILE, FASTER, SPILLS, TWIN]
    assert [cells["candidate"][1] for kind, cells in rows if kind == "chosen"] == [f"{FASTER} chosen"]
    best = by_name[FASTER]
    assert (best["writer"][1], best["parent"][1], best["held"][1], best["correct"][1]) == (
        "kda2 template", SHIPPED, "held", "correct",
    )  # fmt: skip
    assert (best["us, measured"], best["speed"]) == (("40.0", "40.00"), ("1.25", "1.25x"))
    assert (best["registers"], best["shared"]) == (("128", "128 / 126 / 128"), ("23552", "8 / 23 / 1.5"))
    assert by_name[SPILLS]["spills"] == ("264", "0 / 264 / 0")
    assert [best[stage] for stage in STAGES] == [
        ("0", "✓"), ("0", "✓"), ("0", "✓"), ("4", UNRUN), ("0", "✓"), ("4", UNRUN), ("0", "✓"), ("4", UNRUN),
    ]  # fmt: skip
    assert (by_name[FILE]["correct"][1], by_name[FILE]["L4"]) == ("refuted", ("2", "✗"))
    assert by_name[SPILLS]["correct"][1] == "not shown"
    # what nobody measured has an empty key, which sorts last
    assert (by_name[FILE]["us, measured"], by_name[FILE]["registers"]) == (("", ""), ("", ""))
    assert by_name[SHIPPED]["speed"] == ("1", "ships")


def test_how_each_was_timed(page: str) -> None:
    cells = next(cells for _, cells in table(page, "median, us", "refilled inputs") if cells["candidate"][1] == FASTER)
    assert cells["median, us"] == ("40.5", "40.50")
    assert cells["times the datasheet's floor"] == ("10.125", "10.1")
    assert cells["speed"] == ("1.25", "1.250x (1.220 to 1.270)")
    assert (cells["p95, us"], cells["refilled inputs"][1]) == (("", ""), "agrees")


def test_what_did_not_run_is_told_by_reason(story: Story, page: str) -> None:
    extents = {group.reason: group.extent for group in undone(story)}
    assert extents == {
        "not part of this job": "L5, L7 of 5 candidates",
        "its numerics did not pass": "L6 of 3 candidates",
        "judged on the GPU": "L3 of 3 candidates",
        "pruned: it spills more than what ships": "L3, L4 of 1 candidate",
        SAME: "L3, L4 of 1 candidate",
        "it launches no Triton kernel": "L1, L2 of 1 candidate",
    }
    assert SPILT in words(page)


def test_a_failure_is_told_in_words(story: Story, page: str) -> None:
    (failure,) = failures(story.rows.values())
    assert (failure.name, failure.stage, failure.outcome) == (FILE, "L4", "fail")
    assert failure.says == (f"random: {DIAGNOSIS}",)
    assert f"random: {DIAGNOSIS}" in words(page)


def test_the_report_needs_nothing_but_the_ledger(measured: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(measured.read_bytes())
    whole = render(copy)
    assert ledgers.verify(copy).head in whole
    assert not re.search(r"(src|href)\s*=", markup(whole))
    assert "@import" not in markup(whole) and "url(" not in markup(whole)
    assert not re.search(r"<script[^>]+src", whole)
    assert whole.count(PLOTLY) == 1


# --- other runs ---


@pytest.mark.parametrize("name", ["run-bounded", "run-softplus"])
def test_an_older_ledger_is_reported_too(name: str) -> None:
    ledger = NOTES / f"{name}.jsonl"
    chosen = [json.loads(line)["payload"] for line in ledger.read_text().splitlines()][-1]["chosen"]
    whole = render(ledger)
    rows = table(markup(whole), "candidate", "writer", "L7")
    assert [cells["candidate"][1] for kind, cells in rows if kind == "chosen"] == [f"{chosen} chosen"]
    times = {cells["candidate"][1].removesuffix(" chosen"): cells["us, measured"] for _, cells in rows}
    assert times["torch"][1] == "41,192" if name == "run-bounded" else times["torch"][0]
    assert "Rounds" not in words(whole) and "Data flow" not in words(whole)


def test_an_interrupted_run_tells_its_best_so_far(tmp_path: Path) -> None:
    w = Writing(tmp_path / "ledger.jsonl")
    shipped_and_variants(w)
    w.rounds()
    stopped = {"reason": "KeyboardInterrupt", "says": "", "best": FASTER, "best_us": 40.0, "label": "measured"}
    w.ledger.append("stopped", stopped)
    said = words(render(w.path))
    assert f"Stopped before a choice was made KeyboardInterrupt. Best so far: {FASTER} , 40.00 us measured." in said
    assert (
        "the run was stopped before it came to this L3 of 1 candidate; L5, L7 of 5 candidates; L6 of 3 candidates"
        in said
    )
    w.ledger.append("resumed", {"lines": 30, "environment": RUN["environment"], "torn_bytes_set_aside": 12})
    said = words(render(w.path))
    assert f"No choice has been made; best so far: {FASTER}" in said
    assert "after 30 lines; stopped before by KeyboardInterrupt; 12 bytes of an unfinished line were set aside" in said
    finished(w)
    assert f"{FASTER} measured Why this one" in words(render(w.path))


def test_a_run_stopped_at_once_has_a_page(tmp_path: Path) -> None:
    w = Writing(tmp_path / "ledger.jsonl")
    w.candidate(SHIPPED)
    w.ledger.append("stopped", {"reason": "OSError", "says": "[Errno 28] No space left on device"})
    said = words(render(w.path))
    assert "Stopped before a choice was made OSError: [Errno 28] No space left on device." in said
    assert "L0, L1, L2, L3, L4, L5, L6, L7 of 1 candidate" in said


def test_a_run_without_a_correct_candidate(tmp_path: Path) -> None:
    w = Writing(tmp_path / "ledger.jsonl")
    w.candidate(SHIPPED)
    w.verdict(
        SHIPPED, "L1", "fail", checks={"state": {"ok": False, "observed": "9 bytes", "expected": "8", "hint": ""}}
    )
    choice = {"chosen": None, "label": "predicted", "rule": "no candidate is correct", "ranking": []}
    w.ledger.append("choice", choice)
    said = words(render(w.path))
    assert "No candidate is correct: nothing was chosen" in said
    assert "state: 9 bytes, wants 8" in said


def test_a_run_without_a_captured_call(tmp_path: Path) -> None:
    w = Writing(tmp_path / "ledger.jsonl", RUN | {"capture": None, "environment": {"device": "cpu", "driver": None}})
    w.candidate(FILE, impl="file", writer="file")
    refused = {"ok": False, "margin": None, "quantities": {}, "ended": "refused", "says": "run refuses vk states"}
    w.verdict(FILE, "L3", "inconclusive", families={"random": family(0.003), "ragged": refused}, seed=1, on="cpu")
    whole = render(w.path)
    assert "The captured call" not in words(whole)
    assert "ragged: run refuses vk states" in words(whole)
    assert table(markup(whole), "candidate", "writer")[0][1]["L3"] == ("1", "?")


def test_a_plan_of_another_version_is_told_without_its_book(measured: Path, tmp_path: Path) -> None:
    copy = rewritten(measured, tmp_path, "plan", lambda p: p | {"book": {"schema": 2}})
    said = words(render(copy))
    assert "floors of the stages Stages against their floors" in said and "Data flow" not in said


@pytest.mark.parametrize("regime", [{"resets": 3}, {}])
def test_a_gate_without_a_finite_decay(measured: Path, page: str, tmp_path: Path, regime: dict[str, int]) -> None:
    """A capture of resets alone, or of no token, has no half-life."""
    copy = rewritten(
        measured, tmp_path, "run", lambda p: p | {"capture": {**CAPTURE, "regime": {"resets": 0} | regime}}
    )
    assert "18.2 tokens, median half-life" in words(page)
    assert "median half-life" not in words(render(copy))


def rewritten(ledger: Path, folder: Path, kind: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """The ledger with the payloads of one kind changed."""
    copy = Ledger(folder / "rewritten.jsonl")
    for line in ledgers.read(ledger):
        copy.append(line.kind, change(line.payload) if line.kind == kind else line.payload)
    return copy.path


def test_nothing_in_a_ledger_is_taken_as_markup(measured: Path, tmp_path: Path) -> None:
    """Every string that is free text, in every line."""
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    free = {
        "says",
        "rule",
        "why",
        "cost",
        "hypothesis",
        "writer",
        "observed",
        "worst",
        "title",
        "meaning",
        "layer",
        "gap",
    }
    free |= {"device", "ended", "torch", "on"}

    def spoilt(x: Any, key: str = "") -> Any:
        if isinstance(x, dict):
            return {n.replace(FASTER, f"{FASTER} {evil}"): spoilt(value, n) for n, value in x.items()}
        if isinstance(x, list):
            return [spoilt(value, key) for value in x]
        if isinstance(x, str):
            return f"{x} {evil}" if key in free else x.replace(FASTER, f"{FASTER} {evil}")
        return x

    copy = Ledger(tmp_path / "spoilt.jsonl")
    for line in ledgers.read(measured):
        copy.append(line.kind, spoilt(line.payload))
    whole = render(copy.path)
    assert "&lt;img src=x" in whole
    assert "<img" not in whole
    assert "<script>alert(2)" not in whole


# --- error growth ---


def grown(name: str, ended: str = "") -> dict[str, Any]:
    """The line of a kernel whose o grows as the square root of T, and whose final state does not."""
    tokens = (64, 128, 256, 512, 1024, 2048)
    errors: dict[str, list[float | None]] = {"o": [1e-4 * t**0.5 for t in tokens], "final state": [3e-7] * 6}
    if ended:
        errors["o"][-1] = None
    points = tuple(Point(tokens=t, errors={n: errors[n][i] for n in errors}, seconds=1.0) for i, t in enumerate(tokens))
    fits = {"o": fit(tokens[:5], [1e-4 * t**0.5 for t in tokens[:5]]), "final state": fit(tokens, [3e-7] * 6)}
    growth = Growth(
        utc="2026-01-01T00:00:00Z", name=name, sizes={"H": 1, "HV": 1, "K": 8, "V": 8}, dtype="bf16", seed=3,
        environment={"device": "NVIDIA H200"}, curves=(Curve(gate="weak", points=points, fits=fits, ended=ended),),
    )  # fmt: skip
    return growth.model_dump(mode="json", by_alias=True)


def test_growth_alone_has_a_page(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("growth", grown("mine.py"))
    ledger.append("growth", grown("torch", "stopped at T=2048: not finite"))
    whole = render(ledger.path)
    rows = [
        (r["implementation"][1].split()[0], r["quantity"][1], r["law"][1], r["order"][1])
        for _, r in table(markup(whole), "implementation", "law", "order")
    ]
    assert rows == [
        (name, quantity, law, order) for name in ("mine.py", "torch")
        for quantity, law, order in (("o", "sqrt", "0.500"), ("final state", "flat", "0.000"))
    ]  # fmt: skip
    said = words(whole)
    assert "Kimi Delta Attention: how errors grow" in said and "torch, weak: stopped at T=2048: not finite" in said
    assert "No choice has been made" not in said and "Candidates" not in said and "sm_0" not in said


def test_growth_in_the_ledger_of_a_run(measured: Path, tmp_path: Path) -> None:
    copy = rewritten(measured, tmp_path, "none", lambda p: p)
    Ledger(copy).append("growth", grown("triton"))
    said = words(render(copy))
    assert f"{FASTER} measured Why this one" in said and "Error growth" in said
    assert "Error growth" not in words(render(measured))


def test_growth_of_another_version_is_told(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("growth", grown("torch") | {"schema": 2})
    assert "1 lines of another version are left out." in words(render(ledger.path))


def test_a_kernels_name_is_no_markup_in_its_curves(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("growth", grown("<img src=x>.py", "stopped at T=64: </script><script>alert(2)</script>"))
    whole = render(ledger.path)
    assert "&lt;img src=x&gt;.py" in whole
    assert "<img" not in whole and "<script>alert(2)" not in whole


def test_many_candidates_stay_readable(tmp_path: Path) -> None:
    """The charts and the open tables are of a few; the rest is there on demand."""
    w = Writing(tmp_path / "ledger.jsonl")
    shipped_and_variants(w)
    ranking = [{"name": FASTER, "us": 40.0}, {"name": SHIPPED, "us": 50.0}]
    for i in range(40):
        w.candidate(f"variant {i}", parent=SHIPPED)
        w.code(f"variant {i}", stage_code())
        ranking.append({"name": f"variant {i}", "us": 60.0 + i, "earlier": True})
    w.ledger.append("choice", {"chosen": ranking[-1]["name"], "label": "measured", "rule": "a", "ranking": ranking})
    story = tell(ledgers.read(w.path))
    bar = charts.ranking(story.choice).data[0]
    assert len(bar.y) == 16 and "variant 39" in bar.y
    said = words(render(w.path))
    assert "The first 15 of 42; the table of candidates has all." in said
    assert "42 more candidates" in said  # of 44 with machine code, all but what ships and the chosen one


def test_a_report_is_written_whole_or_not_at_all(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.html").write_text("the last one")
    write = Path.write_text

    def full(self: Path, text: str, **options: str) -> int:
        write(self, text[:100], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(measured, tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "the last one"
