"""Running a command under Nsight Compute and reading what it found."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kda2.errors import InvalidValue, KDA2Error
from kda2.workbench.profiler.ncu.model import Report
from kda2.workbench.profiler.ncu.read import pattern_of, read_report
from kda2.workbench.profiler.ncu.report_file import load_module

REPORT, LOG = "profile.ncu-rep", "ncu.log"
# How an end is asked for, and seconds until the next way: an interrupted ncu writes down what it has.
ENDING = ((signal.SIGINT, 60.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
# Where NVIDIA's packages put it, below the folder of the CUDA toolkit or its neighbours.
_FOLDERS = ("/usr/local/cuda", "/opt/cuda")
_VERSIONED = Path("/opt/nvidia/nsight-compute")
_PERMISSION = (
    "this user may not read the GPU's counters: run as root, give the container --cap-add=SYS_ADMIN, or load the "
    "driver with NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
)


class ProfilingFailed(KDA2Error, RuntimeError):
    """Nsight Compute is absent, may not count, or found no kernel; the message says what to do."""


def profile(
    command: Sequence[str],
    out: Path,
    *,
    kernels: str | None = None,
    launches: int | None = None,
    skip: int = 0,
    timeout_s: float | None = None,
    stdout: int | None = None,
) -> Report:
    """Run `command` under ncu, with every counter and at the clocks that the GPU chooses, and read the report.

    `out` is a new or an empty folder for `profile.ncu-rep` and `ncu.log`. `kernels` is a regular expression of kernel
    names; of those launches, `skip` are left out and `launches` are taken (all unless given). The command prints to the
    file descriptor `stdout`, this process's own unless given. What an interrupt or `timeout_s` ends has its report
    written first, as far as it came.

    Raises `ProfilingFailed`; `MissingExtra` without `ncu-report`; `InvalidValue` for a folder that is in use, a command
    that cannot be run and a bad expression.
    """
    load_module()  # before minutes are spent
    pattern_of(kernels)
    ncu = find_ncu()
    if not command or shutil.which(command[0]) is None:
        raise InvalidValue("COMMAND", "a program that can be run", repr(command[0]) if command else "nothing")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise InvalidValue("--out", "an empty folder, or a new one", str(out), "each profile takes one of its own")
    words = [*_words(ncu, out, kernels, launches, skip), *command]
    status = _run(words, timeout_s, stdout)
    report = out / REPORT
    if not report.exists():
        raise ProfilingFailed(_why(out / LOG, status, kernels, timeout_s))
    found = read_report(report)
    ended = f"the command was ended after {timeout_s:g} s" if status is None else f"the command ended with {status}"
    notes = found.notes if status == 0 else (*found.notes, ended)
    return found.model_copy(update={"ncu": version(ncu), "notes": notes, "command_status": status})


def find_ncu(env: Mapping[str, str] = os.environ) -> str:
    """The ncu that KDA2_NCU names, or that of PATH, CUDA_HOME, CUDA_PATH and the usual folders. Raises
    `ProfilingFailed`."""
    named = env.get("KDA2_NCU")
    if named:
        if (found := shutil.which(named)) is None:
            raise ProfilingFailed(f"KDA2_NCU must name a program that can be run, got {named!r}")
        return found
    homes = [env[name] for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    versions = sorted(_VERSIONED.glob("*"), key=_number, reverse=True)
    folders = [*(f"{home}/bin" for home in (*homes, *_FOLDERS)), *(str(folder) for folder in versions)]
    for path in (env.get("PATH"), os.pathsep.join(folders)):
        if path and (found := shutil.which("ncu", path=path)) is not None:
            return found
    raise ProfilingFailed(
        "ncu was not found in PATH, CUDA_HOME or the usual folders; install Nsight Compute (it comes with the CUDA "
        "toolkit), or name it: KDA2_NCU=/path/to/ncu"
    )


def version(ncu: str) -> str | None:
    """The version of this ncu; None if it does not say."""
    try:
        told = subprocess.run([ncu, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"Version (\S+)", told)
    return found[1] if found else None


def _number(folder: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", folder.name))


def _words(ncu: str, out: Path, kernels: str | None, launches: int | None, skip: int) -> list[str]:
    words = [
        ncu, "--clock-control", "none", "--set", "full", "--import-source", "yes", "--target-processes", "all",
        "--log-file", _literal(out / LOG), "--export", _literal(out / REPORT.removesuffix(".ncu-rep")),
    ]  # fmt: skip
    if kernels is not None:
        words += ["--kernel-name", f"regex:{kernels}"]
    if skip:
        words += ["--launch-skip", str(skip)]
    if launches is not None:
        words += ["--launch-count", str(launches)]
    return words


def _literal(path: Path) -> str:
    """A path for ncu, which takes %p, %h and the like for something else."""
    return str(path).replace("%", "%%")


def _run(words: Sequence[str], timeout_s: float | None, stdout: int | None) -> int | None:
    """The exit code, None if it took too long. In a session of its own, so that ncu and all that it started end
    together, and ncu writes its report before that."""
    with _ending_is_an_interrupt():
        child = subprocess.Popen(words, stdout=stdout, start_new_session=True)
        try:
            return child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(child)


def _end(child: subprocess.Popen[Any]) -> None:
    for sign, patience in ENDING:
        if child.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C goes on to the next
            child.wait(patience)


@contextlib.contextmanager
def _ending_is_an_interrupt() -> Iterator[None]:
    """Inside, a request to end (SIGTERM) is met like Ctrl-C, so that ncu does not go on alone."""
    if threading.current_thread() is not threading.main_thread():  # no other may set handlers
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _why(log: Path, status: int | None, kernels: str | None, timeout_s: float | None) -> str:
    """Why there is no report, from what ncu logged."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if "ERR_NVGPUCTRPERM" in text:
        return _PERMISSION
    if status is None:
        return f"nothing was profiled in {timeout_s:g} s; take fewer launches, or give it more time"
    if "No kernels were profiled" in text:
        which = "" if kernels is None else f" whose name {kernels!r} finds"
        ended = "" if status == 0 else f" (it ended with {status})"
        return f"the command{ended} launched no kernel{which} that ncu could profile"
    errors = [line.removeprefix("==ERROR==").strip() for line in text.splitlines() if line.startswith("==ERROR==")]
    return f"ncu wrote no report and ended with {status}: {'; '.join(errors) or f'see {log}'}"
