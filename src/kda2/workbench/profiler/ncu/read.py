"""Reading a report, whatever file it is in."""

from __future__ import annotations

import re
from pathlib import Path

from kda2.errors import InvalidValue
from kda2.workbench.profiler.ncu import csv_page, report_file
from kda2.workbench.profiler.ncu.model import Report


def read_report(path: Path, kernels: str | None = None) -> Report:
    """The report in `path`, a .ncu-rep file or the CSV of its raw page; of the kernels whose names the regular
    expression `kernels` finds, if given.

    Raises `InvalidValue` for what is no report, and for an expression that finds nothing; `MissingExtra` for a .ncu-rep
    without `ncu-report`; `OSError` for a file that cannot be read.
    """
    pattern = pattern_of(kernels)
    with path.open("rb") as file:
        magic = file.read(len(report_file.MAGIC))
    if magic == report_file.MAGIC or (path.suffix == ".ncu-repz" and magic):
        report = report_file.load(path)
    elif path.suffix in (".ncu-rep", ".ncu-repz"):
        raise InvalidValue("FILE", "a report of Nsight Compute", f"{path.name}, which is empty or something else")
    else:
        report = csv_page.parse(path.read_bytes(), str(path))
    return report if pattern is None else _matching(report, pattern)


def pattern_of(expression: str | None) -> re.Pattern[str] | None:
    """The expression of --kernels, compiled. Raises `InvalidValue`."""
    try:
        return None if expression is None else re.compile(expression)
    except re.error as e:
        raise InvalidValue("--kernels", "a regular expression", repr(expression), str(e)) from e


def _matching(report: Report, pattern: re.Pattern[str]) -> Report:
    found = tuple(kernel for kernel in report.kernels if pattern.search(kernel.name))
    if not found:
        names = ", ".join(dict.fromkeys(kernel.short_name for kernel in report.kernels))
        raise InvalidValue("--kernels", f"an expression that finds one of {names}", repr(pattern.pattern))
    return report.model_copy(update={"kernels": found})
