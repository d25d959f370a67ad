"""Driving ncu, with a program in its place that logs and writes what a test wants."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kda2.errors import InvalidValue, MissingExtra
from kda2.workbench import extras
from kda2.workbench.profiler.ncu import ProfilingFailed, drive, profile
from kda2.workbench.profiler.ncu.drive import find_ncu, version

METRICS = {"gpu__time_duration.sum": (1500.0, "ns")}
# It takes its options as ncu does, runs the command, and writes what stands in `plan.json` beside it.
FAKE = """#!{python}
import json, pathlib, signal, subprocess, sys
here = pathlib.Path(__file__).parent
if sys.argv[1:] == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 36398880) (public-release)")
    sys.exit(0)
words = sys.argv[1:]
options = {{}}
while words[0].startswith("--"):
    option = words.pop(0)
    options[option] = words.pop(0)
(here / "options.json").write_text(json.dumps(options))
plan = json.loads((here / "plan.json").read_text())
child = subprocess.Popen(words)
try:
    status = child.wait()
except KeyboardInterrupt:
    status = child.wait()
pathlib.Path(options["--log-file"].replace("%%", "%")).write_text(plan["log"])
if plan["report"]:
    pathlib.Path(options["--export"].replace("%%", "%") + ".ncu-rep").write_bytes(b"NVR\\0")
