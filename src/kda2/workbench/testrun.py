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
from kda2.errors import KDA2Error
from kda2.workbench.page import op_of
from kda2.workbench.profiler import environment
from kda2.workbench.records import TestRun


def run_tests(suite: str, arguments: Sequence[str]) -> TestRun:
    """Run pytest with `arguments` and count. Raises `KDA2Error` if it ends without a result (a crash, bad usage)."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.xml")
        done = subprocess.run([sys.executable, "-m", "pytest", f"--junitxml={result}", *arguments], check=False)
        if not result.exists():
            raise KDA2Error(f"pytest ended with {done.returncode} and no result")
        suites = ElementTree.parse(result).getroot().iter("testsuite")
        totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        for counted in suites:
            totals = {name: n + int(counted.get(name, 0)) for name, n in totals.items()}
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


def append(record: TestRun, path: Path) -> Path:
    """Add the record to a file of them; returns the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as f:
        f.write(record.line() + "\n")
    return path
