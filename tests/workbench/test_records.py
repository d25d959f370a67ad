"""Records: what may be written down, and what may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kda2.workbench.records import BadRecord, BenchRecord, Candidate, Verdict, read_lines

CASE = {"seqlens": [8192], "heads": 64, "kv_heads": None, "k": 128, "v": 128, "dtype": "bf16", "gate": "strong"}


def record(**changes: Any) -> BenchRecord:
    fields = {
        "run": "r", "utc": "2026-01-01T00:00:00Z", "suite": "kda-prefill", "case": {**CASE, "state": "fp32-in-out"},
        "impl": "kda2:triton", "median_us": 10.0, "samples": 200, "call_us": 5.0, "rel_err": {"o": 1e-3},
        "status": "ok", "device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "version": "0.1.0",
    }  # fmt: skip
    return BenchRecord.model_validate({**fields, **changes})


def verdict(stage: str, outcome: str, **evidence: Any) -> Verdict:
    return Verdict.model_validate({"stage": stage, "outcome": outcome, "evidence": evidence})


def candidate(*verdicts: Verdict, latency_us: float | None = None) -> Candidate:
    return Candidate(name="c", op="kda", impl="triton", writer="kda2", verdicts=verdicts, latency_us=latency_us)


def test_a_line_has_the_schema_and_no_absent_fields() -> None:
    line = json.loads(record().line())
    assert line["schema"] == 1
    assert line["case"]["kv_heads"] is None  # a case says that it has none
    assert "p95_us" not in line and "driver" not in line


@pytest.mark.parametrize("status", ["oom", "unsupported(K = 300)"])
def test_only_ok_records_have_times(status: str) -> None:
    assert "median_us" not in json.loads(record(status=status, median_us=None, call_us=None).line())
    for time in ({"median_us": 1.0, "call_us": None}, {"median_us": None, "call_us": 1.0}):
        with pytest.raises(ValueError, match="allows no times"):
            record(status=status, **time)


def test_a_family_has_errors_and_no_times() -> None:
    case = {**CASE, "gate": "own", "family": "repeated_keys"}
    line = json.loads(record(case=case, median_us=None, call_us=None, samples=0, limit={"o": 2e-3}).line())
    assert "median_us" not in line and line["limit"] == {"o": 2e-3}
    with pytest.raises(ValueError, match="rel_err of a family"):
        record(case=case, median_us=None, call_us=None, rel_err={})


def test_ok_needs_a_time_and_p95_needs_a_thousand_samples() -> None:
    with pytest.raises(ValueError, match="ok needs median_us"):
        record(median_us=None)
    with pytest.raises(ValueError, match="1000 samples"):
        record(p95_us=12.0, samples=999)
    assert record(p95_us=12.0, samples=1000).p95_us == 12.0


@pytest.mark.parametrize("name", ["median_us", "p95_us", "call_us", "floor_us"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_time_is_a_number(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        record(**{"samples": 1000, name: value})


@pytest.mark.parametrize("error", [float("inf"), float("nan")])
def test_a_result_that_is_ok_has_a_finite_error(error: float) -> None:
    with pytest.raises(ValueError, match="ok needs finite errors"):
        record(rel_err={"o": 1e-3, "state": error})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gate": "odd"}, "gate"),
        ({"gate": None}, "gate"),
        ({"heads": None}, "heads"),
        ({"heads": "64"}, "heads"),
        ({"seqlens": None}, "seqlens"),
        ({"seqlens": []}, "seqlens"),
        ({"seqlens": 8}, "seqlens"),
    ],
)
def test_a_case_that_no_page_could_show(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    line = json.loads(record().line())
    line["case"] = {name: x for name, x in {**CASE, **change}.items() if x is not None}
    path = tmp_path / "x.jsonl"
    path.write_text(record().line() + "\n" + json.dumps(line) + "\n")
    with pytest.raises(BadRecord, match=r"x\.jsonl:2 is not a BenchRecord: [\s\S]*" + words):
        list(read_lines(path, BenchRecord))


@pytest.mark.parametrize("status", ["fine", "unsupported", "unsupported()", "OK"])
def test_unknown_status(status: str) -> None:
    with pytest.raises(ValueError, match="status must be"):
        record(status=status, median_us=None, call_us=None)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="Extra inputs"):
        record(fast="very")


@pytest.mark.parametrize("name", ["kda-prefill", "kda-step", "kda-lineage", "kda-errors"])
def test_shipped_records_are_written_as_they_were_read(name: str) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "records" / f"{name}.jsonl"
    lines = path.read_text().splitlines()
    assert [BenchRecord.from_line(line).line() for line in lines] == lines


def test_clocks_hold_only_what_was_read() -> None:
    clocks = {"before_mhz": 1980.0, "after_mhz": 1965.0, "low_mhz": 1965.0, "high_mhz": 1980.0}
    assert json.loads(record(clocks={**clocks, "mem_mhz": None}).line())["clocks"] == clocks
    assert json.loads(record(clocks={**clocks, "slowed_by": ["power cap"]}).line())["clocks"]["slowed_by"] == [
        "power cap"
    ]
    assert "clocks" not in json.loads(record().line())


def test_a_neighbour_makes_another_case() -> None:
    assert record().name == "H64-8192-strong"
    assert record(neighbour_gbps=2000.0).name == "H64-8192-strong-neighbour"


def test_the_tail_is_named_by_what_it_is() -> None:
    assert record().tail is None
    assert record(median_us=10.0, max_us=15.0, samples=999).tail == ("max", 1.5)
    assert record(median_us=10.0, p95_us=11.0, max_us=15.0, samples=1000).tail == ("p95", 1.1)


SPEED = {"low": 1.1, "value": 1.2, "high": 1.3}


@pytest.mark.parametrize("verdict", ["faster", "slower", "inconclusive"])
def test_a_comparison_says_with_what(verdict: str) -> None:
    assert record(verdict=verdict, speed=SPEED, against="fla").verdict == verdict
    for part in ({"speed": SPEED}, {"against": "fla"}):
        with pytest.raises(ValueError, match="needs speed, and against what"):
            record(verdict=verdict, **part)


def test_no_comparison_needs_a_reason() -> None:
    assert record(verdict="invalid(the clock moved)").verdict == "invalid(the clock moved)"
    for verdict in ("invalid", "incorrect()", "fastest", "faster(much)"):
        with pytest.raises(ValueError, match="verdict"):
            record(verdict=verdict)
    with pytest.raises(ValueError, match="allows no times, got \\['speed'\\]"):
        record(status="oom", median_us=None, call_us=None, speed=SPEED)


def test_reading_names_the_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(record().line() + "\n\n" + '{"schema": 1}\n')
    with pytest.raises(BadRecord, match=r"x\.jsonl:3 is not a BenchRecord"):
        list(read_lines(path, BenchRecord))


def test_a_line_that_is_no_text_is_named_too(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(record().line().encode() + b"\n\xff\xfe\n")
    with pytest.raises(BadRecord, match=r"x\.jsonl:2 is not a BenchRecord"):
        list(read_lines(path, BenchRecord))


def test_lines_read_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(record().line() + "\n")
    assert list(read_lines(path, BenchRecord)) == [record()]


@pytest.mark.parametrize("outcome", ["passed", "not_run", "not_run()", "PASS"])
def test_unknown_outcome(outcome: str) -> None:
    with pytest.raises(ValueError, match="outcome must be"):
        verdict("L1", outcome)


def test_a_latency_is_earned_by_numerics() -> None:
    assert candidate(verdict("L1", "pass"), verdict("L4", "pass"), latency_us=5.0).latency_us == 5.0
    for verdicts in (
        (),
        (verdict("L1", "pass"), verdict("L3", "not_run(no interpreter)")),
        (verdict("L3", "pass"), verdict("L4", "fail")),
        (verdict("L3", "pass"), verdict("L6", "invalid")),
    ):
        with pytest.raises(ValueError, match="did not pass its numerics"):
            candidate(*verdicts, latency_us=5.0)
