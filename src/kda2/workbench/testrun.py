"""A test run as a record: pytest in a process of its own, counted."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import torch

import kda2
from kda2 import device
from kda2.errors import InvalidValue, KDA2Error
from kda2.workbench import files
from kda2.workbench.page import op_of
from kda2.workbench.profiler import environment
from kda2.workbench.records import TestRun

# What pytest ends with after tests have run or could not be collected; the others are no result.
_COUNTED = (0, 1, 2)


def record_tests(suite: str, arguments: Sequence[str], path: Path, quiet: bool = False) -> TestRun:
    """Run pytest with `arguments` and append what it counted to `path`; `quiet` sends what it prints to stderr.

    Raises `InvalidValue` for a suite that is not named after an op, and `OSError` for a path that takes no record,
    before anything runs; `KDA2Error` if pytest ends without a result (a crash, bad usage, no test found).
    """
    if op_of(suite) not in environment.ops():
        raise InvalidValue("suite", f"<op>-<what> for an op of {', '.join(environment.ops())}", repr(suite))
    path.parent.mkdir(parents=True, exist_ok=True)
    files.check_appendable(path)
    record = _run(suite, arguments, quiet)
    files.append_line(path, record.line())
    return record


def _run(suite: str, arguments: Sequence[str], quiet: bool) -> TestRun:
    start = time.perf_counter()
    totals = _totals(arguments, quiet)
    failed = totals["failures"] + totals["errors"]
    where = torch.device("cuda", 0) if device.gpus() else torch.device("cpu")
    return TestRun(
        run=environment.new_run(),
        utc=environment.utc_now(),
        suite=suite,
        passed=totals["tests"] - failed - totals["skipped"],
        failed=failed,
        skipped=totals["skipped"],
        seconds=round(time.perf_counter() - start, 1),
        version=kda2.__version__,
        source=environment.source_hash(op_of(suite)),
        **environment.machine(where),
    )


def _totals(arguments: Sequence[str], quiet: bool) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.xml")
        words = [sys.executable, "-m", "pytest", f"--junitxml={result}", *arguments]
        done = subprocess.run(words, check=False, stdout=sys.stderr.fileno() if quiet else None)
        if done.returncode not in _COUNTED or not result.exists():
            raise KDA2Error(f"pytest ended with {done.returncode} and no result: nothing is recorded")
        suites = list(ElementTree.parse(result).getroot().iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    totals = {name: sum(int(counted.get(name, 0)) for counted in suites) for name in names}
    if not totals["tests"]:
        raise KDA2Error("pytest ran no test: nothing is recorded")
    return totals
