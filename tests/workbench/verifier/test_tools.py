"""L5 and L7: children that run under NVIDIA's tools, and what these write down. Scripts stand in for the tools: they
run the rest of their arguments and write a log."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kda2.workbench.verifier import Children, Subject, counters, sanitizer
from kda2.workbench.verifier.words import reasons

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
READ = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at kda_step+0x4d0 in step.py:31
=========     by thread (32,0,0) in block (1,0,0)
=========     Access at 0x7f2a4ba00200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2a4ba00000 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x2b8f3e] in libcuda.so.1
=========
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) on CUDA API call to cuEventQuery.
=========     Saved host backtrace up to driver entry point at error
=========
========= ERROR SUMMARY: 2 errors
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at kda_solve+0x120
=========     and Read access at kda_solve+0x260 [16 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
NO_RACE = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
UNSUPPORTED = "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to the documentation.\n"


# What logs say.


@pytest.mark.parametrize("end", ["\n", " \n"])
def test_errors_are_counted_and_told_one_by_one(end: str) -> None:
    found = sanitizer._read(READ.replace("=========\n", f"========={end}"), "")
    assert found["errors"] == 2 and len(found["reports"]) == 2
    assert found["says"] == (
        "Invalid __global__ read of size 4 bytes; at kda_step+0x4d0 in step.py:31; "
        "by thread (32,0,0) in block (1,0,0); Access at 0x7f2a4ba00200 is out of bounds"
    )
    assert found["reports"][1].startswith("Program hit CUDA_ERROR_LAUNCH_FAILED (error 719)")


@pytest.mark.parametrize("report", [CLEAN, NO_RACE])
def test_a_clean_log(report: str) -> None:
    assert sanitizer._read(report, "") == {"errors": 0, "says": "", "reports": []}


def test_hazards_are_errors() -> None:
    found = sanitizer._read(RACE, "")
    assert found["errors"] == 1 and found["reports"] == [
        "Error: Race reported between Write access at kda_solve+0x120; and Read access at kda_solve+0x260 [16 hazards]"
    ]


def test_summaries_of_several_processes_add_up() -> None:
    assert sanitizer._read(READ + CLEAN + READ, "")["errors"] == 4


@pytest.mark.parametrize(
    ("report", "said", "says"),
    [
        ("", "", "it wrote no summary"),
        ("", "it left with exit code 1", "it left with exit code 1"),
        (UNSUPPORTED, "", "Error: Device not supported. Please refer to the documentation."),
    ],
)
def test_a_log_without_a_summary_says_nothing_of_errors(report: str, said: str, says: str) -> None:
    found = sanitizer._read(report, said)
    assert (found["errors"], found["says"]) == (None, says)


# The whole way.

Tool = Callable[..., Path]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Puts a script on PATH that runs its command, then writes a log; without `runs` it leaves with 1 instead."""

    def put(name: str, log: str, runs: bool = True) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "said").write_text(log)
        script = folder / name
        script.write_text(f"""#!/bin/sh
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> "{folder}/called"
while [ "$1" != "{sys.executable}" ]; do
    if [ "$1" = --log-file ]; then log="$2"; fi
    shift
done
{'"$@"' if runs else "false"}
code=$?
cp "{folder}/said" "$log"
exit $code
""")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("KDA2_NCU", raising=False)
        return folder

    return put


SMALL = "    assert q.shape[1] <= 70 or cu_seqlens is not None\n"
FIRST = "    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]\n"


@pytest.fixture
def checked(shared: Any, plain: str, changed: Callable[..., str], conditions: Callable[..., Any]) -> Callable[..., Any]:
    """L5 of the plain kernel with lines put first in its `run`."""

    def check(lines: str = "", tools: tuple[str, ...] = ("memcheck",)) -> Any:
        path = shared.file(changed(plain, FIRST, lines + FIRST))
        on = conditions(families=("random", "one_token", "ragged"), sizes={"T": 90, "H": 1, "HV": 1, "K": 8, "V": 8})
        return sanitizer.check(Children(), Subject.of_file(path), on, tools)

    return check


def test_a_clean_kernel_passes(tool: Tool, checked: Callable[..., Any]) -> None:
    folder = tool("compute-sanitizer", CLEAN)
    verdict = checked(SMALL)
    assert (verdict.stage, verdict.outcome) == ("L5", "pass"), reasons(verdict)
    assert verdict.evidence["probes"] == ["random", "ragged"] and verdict.evidence["tools"]["memcheck"]["errors"] == 0
    assert (folder / "called").read_text().startswith("1 --tool memcheck --log-file ")