sys.exit(status)
"""
Plan = Callable[..., Path]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """`plan(report=..., log=...)`: what the ncu that KDA2_NCU names will do; its folder."""

    def write(report: bool = True, log: str = "==PROF== Report written\n") -> Path:
        folder = tmp_path / "tools"
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps({"report": report, "log": log}))
        (folder / "ncu").write_text(FAKE.format(python=sys.executable))
        (folder / "ncu").chmod(0o755)
        monkeypatch.setenv("KDA2_NCU", str(folder / "ncu"))
        return folder

    return write


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_command_is_profiled(plan: Plan, tmp_path: Path, fake_ncu_report: list[Any], action: Any) -> None:
    tools = plan()
    fake_ncu_report.append(action("kda_prepare", METRICS))
    report = profile(command("print('ran')"), tmp_path / "50%", kernels="kda_", launches=2, skip=1)
    assert [(k.name, k.duration_us) for k in report.kernels] == [("kda_prepare", 1.5)]
    assert (report.ncu, report.command_status, report.notes) == ("2025.3.1.0", 0, ())
    assert report.source == str(tmp_path / "50%" / "profile.ncu-rep")
    assert json.loads((tools / "options.json").read_text()) == {
        "--clock-control": "none", "--set": "full", "--import-source": "yes", "--target-processes": "all",
        "--log-file": str(tmp_path / "50%%" / "ncu.log"), "--export": str(tmp_path / "50%%" / "profile"),
        "--kernel-name": "regex:kda_", "--launch-skip": "1", "--launch-count": "2",
    }  # fmt: skip


def test_a_command_that_fails_is_profiled_all_the_same(
    plan: Plan, tmp_path: Path, fake_ncu_report: list[Any], action: Any
) -> None:
    plan()
    fake_ncu_report.append(action("k", METRICS))
    report = profile(command("raise SystemExit(3)"), tmp_path / "out")
    assert (len(report.kernels), report.command_status, report.notes) == (1, 3, ("the command ended with 3",))


@pytest.mark.parametrize(
    ("log", "kernels", "says"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", None, "--cap-add=SYS_ADMIN"),
        ("==WARNING== No kernels were profiled.", None, "launched no kernel that ncu could profile"),
        ("==WARNING== No kernels were profiled.", "gemm", "launched no kernel whose name 'gemm' finds"),
        ("==PROF== a\n==ERROR== Unknown Error on device 0.\n", None, "ended with 0: Unknown Error on device 0."),
        ("", None, "see .*ncu.log"),
    ],
)
def test_why_there_is_no_report(
    plan: Plan, tmp_path: Path, fake_ncu_report: list[Any], log: str, kernels: str | None, says: str
) -> None:
    plan(report=False, log=log)
    with pytest.raises(ProfilingFailed, match=says):
        profile(command("pass"), tmp_path / "out", kernels=kernels)


def test_time_that_runs_out_leaves_what_there_is(
    plan: Plan, tmp_path: Path, fake_ncu_report: list[Any], action: Any
) -> None:
    plan()
    fake_ncu_report.append(action("k", METRICS))
    start = time.monotonic()
    report = profile(command("import time; time.sleep(600)"), tmp_path / "out", timeout_s=1.5)
    assert time.monotonic() - start < 60
    assert (report.command_status, report.notes) == (None, ("the command was ended after 1.5 s",))


def test_time_that_runs_out_before_anything(plan: Plan, tmp_path: Path, fake_ncu_report: list[Any]) -> None:
    plan(report=False, log="")
    with pytest.raises(ProfilingFailed, match="nothing was profiled in 1 s"):
        profile(command("import time; time.sleep(600)"), tmp_path / "out", timeout_s=1)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_and_leaves_the_report(
    plan: Plan, tmp_path: Path, fake_ncu_report: list[Any], sign: signal.Signals
) -> None:
    plan()
    child = tmp_path / "child"
    code = f"import os, pathlib, time; pathlib.Path({str(child)!r}).write_text(str(os.getpid())); time.sleep(600)"

    def interrupt() -> None:
        while not child.exists() or not child.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), sign)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        profile(command(code), tmp_path / "out")
    thread.join()
    assert (tmp_path / "out" / "profile.ncu-rep").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), 0)


def test_what_ignores_requests_is_killed(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "ENDING", tuple((sign, 0.2) for sign, _ in drive.ENDING))
    stubborn = "import signal, time\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(600)"
    child = subprocess.Popen(command(stubborn), start_new_session=True)
    time.sleep(1)
    drive._end(child)
    assert child.returncode == -signal.SIGKILL


def test_a_folder_in_use_is_refused(plan: Plan, tmp_path: Path, fake_ncu_report: list[Any]) -> None:
    plan()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "profile.ncu-rep").write_bytes(b"of before")
    with pytest.raises(InvalidValue, match="--out must be an empty folder, or a new one"):
        profile(command("pass"), tmp_path / "out")
    assert (tmp_path / "out" / "profile.ncu-rep").read_bytes() == b"of before"


@pytest.mark.parametrize("words", [[], ["no-such-program-anywhere"]])
def test_a_command_that_cannot_be_run(plan: Plan, tmp_path: Path, fake_ncu_report: list[Any], words: list[str]) -> None:
    plan()
    with pytest.raises(InvalidValue, match="COMMAND must be a program that can be run"):
        profile(words, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bad_expression_costs_no_run(plan: Plan, tmp_path: Path, fake_ncu_report: list[Any]) -> None:
    plan()
    with pytest.raises(InvalidValue, match="--kernels must be a regular expression"):
        profile(command("pass"), tmp_path / "out", kernels="(")
    assert not (tmp_path / "out").exists()


def test_without_the_package_nothing_is_run(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan()

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name, name=name)

    monkeypatch.setattr(extras, "import_module", missing)
    with pytest.raises(MissingExtra, match="ncu_report"):
        profile(command("pass"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_where_ncu_is_looked_for(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = plan() / "ncu"
    home = tmp_path / "cuda" / "bin"
    home.mkdir(parents=True)
    (home / "ncu").symlink_to(named)
    monkeypatch.setattr(drive, "_FOLDERS", ())
    monkeypatch.setattr(drive, "_VERSIONED", tmp_path / "versions")
    assert find_ncu({"KDA2_NCU": str(named), "PATH": str(home)}) == str(named)
    assert find_ncu({"PATH": str(home)}) == str(home / "ncu")
    assert find_ncu({"PATH": "", "CUDA_HOME": str(home.parent)}) == str(home / "ncu")
    with pytest.raises(ProfilingFailed, match="KDA2_NCU=/path/to/ncu"):
        find_ncu({"PATH": str(tmp_path)})
    with pytest.raises(ProfilingFailed, match="KDA2_NCU must name a program that can be run, got 'gone'"):
        find_ncu({"KDA2_NCU": "gone", "PATH": str(home)})
    for name in ("2024.3.2", "2025.10.0", "2025.3.1"):
        (tmp_path / "versions" / name).mkdir(parents=True)
        (tmp_path / "versions" / name / "ncu").symlink_to(named)
    assert find_ncu({}) == str(tmp_path / "versions" / "2025.10.0" / "ncu")


def test_a_version_that_is_not_told(tmp_path: Path) -> None:
    assert version(str(tmp_path / "gone")) is None
    assert version(sys.executable) is None
