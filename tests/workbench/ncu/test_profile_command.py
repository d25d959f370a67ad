"""`kda2 profile`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kda2.cli import profile as module
from kda2.cli.profile import app
from kda2.workbench.profiler import ncu
from kda2.workbench.profiler.ncu import ProfilingFailed, Report

FILE = str(Path(__file__).parent / "data" / "h200_raw.csv")
runner = CliRunner()


def invoke(*words: str) -> Result:
    return runner.invoke(app, list(words))


def test_import_says_figures_and_findings() -> None:
    result = invoke("import", FILE)
    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (0, "")
    assert "0: _flash_kda_fwd_prepare, grid 64x96x1, block 256x1x1" in result.stdout
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    figures = [(row[i], row[i + 1]) for row in cells for i in (0, 2)]
    assert figures.count(("L1 hit rate", "n/a")) == 1 and ("L1 hit rate", "96.777 %") in figures
    assert {("duration", "90.528 us"), ("duration", "113.47 us"), ("number of warp instructions", "29,994,504")} <= {
        *figures
    }
    assert "  high  memory throughput is 74.76 %, above 60. It is bound by memory, most of all by L2." in result.stdout
    assert "n/a, so what they would show is not known" not in result.stdout


def test_import_as_json() -> None:
    result = invoke("import", FILE, "--json", "--kernels", "recurrence", "--gates", "source-notes")
    found = json.loads(result.stdout)
    (kernel,) = found["kernels"]
    assert (result.exit_code, found["device"], kernel["launch"], kernel["bound"]) == (1, "NVIDIA H200", 1, "latency")
    gates = found["gates"]
    assert (gates["preset"], gates["max_error"], gates["p95_gain"]) == ("source-notes", 1e-3, 30)
    assert [(r["figure"], r["outcome"], "value" in r) for r in gates["results"]] == [
        ("l1_hits", "n/a", False), ("occupancy", "not ok", True), ("tensor", "not ok", True),
        ("shared_share", "ok", True),
    ]  # fmt: skip


def test_gates_are_a_check() -> None:
    passed = invoke("import", FILE, "--kernels", "recurrence", "--gates", "default")
    failed = invoke("import", FILE, "--kernels", "prepare", "--gates", "default")
    notes = invoke("import", FILE, "--gates", "source-notes")
    assert (passed.exit_code, failed.exit_code, notes.exit_code) == (0, 1, 1)
    assert "a maximum error below 0.001 against fp64" in notes.stdout
    assert "a p95 at least 30 % below the baseline's" in notes.stdout
    assert "wanted as well" not in failed.stdout


def test_what_was_not_collected_is_said(tmp_path: Path) -> None:
    file = tmp_path / "few.csv"
    file.write_text('"ID","Kernel Name","smsp__inst_executed.sum"\n"","","inst"\n"0","k[red]","5"\n')
    result = invoke("import", str(file))
    assert result.exit_code == 0
    assert "0: k[red]" in result.stdout
    assert "counters are n/a, so what they would show is not known: gpu__time_duration.sum" in result.stdout
    assert "nothing found" not in result.stdout


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["import", "nowhere.csv"], 1, "No such file or directory: nowhere.csv"),
        (["import", FILE, "--kernels", "gemm"], 2, "--kernels must be an expression that finds one of"),
        (["import", FILE, "--gates", "mine"], 2, "--gates must be one of default, source-notes, got 'mine'"),
        (["run", "--timeout", "soon", "--", "true"], 2, "--timeout must be a time such as 90s, 10m or 1h"),
        (["run", "--gates", "mine", "--", "true"], 2, "--gates must be one of"),
    ],
)
def test_mistakes_are_one_line(words: list[str], code: int, says: str) -> None:
    result = invoke(*words)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (code, "", 1)
    assert says in result.stderr


def test_a_file_that_is_no_report(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    result = invoke("import", str(tmp_path / "x.csv"))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--csv --page raw" in result.stderr


def test_run_hands_on_what_it_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: Report) -> None:
    calls: list[Any] = []

    def profile(words: list[str], out: Path, **options: Any) -> Report:
        calls.append((words, out, options))
        return measured.model_copy(update={"command_status": 3, "notes": ("the command ended with 3",)})

    monkeypatch.setattr(ncu, "profile", profile)
    monkeypatch.chdir(tmp_path)
    result = invoke(
        "run", "--kernels", "kda_", "--launches", "2", "--skip", "1", "--timeout", "2m", "--", "python", "x.py"
    )
    assert "note: the command ended with 3" in result.stdout
    as_json = invoke("run", "--out", "here", "--json", "--", "python")
    assert (result.exit_code, as_json.exit_code, json.loads(as_json.stdout)["command_status"]) == (1, 1, 3)
    (words, out, options), (_, here, quiet) = calls
    assert words == ["python", "x.py"]
    assert (out.parent, here) == (Path("runs/profile"), Path("here"))
    assert options == {"kernels": "kda_", "launches": 2, "skip": 1, "timeout_s": 120.0, "stdout": None}
    assert quiet["stdout"] == 2


def test_run_without_ncu(monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(*_: Any, **__: Any) -> Report:
        raise ProfilingFailed("ncu was not found")

    monkeypatch.setattr(ncu, "profile", profile)
    result = invoke("run", "--", sys.executable, "-V")
    assert (result.exit_code, result.stderr) == (1, "kda2: ncu was not found\n")


def test_an_interrupt_names_what_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def profile(words: list[str], out: Path, **_: Any) -> Report:
        out.mkdir()
        (out / module.REPORT).write_bytes(b"NVR\0")
        raise KeyboardInterrupt

    monkeypatch.setattr(ncu, "profile", profile)
    result = invoke("run", "--out", str(tmp_path / "out"), "--", "true")
    assert result.exit_code == 130
    assert "profile.ncu-rep: kda2 profile import reads it" in result.stderr.replace("\n", " ")
