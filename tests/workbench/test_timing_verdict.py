"""What a pair of measurements allows to say, how it is recorded and shown, and what other people's criteria make of
it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from kda2 import device
from kda2.cli.bench import bench as bench_command
from kda2.errors import InvalidValue
from kda2.workbench.profiler import bench, fields, peers, presets, suites, timed
from kda2.workbench.profiler.table import call_table, results_table
from kda2.workbench.profiler.timing import Ratio, Timing
from kda2.workbench.profiler.verdict import Finding, Measured, above, invalid, judge
from kda2.workbench.records import BenchRecord

CPU = torch.device("cpu")
CASE = {"heads": 2, "k": 16, "v": 24, "dtype": "bf16", "seqlens": [20, 13], "gate": "weak"}
OTHER = "another"  # a peer that is kda2's torch under a name of its own


def measured(us: float, samples: int = 40, **more: Any) -> Measured:
    more = {"wall_us": 1e9, "sm_mhz": (1980.0, 1965.0), **more}
    impossible, burst_us = more.pop("impossible_us", None), more.pop("burst_us", None)
    return Measured(Timing((us,) * samples, (5.0,) * samples, **more), impossible, burst_us)


@pytest.mark.parametrize(
    ("own", "base", "verdict"), [(50.0, 100.0, "faster"), (100.0, 50.0, "slower"), (100.0, 100.5, "inconclusive")]
)
def test_two_valid_times_are_compared(own: float, base: float, verdict: str) -> None:
    found = judge(measured(own), measured(base), "fla")
    assert found is not None and found.speed is not None
    assert found.verdict == verdict and found.speed.value == pytest.approx(base / own)


def test_a_time_alone_has_no_verdict() -> None:
    assert judge(measured(50.0), None) is None


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"impossible_us": 51.0}, "50.0 us is below the datasheet's 51.0 us"),
        ({"host_paced": True}, "more launches than the device's queue holds: the time contains waits for the host"),
        ({"wall_us": 1000.0}, "its samples add up to more than the 0.00 s that the run took"),
        ({"sm_mhz": (1980.0, 1755.0, 1980.0)}, "the SMs' clock moved between 1755 and 1980 MHz"),
        ({"burst_us": 90.0}, "90.0 us a call back to back, where its events see 50.0 us"),
    ],
)
def test_a_time_that_is_none(more: dict[str, Any], why: str) -> None:
    assert invalid(measured(50.0)) == ""
    assert invalid(measured(50.0, **more)) == why
    assert judge(measured(50.0, **more), measured(100.0)) == Finding(f"invalid({why})")
    assert judge(measured(100.0), measured(50.0, **more), "fla") == Finding(f"invalid(fla: {why})")


@pytest.mark.parametrize(
    "more",
    [
        {"impossible_us": 50.0},
        {"wall_us": None},
        {"sm_mhz": ()},
        {"sm_mhz": (1980.0, 1830.0)},  # 8 %
        {"burst_us": 84.0},
    ],
)
def test_what_says_nothing_against_a_time(more: dict[str, Any]) -> None:
    assert invalid(measured(50.0, **more)) == ""


def test_a_burst_may_be_as_long_as_the_host_needs() -> None:
    slow_host = Timing((50.0,) * 40, (400.0,) * 40)
    assert invalid(Measured(slow_host, burst_us=500.0)) == ""
    assert "back to back" in invalid(Measured(slow_host, burst_us=700.0))


def test_errors_that_are_too_large_or_none() -> None:
    assert above({"o": 1e-3, "state": 2e-3}, 2e-3) == ""
    assert above({"o": 1e-3, "state": 3e-3}, 2e-3) == "state 3.0e-03"
    assert above({"o": float("nan")}, 2e-3) == "o nan"


def test_the_fields_of_a_timing() -> None:
    given = Timing(tuple(map(float, range(1, 102))), (5.0,) * 101)
    assert fields.times(given, 60.0, {"bytes": 51_000_000, "flops": 102_000_000}) == {
        "median_us": 51.0, "q25_us": 26.0, "q75_us": 76.0, "p95_us": None, "max_us": 101.0, "call_us": 5.0,
        "burst_us": 60.0, "gbps": 1000.0, "tflops": 2.0, "samples": 101, "host_paced": None,
    }  # fmt: skip
    two = fields.times(Timing((1.0, 9001.0), (5.0, 5.0)), None, {"bytes": 1, "flops": 1})
    assert (two["median_us"], two["q25_us"], two["q75_us"]) == (4501.0, 2251.0, 6751.0)
    one = fields.times(Timing((7.0,), (5.0,)), None, {"bytes": 1, "flops": 1})
    assert (one["median_us"], one["q25_us"], one["q75_us"], one["burst_us"]) == (7.0, 7.0, 7.0, None)


def test_clocks_are_what_was_read_and_what_the_driver_said() -> None:
    given = Timing((1.0,), (1.0,), sm_mhz=(1980.04, 1950.0, 1965.0))
    found = fields.clocks(given, {"mem_mhz": 2619.0, "slowed_by": ["power cap"]})
    assert found is not None
    assert found.model_dump(exclude_none=True) == {
        "before_mhz": 1980.0, "after_mhz": 1965.0, "low_mhz": 1950.0, "high_mhz": 1980.0, "mem_mhz": 2619.0,
        "slowed_by": ("power cap",),
    }  # fmt: skip
    assert fields.clocks(Timing((1.0,), (1.0,)), {"mem_mhz": 1.0}) is None


# Times that a run pretends to have taken: by implementation, and those of the same calls once more.
Clock = Callable[..., None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """`clock(times, again)` makes every run end with these timings; the implementations are still checked."""

    def install(times: dict[str, Timing], again: dict[str, Timing] | None = None) -> None:
        def interleave(calls: Any, samples: int, where: torch.device, neighbour: Any = None) -> dict[str, Timing]:
            return {name: (again or {})[name[:-6]] if name.endswith(" again") else times[name] for name in calls}

        monkeypatch.setattr(timed, "interleave", interleave)

    bind = peers._kda2
    monkeypatch.setitem(peers._PEERS, OTHER, ("kda2", "kda2", lambda module, problem: bind("torch", problem)))
    return install


def steady(us: float, samples: int = 40, **more: Any) -> Timing:
    return Timing((us,) * samples, (5.0,) * samples, **more)


def measure(*impls: str, limit: float = 2e-2, **plan: Any) -> tuple[list[BenchRecord], list[str]]:
    given = suites.Suite(
        suite="kda-small", op="kda", impls=impls, max_rel_err=limit, case=(CASE,), gates=("weak",), samples=3
    )
    said: list[str] = []
    records = list(bench.run(bench.Plan(given, given.case, impls, 3, CPU, **plan), said.append))
    return records, said


def test_a_run_says_who_is_faster_and_records_it(clock: Clock) -> None:
    clock({"kda2:torch": steady(50.0), OTHER: steady(100.0)})
    (own, peer), said = measure("kda2:torch", OTHER)
    assert (own.verdict, own.against) == ("faster", OTHER)
    assert own.speed is not None and own.speed.value == pytest.approx(2.0)
    assert (peer.verdict, peer.against, peer.speed) == (None, None, None)
    assert own.max_abs_err is not None and 0 < own.max_abs_err["o"] < 0.1
    assert said == [f"H2-20+13-weak-K16-V24: kda2:torch against {OTHER}: 2.000x (2.000 to 2.000), faster"]


def test_an_invalid_baseline_compares_with_nobody(clock: Clock) -> None:
    clock({"kda2:torch": steady(50.0), OTHER: steady(100.0, host_paced=True)})
    (own, peer), _ = measure("kda2:torch", OTHER)
    assert own.verdict is not None and own.verdict.startswith(f"invalid({OTHER}: more launches")
    assert peer.verdict is not None and peer.verdict.startswith("invalid(more launches")
    assert own.median_us == 50.0 and own.speed is None and peer.host_paced


def test_a_wrong_result_is_incorrect_however_fast(clock: Clock) -> None:
    clock({})
    (own,), _ = measure("kda2:torch", limit=1e-6)
    assert own.verdict is not None and own.verdict.startswith("incorrect(relative error o ")
    assert own.status.startswith("unsupported(wrong result") and own.median_us is None


def test_a_time_below_the_datasheet_is_no_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "floor_us", lambda problem, where, datasheet=False: 60.0 if datasheet else 70.0)
    clock({"kda2:torch": steady(50.0)})
    (own,), _ = measure("kda2:torch")
    assert own.status == "unsupported(invalid time: 50.0 us is below the datasheet's 60.0 us)"
    assert own.verdict == "invalid(50.0 us is below the datasheet's 60.0 us)" and own.median_us is None


def test_a_call_against_itself(clock: Clock) -> None:
    clock({"kda2:torch": steady(50.0)}, {"kda2:torch": steady(50.1)})
    (own,), _ = measure("kda2:torch", itself=True)
    assert own.itself is not None and own.itself.value == pytest.approx(50.0 / 50.1, abs=1e-4)
    assert own.verdict is None


def test_a_call_is_timed_beside_itself_in_the_same_turns() -> None:
    (own,), _ = measure("kda2:torch", itself=True)
    assert own.itself is not None and own.itself.low > 0 and own.samples == 3


# --- presets ---


def made(impl: str, **more: Any) -> BenchRecord:
    line = {
        "run": "r1", "utc": "2026-01-01T00:00:00Z", "suite": "kda-small", "case": CASE, "impl": impl,
        "median_us": 70.0, "samples": 1000, "rel_err": {"o": 2e-3}, "status": "ok", "device": "NVIDIA H200",
        "torch": "2.11.0", "version": "1",
    }  # fmt: skip
    return BenchRecord.model_validate({**line, **more})


SPEED = {"low": 1.4, "value": 1.43, "high": 1.5}
OWN = {"against": "fla", "speed": SPEED, "verdict": "faster"}


@pytest.mark.parametrize(
    ("own", "base", "answers"),
    [
        (
            {"max_abs_err": {"o": 9e-4, "state": 2e-4}, "p95_us": 70.0},
            {"p95_us": 100.0},
            ["ok (o 9.0e-04, state 2.0e-04)", "ok (70.0 us beside fla's 100.0 us)"],
        ),
        (
            {"max_abs_err": {"o": 1e-3, "state": 2e-4}, "p95_us": 71.0},
            {"p95_us": 100.0},
            ["not ok (o 1.0e-03, state 2.0e-04)", "not ok (71.0 us beside fla's 100.0 us)"],
        ),
        (
            {"samples": 999},
            {"p95_us": 100.0},
            [
                "not measured (the record has no absolute errors)",
                "not measured (p95 needs a time of both, and 1000 samples)",
            ],
        ),
    ],
)
def test_the_criteria_of_the_notes(own: dict[str, Any], base: dict[str, Any], answers: list[str]) -> None:
    records = [made("kda2:triton", **OWN, **own), made("fla", **base)]
    first, second = presets.apply("source-notes", records)
    assert list(first["criteria"].values()) == answers
    assert (first["case"], first["impl"], first["verdict"]) == (records[0].name, "kda2:triton", "faster")
    assert second["criteria"]["p95 at least 30% below the baseline's"] == "not measured (no baseline)"
    assert records[0].verdict == "faster"  # whatever the criteria say


def test_the_baseline_is_that_of_the_same_run() -> None:
    records = [made("kda2:triton", **OWN, p95_us=70.0), made("fla", p95_us=100.0, run="r2")]
    first, _ = presets.apply("source-notes", records)
    assert first["criteria"]["p95 at least 30% below the baseline's"] == "not measured (no baseline)"


def test_the_default_has_no_criteria_of_its_own() -> None:
    assert list(presets.apply("default", [made("fla")])) == []
    with pytest.raises(InvalidValue, match="--preset must be one of default, source-notes, got 'strict'"):
        presets.check("strict")


def test_a_preset_is_noted_and_changes_nothing_else(clock: Clock) -> None:
    clock({"kda2:torch": steady(50.0), OTHER: steady(100.0)})
    (plain, _), _ = measure("kda2:torch", OTHER)
    (own, _), _ = measure("kda2:torch", OTHER, preset="source-notes")
    assert (plain.preset, own.preset) == (None, "source-notes")
    same = {"preset": None, "run": "", "utc": "", "peak_bytes": None}
    assert plain.model_copy(update=same) == own.model_copy(update=same)


# --- tables and the command ---


def printed(table: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_tables_have_device_and_call_times_apart() -> None:
    own = made("kda2:triton", **OWN, p95_us=77.0, max_us=90.0, call_us=12.34, burst_us=71.0, floor_us=35.0)
    base = made("fla", median_us=100.0, samples=999, max_us=150.0, call_us=50.0, host_paced=True)
    device_times = printed(results_table([own, base], ["kda2:triton", "fla"]))
    for text in ("70.0 us 1.43x", "faster", "p95/p50 1.10", "50% of the ceiling", "100.0 us", "max/p50 1.50"):
        assert text in device_times
    calls = printed(call_table([own, base], ["kda2:triton", "fla"]))
    assert "12.3 us, burst 71.0 us" in calls and "50.0 us, paced by the host" in calls
    assert call_table([replace_times(own)], ["kda2:triton"]) is None


def replace_times(r: BenchRecord) -> BenchRecord:
    return r.model_copy(update={"call_us": None})


app = typer.Typer()
app.command()(bench_command)
TINY = """
suite = "kda-tiny"
op = "kda"
samples = 2
impls = ["kda2:torch", "another"]
gates = ["weak"]
max_rel_err = 2e-2

