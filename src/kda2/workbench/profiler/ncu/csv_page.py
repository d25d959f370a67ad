"""Reading the raw page that `ncu --csv --page raw` prints: a header row, a units row, one row per launch."""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from kda2.errors import InvalidValue
from kda2.workbench.profiler.ncu import units
from kda2.workbench.profiler.ncu.model import Dim3, KernelProfile, Report

HOW = "make one with: ncu --import FILE.ncu-rep --csv --page raw > FILE.csv"
_WANTED = "a report of Nsight Compute, .ncu-rep or the CSV of its raw page"
_KEYS = {"ID", "Kernel Name"}
_DELIMITERS = ",;\t"
_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
# Quantities that come at several scales, by name: without units nothing tells which.
_SCALED_NAME = re.compile(r"duration|bytes|per_second|shared_mem|_size_bytes|cache_size|_time\b")


@dataclass
class _Table:
    """A header, the units below it (None if there are none), and the rows of launches."""

    header: list[str]
    units: list[str] | None = None
    rows: list[list[str]] = field(default_factory=list)


def parse(data: bytes, source: str) -> Report:
    """The report in `data`, the bytes of a CSV file called `source`. Raises `InvalidValue` for what is no raw page."""
    notes: list[str] = []
    tables = _tables(_lines(data), notes)
    decimal = units.decimal_sign(chain.from_iterable(_metric_cells(table) for table in tables))
    kernels = [_kernel(table, row, decimal) for table in tables for row in table.rows]
    if not kernels:
        raise _not_a_report("a page without a launch", *notes)
    if any(table.units is None for table in tables):
        notes.append("the file has no units row: times, bytes and rates are n/a")
    kernels = [kernel.model_copy(update={"launch": i}) for i, kernel in enumerate(kernels)]
    return Report(source=source, kernels=tuple(kernels), notes=tuple(notes))


def _not_a_report(got: str, *notes: str) -> InvalidValue:
    return InvalidValue("FILE", _WANTED, got, "; ".join((*notes, HOW)))


def _lines(data: bytes) -> list[str]:
    if not data.strip():
        raise _not_a_report("an empty file")
    encoding = next((name for bom, name in _BOMS.items() if data.startswith(bom)), "utf-8")
    text = data.decode(encoding, errors="replace")
    if "\0" in text:
        raise _not_a_report("a binary file")
    return text.splitlines()


def _tables(lines: Sequence[str], notes: list[str]) -> list[_Table]:
    start, delimiter = _header(lines)
    tables: list[_Table] = []
    try:
        for row in csv.reader(lines[start:], delimiter=delimiter):
            if any(row) and not row[0].startswith("=="):
                _add(tables, [cell.strip() for cell in row], notes)
    except csv.Error as e:
        raise _not_a_report(f"CSV that cannot be read ({e})") from e
    return tables


def _header(lines: Sequence[str]) -> tuple[int, str]:
    """The line that the table begins at, and what separates its cells."""
    for i, line in enumerate(lines):
        for delimiter in _DELIMITERS if "Kernel Name" in line else "":
            cells = {cell.strip(' "') for cell in line.split(delimiter)}  # names have none of these inside
            if cells >= _KEYS:
                _check_page(cells)
                return i, delimiter
    raise _not_a_report("a file without a header row with ID and Kernel Name")


def _check_page(cells: set[str]) -> None:
    if "Metric Name" in cells:
        raise _not_a_report("the details page")
    if not any("__" in cell for cell in cells):
        raise _not_a_report("a page without metrics")


def _add(tables: list[_Table], row: list[str], notes: list[str]) -> None:
    """Put a row where it belongs. Several processes may print a table each."""
    if set(row) >= _KEYS:
        tables.append(_Table(row))
        return
    table = tables[-1]
    if not table.rows and table.units is None and _is_units(row, table.header):
        table.units = [""] * (len(table.header) - len(row)) + row  # what is missing is missing before the metrics
    elif len(row) != len(table.header):
        notes.append(f"a row of {len(row)} cells below a header of {len(table.header)} was left out")
    else:
        table.rows.append(row)


def _is_units(row: list[str], header: list[str]) -> bool:
    """Whether no cell of a row is a number, and one is the unit of something."""
    known = {"%", "inst", "cycle", "byte", "warp", "sector", "register/thread"}
    return (
        len(row) <= len(header)
        and not any(units.number(cell) is not None for cell in row)
        and any(cell in known or units.is_scaled(cell) for cell in row)
    )


def _kernel(table: _Table, row: Sequence[str], decimal: str) -> KernelProfile:
    cells = dict(zip(table.header, row, strict=True))
    metrics, names = {}, {}
    for name, value, unit in _numbers(table, row, decimal):
        metrics[name], names[name] = units.normal(value, unit)
    return KernelProfile(
        launch=0,
        name=cells["Kernel Name"],
        grid=_dim3(cells.get("Grid Size", "")),
        block=_dim3(cells.get("Block Size", "")),
        device=cells.get("device__attribute_display_name") or None,
        cc=cells.get("CC", "").replace(",", ".") or None,
        metrics=metrics,
        units=names,
    )


def _numbers(table: _Table, row: Sequence[str], decimal: str) -> Iterator[tuple[str, float, str]]:
    for name, text, unit in zip_longest(table.header, row, table.units or (), fillvalue=""):
        value = units.number(text, decimal) if _is_metric(name) else None
        if value is not None and (table.units is not None or not _SCALED_NAME.search(name)):
            yield name, value, unit


def _metric_cells(table: _Table) -> Iterator[str]:
    for row in table.rows:
        yield from (cell for name, cell in zip(table.header, row, strict=True) if _is_metric(name))


def _is_metric(column: str) -> bool:
    """Metrics have an underscore in their names, the columns of the launch itself have spaces."""
    return "_" in column


def _dim3(text: str) -> Dim3 | None:
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    return (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else None
