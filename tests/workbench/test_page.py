"""The page of figures: newest records, honest ratios, stale ops."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kda2.workbench import page as pages
from kda2.workbench.profiler.environment import source_hash
from kda2.workbench.profiler.suites import case_name
from kda2.workbench.records import BenchRecord, TestRun

ROOT = Path(__file__).parent.parent.parent
CASE = {"seqlens": [1024], "heads": 64, "kv_heads": None, "k": 128, "v": 128, "dtype": "bf16", "gate": "weak"}


def record(impl: str, us: float | None, run: str = "r1", utc: str = "2026-01-01T00:00:00Z", **more: Any) -> str:
    fields = {
        "run": run, "utc": utc, "suite": "kda-prefill", "case": CASE, "impl": impl, "median_us": us,
        "samples": 200 if us else 0, "rel_err": {"o": 2e-3, "state": 1e-3}, "floor_us": 20.0,
        "status": "ok" if us else "oom", "device": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0",
        "triton": "3.6.0", "version": "0.1.0",
        "source": source_hash("kda", impl.removeprefix("kda2:")) if impl.startswith("kda2:") else None,
        "commit": "abc123",
    }  # fmt: skip
    return BenchRecord.model_validate({**fields, **more}).line() + "\n"


def page(folder: Path, *lines: str) -> str:
    (folder / "kda-prefill.jsonl").write_text("".join(lines))
    return pages.page(pages.load(folder))


def test_empty(tmp_path: Path) -> None:
    assert "No records yet." in pages.page(pages.load(tmp_path))


def test_ratios_errors_and_provenance(tmp_path: Path) -> None:
    text = page(tmp_path, record("fla", 300.0), record("kda2:triton", 150.0), record("cudnn", None))
    assert "| case | floor | kda2:triton | vs fla | fla | cudnn | vs fla |" in text
    assert "| H64-1024-weak | 20 | 150.0 | 2.00x | 300.0 | oom |  |" in text
    assert "2.0e-03 / 1.0e-03" in text
    assert "NVIDIA H200, driver 580.1, torch 2.11.0, triton 3.6.0, commit abc123" in text


def test_the_newest_record_is_shown_and_never_compared_across_runs(tmp_path: Path) -> None:
    later = record("kda2:triton", 100.0, run="r2", utc="2026-02-01T00:00:00Z")
    text = page(tmp_path, later, record("fla", 300.0), record("kda2:triton", 150.0))
    assert "| H64-1024-weak | 20 | 100.0 |  | 300.0 |" in text


def test_a_ratio_that_says_nothing_is_shown_as_such(tmp_path: Path) -> None:
    speed = {"low": 0.99, "value": 1.0, "high": 1.01}
    unclear = record("kda2:triton", 150.0, against="fla", speed=speed, verdict="inconclusive")
    assert "| 150.0 | 2.00x (inconclusive) | 300.0 |" in page(tmp_path, record("fla", 300.0), unclear)
    invalid = record("kda2:triton", 150.0, verdict="invalid(the SMs' clock moved)")
    assert "| 150.0 | invalid | 300.0 |" in page(tmp_path, record("fla", 300.0), invalid)


def test_times_beside_a_neighbour_are_left_out(tmp_path: Path) -> None:
    beside = record("kda2:triton", 400.0, utc="2026-02-01T00:00:00Z", neighbour_gbps=2000.0)
    text = page(tmp_path, record("fla", 300.0), record("kda2:triton", 150.0), beside)
    assert "| 150.0 | 2.00x | 300.0 |" in text
    assert "neighbour" not in text and "400.0" not in text


def test_host_times_have_their_own_table_where_they_were_taken(tmp_path: Path) -> None:
    text = page(tmp_path, record("fla", 300.0, call_us=1345.6), record("kda2:triton", 150.0))
    host = text[text.index("Host time of one call") : text.index("Relative error")]
    assert "| case | kda2:triton | fla |" in host
    assert "| H64-1024-weak |  | 1346 |" in host
    assert "Host time" not in page(tmp_path, record("fla", 300.0))


def test_p95_is_shown_where_there_is_one(tmp_path: Path) -> None:
    text = page(tmp_path, record("fla", 300.0), record("kda2:triton", 150.0, p95_us=160.04, samples=1000))
    assert "| H64-1024-weak | 20 | 150.0 (p95 160.0) | 2.00x | 300.0 |" in text


def test_a_time_that_holds_waits_for_the_host_is_marked(tmp_path: Path) -> None:
    text = page(tmp_path, record("fla", 300.0), record("kda2:triton", 150.0, host_paced=True))
    assert "| H64-1024-weak | 20 | 150.0 (host) | 2.00x | 300.0 |" in text


def test_cases_of_one_gate_stand_together(tmp_path: Path) -> None:
    cases = [{**CASE, "gate": gate, "heads": heads} for heads in (96, 64) for gate in ("none", "strong", "weak")]
    text = page(tmp_path, *(record("fla", 300.0, case=case) for case in cases))
    names = re.findall(r"^\| (H\d+-1024-\w+) ", text[: text.index("Relative error")], flags=re.MULTILINE)
    assert names == [f"H{heads}-1024-{gate}" for gate in ("strong", "weak", "none") for heads in (64, 96)]


def test_cold_starts_have_their_own_table(tmp_path: Path) -> None:
    cold = record("kda2:triton", 2.5e6, case={**CASE, "cold": True}, samples=1)
    text = page(tmp_path, record("kda2:triton", 150.0), cold)
    assert "| H64-1024-weak-cold | 2.50 |" in text
    assert "| H64-1024-weak | 20 | 150.0 |" in text


def family(impl: str, name: str, o: float, state: float, **more: Any) -> str:
    case = {**CASE, "family": name, "gate": "own"}
    errors = {"rel_err": {"o": o, "state": state}, "limit": {"o": 6e-3, "state": 6e-3}, "status": "ok"}
    return record(impl, None, case=case, **{**errors, **more})


def test_families_have_errors_and_shares_of_a_peers(tmp_path: Path) -> None:
    refused = {"rel_err": {}, "limit": None, "status": "unsupported(no such gate)"}
    text = page(
        tmp_path,
        family("kda2:hopper", "random", 2e-3, 3e-3), family("flash_kda", "random", 4e-3, 2e-3),
        family("kda2:hopper", "ragged", 2.003e-3, 0.0), family("flash_kda", "ragged", 2e-3, 0.0),
        family("kda2:hopper", "deep_gate", 2e-3, 3e-3), family("flash_kda", "deep_gate", 0.0, 0.0, **refused),
    )  # fmt: skip
    assert "| case | limit | kda2:hopper | of flash_kda's | flash_kda |" in text
    limit = "6.0e-03 / 6.0e-03"
    assert f"| H64-1024-own-random | {limit} | 2.0e-03 / 3.0e-03 | 0.50 / 1.50 | 4.0e-03 / 2.0e-03 |" in text
    assert f"| H64-1024-own-ragged | {limit} | 2.0e-03 / 0.0e+00 | 1.00 / 1.00 | 2.0e-03 / 0.0e+00 |" in text
    assert f"| H64-1024-own-deep_gate | {limit} | 2.0e-03 / 3.0e-03 |  | unsupported(no such gate) |" in text
    assert "kda2:hopper is no worse than flash_kda in 1 of the 2 cases that both answer." in text
    assert "floor |" not in text


def test_errors_of_two_runs_are_not_compared(tmp_path: Path) -> None:
    text = page(
        tmp_path, family("kda2:hopper", "random", 2e-3, 3e-3, run="r2"), family("flash_kda", "random", 1.0, 1.0)
    )
    assert "| 2.0e-03 / 3.0e-03 |  | 1.0e+00 / 1.0e+00 |" in text
    assert "in 0 of the 0 cases" in text


def speeds(suite: str, peer: str, pattern: str = "", own: str = "kda2:triton") -> set[bool]:
    """Whether an implementation was faster than a peer: what came out wherever one run measured both."""
    records = pages.newest(pages.load(ROOT / "benchmarks" / "records").suites[suite])
    times = {(r.run, case_name(r.case), r.impl): r.median_us for r in records if r.median_us}
    ours = {key[:2]: us for key, us in times.items() if key[2] == own and re.search(pattern, key[1])}
    return {us < times[(*key, peer)] for key, us in ours.items() if (*key, peer) in times}


def test_the_readme_says_what_the_records_say() -> None:
    assert speeds("kda-prefill", "fla") == speeds("kda-step", "fla") == {True}
    assert speeds("kda-prefill", "flash_kda") == {False}
    assert speeds("kda-prefill", "cudnn", r"strong|\dx\d|[+]") == {False}
    assert speeds("kda-prefill", "cudnn", r"-\d+-(weak|mixed|none)") == {True}
    for peer in ("fla", "flash_kda", "cudnn"):
        assert speeds("kda-prefill", peer, "^(?!.*-cold)", own="kda2:hopper") == {True}


def test_hopper_allocates_what_it_returns() -> None:
    """o, and a final state of 128 x 128 in fp32 for each head of each sequence."""
    records = pages.newest(pages.load(ROOT / "benchmarks" / "records").suites["kda-prefill"])
    ours = [r for r in records if r.impl == "kda2:hopper" and r.peak_bytes is not None]
    assert len(ours) >= 36  # twelve cases, three regimes
    for r in ours:
        heads, lengths = r.case["heads"], r.case["seqlens"]
        outputs = heads * 128 * (2 * sum(lengths) + 4 * 128 * len(lengths))
        assert outputs <= r.peak_bytes < outputs + 2**20, case_name(r.case)


def test_stale(tmp_path: Path) -> None:
    (tmp_path / "kda-prefill.jsonl").write_text(record("kda2:triton", 1.0, source="0" * 64) + record("fla", 1.0))
    assert pages.stale(pages.load(tmp_path)) == {"kda": ["kda-prefill: kda2:triton"]}
    (tmp_path / "kda-prefill.jsonl").write_text(record("kda2:triton", 1.0) + record("kda2:hopper", 1.0))
    assert pages.stale(pages.load(tmp_path)) == {}


@pytest.mark.parametrize(("source", "found"), [("0" * 64, {"kda": ["tests: kda-gpu"]}), (None, {})])
def test_gpu_tests(tmp_path: Path, source: str | None, found: dict[str, list[str]]) -> None:
    run = TestRun(
        run="r", utc="2026-01-01T00:00:00Z", suite="kda-gpu", passed=90, failed=0, skipped=2, device="NVIDIA H200",
        torch="2.11.0", triton="3.6.0", version="0.1.0", source=source,
    )  # fmt: skip
    (tmp_path / "gpu-tests.jsonl").write_text(run.line() + "\n")
    records = pages.load(tmp_path)
    assert "| kda-gpu | 90 | 0 | 2 | NVIDIA H200 |" in pages.page(records)
    assert pages.stale(records) == found
