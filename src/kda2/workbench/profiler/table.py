"""The tables a person reads of a suite that was run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from kda2.workbench.profiler.against import Change
from kda2.workbench.records import BenchRecord, Speed


def baseline(records: Sequence[BenchRecord], order: Sequence[str]) -> str | None:
    """The first implementation in `order` that is not kda2's own and was measured; ratios are to it."""
    measured = {r.impl for r in records if r.status == "ok"}
    return next((name for name in order if name in measured and not name.startswith("kda2:")), None)


def results_table(records: Sequence[BenchRecord], order: Sequence[str]) -> Table:
    """Cases down, implementations across; each cell has the median, how many times faster than the baseline it is and
    the verdict, the tail, the share of what the device's measured rates allow, and the error of o and state."""
    base = baseline(records, order)
    time = "time" if all(r.device == "cpu" for r in records) else "device time"
    title = f"median {time}; ratio is speed relative to {base}" if base else f"median {time}"
    families = all("family" in r.case for r in records)

    def floor(row: Mapping[str, BenchRecord]) -> str:
        us = next((r.floor_us for r in row.values() if r.floor_us), None)
        return f"{us:.0f} us" if us else "-"

    def cells(row: Mapping[str, BenchRecord], impl: str) -> str:
        return cell(row.get(impl), row.get(base) if base else None)

    return _grid("relative errors" if families else title, records, order, cells, ("floor", floor))


def call_table(records: Sequence[BenchRecord], order: Sequence[str]) -> Table | None:
    """Cases down, implementations across: the host's time to enqueue one call, and the wall clock's time of a call
    among others back to back. None where neither was taken."""

    def cells(row: Mapping[str, BenchRecord], impl: str) -> str:
        r = row.get(impl)
        if r is None or r.call_us is None:
            return "-"
        paced = ", paced by the host" if r.host_paced else ""
        return f"{r.call_us:.1f} us{paced}" + (f", burst {r.burst_us:.1f} us" if r.burst_us is not None else "")

    if all(r.call_us is None for r in records):
        return None
    return _grid("median call time, on the host", records, order, cells)


def _grid(
    title: str, records: Sequence[BenchRecord], order: Sequence[str],
    cells: Callable[[Mapping[str, BenchRecord], str], str],
    second: tuple[str, Callable[[Mapping[str, BenchRecord]], str]] | None = None,
) -> Table:  # fmt: skip
    impls = [name for name in order if any(r.impl == name for r in records)]
    table = Table("case", title=title)
    for name in ([second[0]] if second else []) + impls:
        table.add_column(name, justify="right")
    by_case: dict[str, dict[str, BenchRecord]] = {}
    for r in records:
        by_case.setdefault(r.name, {})[r.impl] = r
    for name, row in by_case.items():
        table.add_row(name, *([second[1](row)] if second else []), *(cells(row, impl) for impl in impls))
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
    words = [(record.verdict or "").partition("(")[0], *_spread(record), errors, *_itself(record.itself)]
    return f"{record.median_us:.1f} us{ratio}\n[dim]{'  '.join(filter(None, words))}[/dim]"


def _spread(record: BenchRecord) -> Iterable[str]:
    if record.tail is not None:
        yield f"{record.tail[0]}/p50 {record.tail[1]:.2f}"
    if record.floor_us and record.median_us:
        yield f"{record.floor_us / record.median_us:.0%} of the ceiling"


def _itself(speed: Speed | None) -> Iterable[str]:
    if speed is not None:
        yield f"A/A {speed.low:.3f} to {speed.high:.3f}"


def criteria_table(preset: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """What a preset's criteria say, beside the verdict."""
    asks = list(rows[0]["criteria"])
    table = Table("case", "impl", "verdict", *asks, title=f"criteria of {preset}, which change no verdict")
    for row in rows:
        answers = (escape(row["criteria"][name]) for name in asks)
        table.add_row(row["case"], row["impl"], escape(row["verdict"] or "-"), *answers)
    return table


def changes_table(changes: Sequence[Change]) -> Table:
    """What moved since other records were made, and what was not the same then."""
    table = Table("case", "impl", title="median times before and after; speed is how many times faster it has become")
    for name in ("before", "after", "speed", "call before", "call after"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    table.add_column("changed")
    for c in changes:
        us = (f"{x:.1f} us" if x else "-" for x in (c.before_us, c.after_us))
        call_us = (f"{x:.0f} us" if x else "-" for x in (c.before_call_us, c.after_call_us))
        speed = f"{c.speed.value:.2f}x" if c.speed else "-"
        if c.speed and c.speed.low < c.speed.high:
            speed += f" ({c.speed.low:.2f} to {c.speed.high:.2f})"
        why = f" ({c.why})" if c.why else ""
        facts = ", ".join(c.changed) or "nothing recorded"
        table.add_row(c.case, c.impl, *us, speed, *call_us, escape(f"{c.verdict}{why}"), facts)
    return table
