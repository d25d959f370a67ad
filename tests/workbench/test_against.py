"""Records of two runs side by side: what moved beyond noise, and what was not the same."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kda2.cli.bench import bench
from kda2.errors import InvalidValue
from kda2.workbench.page import newest
from kda2.workbench.profiler.against import RUN_NOISE, Change, changed, changes, load, summary
from kda2.workbench.records import BadRecord, BenchRecord

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"
CASE = {"seqlens": [8192], "heads": 64, "kv_heads": None, "k": 128, "v": 128, "dtype": "bf16", "gate": "weak"}
QUARTILES = {"q25_us": 99.0, "q75_us": 101.0}
CLOCKS = {"before_mhz": 1980.0, "after_mhz": 1980.0, "low_mhz": 1965.0, "high_mhz": 1980.0}

app = typer.Typer()
app.command()(bench)


def record(us: float | None = 100.0, **more: Any) -> BenchRecord:
    fields = {
        "run": "r1", "utc": "2026-01-01T00:00:00Z", "suite": "kda-prefill", "case": CASE, "impl": "kda2:hopper",
        "median_us": us, "samples": 200 if us else 0, "call_us": 20.0 if us else None, "rel_err": {"o": 2e-3},
        "status": "ok" if us else "oom", "device": "NVIDIA H200", "driver": "570.1", "torch": "2.11.0",
        "triton": "3.6.0", "version": "0.1.0", "source": "a" * 64, "commit": "abc",
    }  # fmt: skip
    return BenchRecord.model_validate({**fields, **more})


def change(old: BenchRecord, new: BenchRecord) -> Change:
    (found,) = changes([old], [new])
    return found


def file(path: Path, *records: BenchRecord) -> str:
    path.write_text("".join(r.line() + "\n" for r in records))
    return str(path)


def test_a_driver_that_costs_a_fifth_is_noticed_and_named(tmp_path: Path) -> None:
    old = file(tmp_path / "old.jsonl", record(), record(impl="fla", source=None))
    new = file(
        tmp_path / "new.jsonl",
        record(120.0, driver="580.2", run="r2"), record(120.0, driver="580.2", run="r2", impl="fla", source=None),
    )  # fmt: skip
    result = CliRunner().invoke(app, [new, "--against", old])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert "H64-8192-weak: kda2:hopper slower: 100.0 us -> 120.0 us; changed: driver" in lines
    assert "H64-8192-weak: fla slower: 100.0 us -> 120.0 us; changed: driver" in lines
    assert "driver: 570.1 -> 580.2 (2 of 2)" in lines


def test_the_same_as_json(tmp_path: Path) -> None:
    old, new = file(tmp_path / "old.jsonl", record()), file(tmp_path / "new.jsonl", record(120.0, driver="580.2"))
    result = CliRunner().invoke(app, [new, "--against", old, "--json"])
    assert result.exit_code == 1
    (found,) = json.loads(result.stdout)["changes"]
    assert found == {
        "case": "H64-8192-weak", "impl": "kda2:hopper", "verdict": "slower", "before_us": 100.0, "after_us": 120.0,
        "speed": {"low": 100.0 / 120.0, "value": 100.0 / 120.0, "high": 100.0 / 120.0}, "before_call_us": 20.0,
        "after_call_us": 20.0, "changed": {"driver": ["570.1", "580.2"]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("after", "verdict", "code"), [(98.0, "inconclusive", 0), (102.9, "inconclusive", 0), (90.0, "faster", 0)]
)
def test_what_is_no_worse_passes(after: float, verdict: str, code: int, tmp_path: Path) -> None:
    old, new = file(tmp_path / "old.jsonl", record()), file(tmp_path / "new.jsonl", record(after))
    result = CliRunner().invoke(app, [new, "--against", old])
    assert result.exit_code == code and verdict in result.output
    assert change(record(), record(after)).verdict == verdict


def test_slower_with_nothing_changed_is_said_too() -> None:
    found = change(record(), record(120.0))
    assert list(summary([found])) == [
        "H64-8192-weak: kda2:hopper slower: 100.0 us -> 120.0 us; nothing recorded changed"
    ]


def test_quartiles_widen_the_interval() -> None:
    """100 us and 105 us: certain of a steady time, not of one that scatters by as much itself."""
    steady = change(record(**QUARTILES), record(105.0, q25_us=104.0, q75_us=106.0))
    assert steady.verdict == "slower" and steady.speed is not None and steady.speed.low < 100 / 105 < steady.speed.high
    scattered = change(record(q25_us=80.0, q75_us=120.0), record(105.0, q25_us=85.0, q75_us=125.0))
    assert scattered.verdict == "inconclusive"


def test_the_interval_holds_the_ratio_of_medians() -> None:
    """Of normal samples, drawn again and again."""
    rng, held = random.Random(0), 0
    for _ in range(200):
        pair = []
        for us in (100.0, 110.0):
            drawn = [rng.gauss(us, 4.0) for _ in range(200)]
            low, median, high = statistics.quantiles(drawn, n=4)
            pair.append(record(median, q25_us=low, q75_us=high))
        speed = change(*pair).speed
        held += speed is not None and speed.low <= 100.0 / 110.0 <= speed.high
    assert 180 <= held < 200


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ({}, {"samples": 19}, "fewer than 20 samples"),
        ({"host_paced": True}, {}, "before, the time held waits for the host"),
        ({}, {"verdict": "invalid(the clock moved)"}, "after, the time was invalid(the clock moved)"),
        ({}, {"median_us": 100.0}, "within 3%"),
    ],
)
def test_what_allows_no_comparison(old: dict[str, Any], new: dict[str, Any], why: str) -> None:
    found = change(record(**old), record(**{"median_us": 150.0, **new}))
    assert (found.verdict, found.why, found.worse) == ("inconclusive", why, False)


def test_a_time_that_is_lost_is_worse_and_one_gained_is_not() -> None:
    lost = change(record(), record(None, status="unsupported(RuntimeError: no)"))
    assert (lost.verdict, lost.why, lost.worse) == ("lost", "unsupported(RuntimeError: no)", True)
    assert "kda2:hopper lost: no time any more: unsupported(RuntimeError: no)" in next(summary([lost]))
    gained = change(record(None), record())
    assert (gained.verdict, gained.why, gained.worse) == ("gained", "oom", False)
    assert not list(changes([record(None)], [record(None)]))


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ({}, {}, {}),
        ({}, {"driver": "580.2"}, {"driver": ("570.1", "580.2")}),
        ({}, {"triton": "3.7.1", "torch": "2.13.0"}, {"torch": ("2.11.0", "2.13.0"), "triton": ("3.6.0", "3.7.1")}),
        ({}, {"version": "0.2.0", "commit": "def"}, {"version": ("0.1.0", "0.2.0"), "commit": ("abc", "def")}),
        ({}, {"source": "b" * 64}, {"source": ("a" * 64, "b" * 64)}),
        ({"driver": None}, {}, {"driver": (None, "570.1")}),
        ({"clocks": CLOCKS}, {"clocks": {**CLOCKS, "after_mhz": 1755.0}}, {"sm_mhz": (1980.0, 1755.0)}),
        ({"clocks": CLOCKS}, {"clocks": {**CLOCKS, "after_mhz": 1965.0}}, {}),
        (
            {"clocks": {**CLOCKS, "slowed_by": []}},
            {"clocks": {**CLOCKS, "slowed_by": ["power cap"]}},
            {"slowed_by": ((), ("power cap",))},
        ),
        ({}, {"clocks": CLOCKS}, {}),  # nobody read them before
    ],
)
def test_facts_that_differ(old: dict[str, Any], new: dict[str, Any], facts: dict[str, Any]) -> None:
    assert changed(record(**old), record(**new)) == facts


def test_only_the_same_case_and_implementation_meet() -> None:
    other = {**CASE, "heads": 96}
    assert not list(changes([record(), record(case=other)], [record(impl="fla")]))
    assert not list(changes([record()], [record(neighbour_gbps=2000.0)]))
    both = list(changes([record(), record(case=other)], [record(case=other), record()]))
    assert [c.case for c in both] == ["H96-8192-weak", "H64-8192-weak"]


def test_a_file_is_its_newest_records_and_a_run_is_its_own(tmp_path: Path) -> None:
    old, new = record(100.0), record(120.0, run="r2", utc="2026-02-01T00:00:00Z")
    path = file(tmp_path / "both.jsonl", old, new)
    assert load(path) == [new]
    assert load(f"{path}:r1") == [old]
    result = CliRunner().invoke(app, [f"{path}:r2", "--against", f"{path}:r1"])
    assert result.exit_code == 1 and "slower" in result.output


def test_what_holds_no_records(tmp_path: Path) -> None:
    path = file(tmp_path / "x.jsonl", record())
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    for text, words in (
        (f"{path}:r9", "--against must be a run in "),
        (str(tmp_path / "none.jsonl"), "--against must be a file of records, or FILE:RUN"),
        (str(tmp_path / "empty.jsonl"), "--against must be a file with records"),
    ):
        with pytest.raises(InvalidValue, match=words):
            load(text)
    with pytest.raises(BadRecord, match=r"bad\.jsonl:1"):
        load(str(tmp_path / "bad.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{file}"], "--against must be the records to compare with, or a --preset given"),
        (["{file}", "--against", "{file}", "--out", "x"], "--out must be absent beside records"),
        (["{file}", "--against", "{file}", "--impls", "fla"], "--impls must be absent beside records"),
        (["{file}", "--against", "{file}", "--neighbour"], "--neighbour must be absent beside records"),
        (["none.jsonl", "--against", "{file}"], "suite must be a file of records"),
        (["{file}", "--against", "{file}", "--cases", "zzz"], "cases must be an expression that finds one of"),
    ],
)
def test_bad_usage(arguments: list[str], words: str, tmp_path: Path) -> None:
    path = file(tmp_path / "x.jsonl", record())
    result = CliRunner().invoke(app, [a.format(file=path) for a in arguments])
    assert result.exit_code == 2 and words in result.stderr


def test_nothing_in_common_is_said(tmp_path: Path) -> None:
    old, new = file(tmp_path / "old.jsonl", record()), file(tmp_path / "new.jsonl", record(impl="fla"))
    result = CliRunner().invoke(app, [new, "--against", old])
    assert result.exit_code == 0 and "Nothing to compare" in result.output


def test_a_run_is_compared_with_records_of_before(tmp_path: Path) -> None:
    """Of a file that the run appends to, what was there before."""
    suite = tmp_path / "tiny.toml"
    suite.write_text(
        'suite = "kda-tiny"\nop = "kda"\nsamples = 25\nimpls = ["kda2:torch"]\ngates = ["weak"]\nmax_rel_err = 2e-2\n'
        '[[case]]\nheads = 1\nseqlens = [9]\nk = 16\nv = 16\ndtype = "bf16"\n'
    )
    measure = [str(suite), "--device", "cpu", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, measure).exit_code == 0
    path = tmp_path / "kda-tiny.jsonl"
    slow = BenchRecord.from_line(path.read_text()).model_copy(update={"median_us": 1e7, "driver": "570.1"})
    path.write_text(slow.line() + "\n")
    result = CliRunner().invoke(app, [*measure, "--against", str(path), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert len(document["records"]) == 1 and len(path.read_text().splitlines()) == 2
    assert [(c["verdict"], c["changed"]) for c in document["changes"]] == [("faster", {"driver": ["570.1", None]})]
    assert document["says"] == ["driver: 570.1 -> None (1 of 1)"]


def test_unchanged_kernels_in_shipped_records_differ_by_less_than_the_noise() -> None:
    """Peers of one version on one driver, in the runs of the prefill suite."""
    lines = (RECORDS / "kda-prefill.jsonl").read_text().splitlines()
    peers = [r for r in map(BenchRecord.from_line, lines) if r.source is None and r.samples >= 20]
    runs = [newest(r for r in peers if r.run == run) for run in dict.fromkeys(r.run for r in peers)]
    pairs = [c for i, old in enumerate(runs) for new in runs[i + 1 :] for c in changes(old, new)]
    same = [c for c in pairs if not set(c.changed) & {"device", "driver", "torch", "triton", "version"}]
    assert len(same) >= 60
    assert {c.verdict for c in same} == {"inconclusive"}
    spread = max(max(c.speed.value, 1 / c.speed.value) - 1 for c in same if c.speed is not None)
    assert 0.8 * RUN_NOISE < spread < RUN_NOISE