def test_a_kernel_that_reads_too_far_fails(tool: Tool, checked: Callable[..., Any]) -> None:
    tool("compute-sanitizer", READ)
    verdict = checked()
    assert verdict.outcome == "fail" and verdict.evidence["gate"] == "memory"
    assert reasons(verdict)[0].startswith("memcheck: Invalid __global__ read of size 4 bytes; at kda_step+0x4d0")


def test_every_tool_is_asked(tool: Tool, checked: Callable[..., Any]) -> None:
    folder = tool("compute-sanitizer", RACE)
    verdict = checked(tools=("synccheck", "racecheck"))
    assert verdict.outcome == "fail" and list(verdict.evidence["tools"]) == ["synccheck", "racecheck"]
    assert [line.split()[2] for line in (folder / "called").read_text().splitlines()] == ["synccheck", "racecheck"]


def test_a_device_that_is_not_supported_is_no_verdict(tool: Tool, checked: Callable[..., Any]) -> None:
    tool("compute-sanitizer", UNSUPPORTED)
    outcome = checked().outcome
    assert outcome.startswith("not_run(memcheck: Error: Device not supported.")


def test_no_summary_is_inconclusive(tool: Tool, checked: Callable[..., Any]) -> None:
    tool("compute-sanitizer", "")
    verdict = checked()
    assert verdict.outcome == "inconclusive" and reasons(verdict)[0] == "memcheck: it wrote no summary"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("    import os; os._exit(3)\n", "it left with exit code 3"),
        ("    raise NotImplementedError('not beside a checker')\n", "NotImplementedError: not beside a checker"),
    ],
)
def test_no_errors_where_nothing_ran_is_no_pass(tool: Tool, checked: Callable[..., Any], line: str, says: str) -> None:
    tool("compute-sanitizer", CLEAN)
    verdict = checked(line)
    assert verdict.outcome != "pass" and says in reasons(verdict)[0]


def test_a_checker_that_does_not_start_is_no_verdict(tool: Tool, checked: Callable[..., Any]) -> None:
    tool("compute-sanitizer", "========= Error: Unable to find injection library libsanitizer-collection.so\n", False)
    assert checked().outcome.startswith("not_run(memcheck: ")


def test_no_checker_is_not_run(monkeypatch: pytest.MonkeyPatch, checked: Callable[..., Any]) -> None:
    monkeypatch.setattr(sanitizer, "find", lambda: None)
    assert checked().outcome == "not_run(compute-sanitizer is not here; it comes with CUDA, put it on PATH)"


def test_the_checker_is_found_on_the_path_or_beside_cuda(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tool("compute-sanitizer", CLEAN)
    assert sanitizer.find() == str(folder / "compute-sanitizer")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitizer.find() == str(folder / "compute-sanitizer")


@pytest.fixture
def counted(shared: Any, plain: str, conditions: Callable[..., Any]) -> Callable[[], Any]:
    pytest.importorskip("ncu_report")
    subject = Subject.of_file(shared.file(plain))
    return lambda: counters.profile(Children(), subject, conditions(sizes={"T": 9, "H": 1, "HV": 1, "K": 8, "V": 8}))


def test_counters_without_a_report_are_not_run(tool: Tool, counted: Callable[[], Any]) -> None:
    folder = tool("ncu", "==PROF== Connected\n==WARNING== No kernels were profiled.\n")
    verdict = counted()
    assert verdict.stage == "L7" and verdict.outcome.startswith("not_run(no counters: ")
    called = (folder / "called").read_text().split()
    assert "--profile-from-start off" in " ".join(called) and "--export" in called


def test_a_profiler_that_does_not_start_is_told_by_its_last_line(tool: Tool, counted: Callable[[], Any]) -> None:
    tool("ncu", "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n", False)
    assert "==ERROR== ERR_NVGPUCTRPERM - no permission" in counted().outcome


def test_no_profiler_is_not_run(monkeypatch: pytest.MonkeyPatch, counted: Callable[[], Any]) -> None:
    monkeypatch.setenv("KDA2_NCU", "no-such-program")
    assert counted().outcome == "not_run(KDA2_NCU must name a program that can be run, got 'no-such-program')"