[[case]]
heads = 1
seqlens = [9]
k = 16
v = 16
dtype = "bf16"
"""


def command(folder: Path, *options: str) -> Any:
    suite = folder / "tiny.toml"
    suite.write_text(TINY)
    return CliRunner().invoke(app, [str(suite), "--device", "cpu", "--out", str(folder / "out"), *options])


def test_the_command_applies_a_preset(clock: Clock, tmp_path: Path) -> None:
    clock({"kda2:torch": steady(50.0, 1000), OTHER: steady(100.0, 1000)})
    result = command(tmp_path, "--preset", "source-notes", "--impls", f"torch,{OTHER}", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (own, _) = document["criteria"]
    assert document["preset"] == "source-notes" and own["verdict"] == "faster"
    assert own["criteria"]["p95 at least 30% below the baseline's"] == f"ok (50.0 us beside {OTHER}'s 100.0 us)"
    assert own["criteria"]["largest absolute error below 1e-03"].startswith("not ok (o ")
    assert [r["status"] for r in document["records"]] == ["ok", "ok"]


def test_criteria_are_applied_to_records_of_before(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text(made("kda2:triton", max_abs_err={"o": 5e-4}).line() + "\n")
    result = CliRunner().invoke(app, [str(path), "--preset", "source-notes", "--json"])
    assert result.exit_code == 0, result.output
    ((row,), preset) = (json.loads(result.stdout)[name] for name in ("criteria", "preset"))
    assert preset == "source-notes"
    assert row["criteria"]["largest absolute error below 1e-03"] == "ok (o 5.0e-04)"


@pytest.mark.parametrize(("again", "code"), [(100.5, 0), (103.0, 1)])
def test_a_difference_to_itself_fails(again: float, code: int, clock: Clock, tmp_path: Path) -> None:
    clock({"kda2:torch": steady(100.0)}, {"kda2:torch": steady(again)})
    result = command(tmp_path, "--itself", "--impls", "torch")
    assert result.exit_code == code, result.output
    assert "A/A" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--neighbour"], "--neighbour must be absent on the CPU"),
        (["--cold", "--itself"], "--cold must be without --itself and --neighbour"),
        (["--preset", "strict"], "--preset must be one of default, source-notes"),
        (["--against", "none.jsonl"], "--against must be a file of records, or FILE:RUN, got 'none.jsonl'"),
    ],
)
def test_bad_usage(options: list[str], words: str, tmp_path: Path) -> None:
    result = command(tmp_path, *options)
    assert result.exit_code == 2 and words in result.stderr
    assert not (tmp_path / "out").exists()


def test_records_need_a_folder(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    result = CliRunner().invoke(app, [str(tmp_path / "tiny.toml"), "--device", "cpu"])
    assert result.exit_code == 2 and "--out must be a folder for the records" in result.stderr


# --- the neighbour's kernel, for GPUs that are not here ---


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.skipif(device.interpreted(), reason="the interpreter compiles nothing")
def test_the_neighbour_compiles_and_spills_nothing(arch: int) -> None:
    from kda2.backends.triton.build import build
    from kda2.workbench.profiler.neighbour import copies

    x = torch.empty(8192 * 64, dtype=torch.int32, device="meta")
    built = build(copies(x, x, 100, 66), arch)
    assert built.spills == 0 and built.shared == 0
    assert "ld.global.v4.b32" in built.ptx and "st.global.v4.b32" in built.ptx


@pytest.mark.interpreter
def test_the_neighbour_copies() -> None:
    from kda2.workbench.profiler.neighbour import copies

    source = torch.arange(8192 * 5, dtype=torch.int32)
    target = torch.zeros_like(source)
    copies(source, target, 2, 3).run()
    assert torch.equal(source, target)


def test_a_ratio_is_recorded_in_four_digits() -> None:
    assert fields.speed(None) is None
    found = fields.speed(replace(Ratio(1.0, 1.0, 1.0, 20), low=0.99996, high=1.23456))
    assert found is not None and (found.low, found.value, found.high) == (1.0, 1.0, 1.2346)
