"""The table a person reads while a suite runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from kda2.workbench.profiler.suites import case_name
from kda2.workbench.records import BenchRecord


def baseline(records: Sequence[BenchRecord], order: Sequence[str]) -> str | None:
    """The first implementation in `order` that is not kda2's own and was measured; ratios are to it."""
    measured = {r.impl for r in records if r.status == "ok"}
    return next((name for name in order if name in measured and not name.startswith("kda2:")), None)


def results_table(records: Sequence[BenchRecord], order: Sequence[str]) -> Table:
    """Cases down, implementations across; each cell has the median, how many times faster than the baseline it is, and
    the error of o and state."""
    base = baseline(records, order)
    impls = [name for name in order if any(r.impl == name for r in records)]
    time = "time" if all(r.device == "cpu" for r in records) else "device time"
    title = f"median {time}; ratio is speed relative to {base}" if base else f"median {time}"
    table = Table(title="relative errors" if all("family" in r.case for r in records) else title)
    table.add_column("case")
    table.add_column("floor", justify="right")
    for name in impls:
        table.add_column(name, justify="right")
    by_case: dict[str, dict[str, BenchRecord]] = {}
    for r in records:
        by_case.setdefault(case_name(r.case), {})[r.impl] = r
    for name, row in by_case.items():
        floor = next((r.floor_us for r in row.values() if r.floor_us), None)
        cells = [cell(row.get(impl), row.get(base) if base else None) for impl in impls]
        table.add_row(name, f"{floor:.0f} us" if floor else "-", *cells)
    return table


def cell(record: BenchRecord | None, base: BenchRecord | None) -> str:
    """One measurement as text."""
    if record is None:
        return "-"
    errors = f"err {' '.join(f'{e:.1e}' for e in record.rel_err.values())}"
    if record.median_us is None and record.status == "ok":
        return errors
    if record.median_us is None:
        return escape(record.status if len(record.status) < 60 else record.status[:57] + "...")
    ratio = ""
    if base is not None and base.median_us is not None and base is not record:
        ratio = f" {base.median_us / record.median_us:.2f}x"
    if record.call_us is not None:
        errors = f"call {record.call_us:.0f} us{', paced by the host' if record.host_paced else ''}  {errors}"
    return f"{record.median_us:.1f} us{ratio}\n[dim]{errors}[/dim]"
