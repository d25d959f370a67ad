"""benchmarks/README.md, made from the records: the newest of each case and implementation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kda2.workbench.profiler.environment import source_hash
from kda2.workbench.profiler.suites import CAPTURED, GPU_TESTS, REGIMES
from kda2.workbench.records import BenchRecord, TestRun, read_lines

_HEAD = """# Benchmarks

This page is generated from `benchmarks/records/*.jsonl` by `kda2 records page`; edit neither by hand. A suite is
measured with `kda2 bench SUITE --out benchmarks/records` (`--cases`, `--gates` and `--samples` choose; each record says
what), all implementations turn by turn on the same tensors in one run, each checked against an fp64 oracle before it is
timed. Times are medians of the time on the device, in microseconds. `floor` is what the device's measured copy and
product rates allow. Ratios compare implementations within one run only: how many times the speed of the first peer. An
empty cell was not measured. `(host)` marks a call of more launches than the device's queue holds: its time contains
waits for the host.

The host time of a call is the median of what the host needs to enqueue it; it depends on the host's processor and load.
Where it exceeds the time on the device, the host sets the pace of calls made one by one, unless a CUDA graph replays
them.

A case is named by its heads (`H64`), the lengths of its sequences (`8x1024`: eight of them, packed) or the batch and
the dtype of the state (`B16-fp32`), and its gate: `strong` forgets everything within some 16 tokens, `weak` remembers
hundreds of them and more, `mixed` does both in different heads, `none` never forgets, `softplus` has the inputs of
`strong` and the gate that has no bound. Keys and values have 128 channels and tensors are bf16 unless the name says
otherwise.
"""

_FAMILIES = """\
Relative errors of o / state against the fp64 oracle on the probe families of `kda2.testing`; a case's name ends in its
family. A family whose gates are its `own` takes no regime; lengths may be its own as well. Norms and the sigmoid of
beta are left to the kernel wherever that is the same call. `limit` is what kda2 accepts of its own kernels; for inputs
that amplify any rounding, such as repeated keys, that is twice the error of a reference with the same roundings. An
error is no worse than a peer's if its share of that is at most 1.00.
"""
# What two digits show as 1.00.
_NO_WORSE = 1.005


class Records(NamedTuple):
    """Everything under a records folder."""

    suites: dict[str, list[BenchRecord]]
    tests: list[TestRun]


def load(folder: Path) -> Records:
    """Read the records of a folder, but for those of captured calls, which nobody else could repeat, and those that
    were measured beside a neighbour; raises `BadRecord` naming a line that is none."""
    suites = {
        path.stem: [r for r in read_lines(path, BenchRecord) if r.neighbour_gbps is None]
        for path in sorted(folder.glob("*.jsonl"))
        if path.name not in (GPU_TESTS, f"{CAPTURED}.jsonl")
    }
    tests = folder / GPU_TESTS
    return Records(suites, list(read_lines(tests, TestRun)) if tests.exists() else [])


def newest(records: Iterable[BenchRecord]) -> list[BenchRecord]:
    """The newest record of each case and implementation, in order of first appearance. A later line wins a tie."""
    latest: dict[tuple[str, str], BenchRecord] = {}
    for r in records:
        key = (r.name, r.impl)
        if key not in latest or r.utc >= latest[key].utc:
            latest[key] = r
    return list(latest.values())


def op_of(suite: str) -> str:
    """The op whose kernels a suite measures: the first word of its name."""
    return suite.partition("-")[0]


def stale(records: Records) -> dict[str, list[str]]:
    """Ops whose newest own records were made from other sources than those that stand: op -> "suite: impl, ..."."""
    found: dict[str, list[str]] = {}
    for suite, lines in records.suites.items():
        op = op_of(suite)
        old = sorted({r.impl for r in newest(lines) if r.source not in (None, _source_hash(op, r.impl))})
        if old:
            found.setdefault(op, []).append(f"{suite}: {', '.join(old)}")
    for run in _latest_tests(records.tests):
        if run.source is not None and run.source != source_hash(op_of(run.suite)):
            found.setdefault(op_of(run.suite), []).append(f"tests: {run.suite}")
    return found


def _source_hash(op: str, impl: str) -> str:
    return source_hash(op, impl.removeprefix("kda2:"))


def page(records: Records) -> str:
    """The page, ending in a newline."""
    parts = [_HEAD]
    if not any(records.suites.values()) and not records.tests:
        parts.append("No records yet.\n")
    parts += [_suite(name, newest(lines)) for name, lines in records.suites.items() if lines]
    if records.tests:
        parts.append(_tests(_latest_tests(records.tests)))
    return "\n".join(parts)


def _suite(name: str, records: Sequence[BenchRecord]) -> str:
    warm = [r for r in records if not (r.case.get("cold") or "family" in r.case)]
    families = [r for r in records if "family" in r.case and not r.case.get("cold")]
    cold = [r for r in records if r.case.get("cold")]
    lines = [f"## {name}\n"]
    lines += _warm_table(warm) if warm else []
    lines += [_FAMILIES, *_family_table(families)] if families else []
    if cold:
        lines += ["\nFirst call of a new process, kernel caches empty, in seconds:\n", *_grid(cold, _seconds)]
    lines += ["", *(f"- {text}" for text in _provenance(records)), ""]
    return "\n".join(lines)


def _warm_table(records: Sequence[BenchRecord]) -> list[str]:
    impls = _impls(records)
    base = next((i for i in impls if not i.startswith("kda2:")), None)
    heads = ["case", "floor"]
    for impl in impls:
        heads += [impl] if impl == base or base is None else [impl, f"vs {base}"]
    rows = []
    for name, by_impl in _by_case(records).items():
        floor = next((r.floor_us for r in by_impl.values() if r.floor_us), None)
        row = [name, f"{floor:.0f}" if floor else ""]
        for impl in impls:
            record = by_impl.get(impl)
            row.append(_time(record))
            if base is not None and impl != base:
                row.append(_ratio(record, by_impl.get(base)))
        rows.append(row)
    lines = _table(heads, rows)
    if any(r.call_us is not None for r in records):
        lines += ["", "Host time of one call, in microseconds:", "", *_grid(records, _host_time)]
    return [*lines, "", "Relative error of o / state against the fp64 oracle:", "", *_grid(records, _errors)]


def _family_table(records: Sequence[BenchRecord]) -> list[str]:
    """Errors down the families; beside each own implementation's their shares of the first peer's."""
    impls, cases = _impls(records), _by_case(records)
    base = next((i for i in impls if not i.startswith("kda2:")), None)
    ours = [i for i in impls if base is not None and i.startswith("kda2:")]
    heads = ["case", "limit", *(head for i in impls for head in ([i, f"of {base}'s"] if i in ours else [i]))]
    rows = []
    for name, row in cases.items():
        cells = [name, next((_pair(r.limit.values()) for r in row.values() if r.limit), "")]
        for impl in impls:
            cells.append(_errors_or_why(row[impl]) if impl in row else "")
            if impl in ours:
                cells.append(" / ".join(f"{share:.2f}" for share in _shares(row, impl, base)))
        rows.append(cells)
    return [*_table(heads, rows), "", *(_no_worse(cases.values(), impl, base) for impl in ours)]


def _no_worse(cases: Iterable[Mapping[str, BenchRecord]], impl: str, base: str | None) -> str:
    both = [shares for row in cases if (shares := _shares(row, impl, base))]
    fair = sum(max(shares) < _NO_WORSE for shares in both)
    return f"{impl} is no worse than {base} in {fair} of the {len(both)} cases that both answer."


def _shares(row: Mapping[str, BenchRecord], impl: str, base: str | None) -> list[float]:
    """An implementation's errors in units of the base's, output by output; none across runs or without two answers."""
    ours, theirs = row.get(impl), row.get(base or "")
    if ours is None or theirs is None or ours.run != theirs.run or not ours.status == theirs.status == "ok":
        return []
    both = [(error, theirs.rel_err[name]) for name, error in ours.rel_err.items() if name in theirs.rel_err]
    return [error / other if other else math.inf if error else 1.0 for error, other in both]


def _grid(records: Sequence[BenchRecord], cell: Callable[[BenchRecord], str]) -> list[str]:
    """Cases down, implementations across."""
    impls = _impls(records)
    rows = [
        [name, *(cell(row[impl]) if impl in row else "" for impl in impls)] for name, row in _by_case(records).items()
    ]
    return _table(["case", *impls], rows)


def _host_time(record: BenchRecord) -> str:
    return "" if record.call_us is None else f"{record.call_us:.0f}"


def _errors(record: BenchRecord) -> str:
    return _pair(record.rel_err.values())


def _errors_or_why(record: BenchRecord) -> str:
    return _errors(record) if record.status == "ok" else record.status


def _pair(errors: Iterable[float]) -> str:
    return " / ".join(f"{e:.1e}" for e in errors)


def _seconds(record: BenchRecord) -> str:
    return f"{record.median_us / 1e6:.2f}" if record.median_us is not None else record.status


def _tests(runs: Sequence[TestRun]) -> str:
    rows = [
        [
            r.suite,
            str(r.passed),
            str(r.failed),
            str(r.skipped),
            r.device,
            f"{r.torch}, {r.triton}",
            r.utc,
            r.commit or "",
        ]
        for r in runs
    ]
    heads = ["suite", "passed", "failed", "skipped", "device", "torch, triton", "UTC", "commit"]
    return "\n".join(["## GPU tests\n", *_table(heads, rows), ""])


def _latest_tests(runs: Iterable[TestRun]) -> list[TestRun]:
    return list({(r.suite, r.device): r for r in sorted(runs, key=lambda r: r.utc)}.values())


def _provenance(records: Sequence[BenchRecord]) -> list[str]:
    """One line for each run that a shown record is from."""
    lines = []
    for run in dict.fromkeys(r.run for r in records):
        of_run = [r for r in records if r.run == run]
        first = of_run[0]
        versions = ", ".join(dict.fromkeys(f"{r.impl} {r.version}" for r in of_run))
        where = f"{first.device}, driver {first.driver}" if first.driver else first.device
        commit = f", commit {first.commit}" if first.commit else ""
        lines.append(f"{first.utc}: {where}, torch {first.torch}, triton {first.triton}{commit}; {versions}")
    return lines


def _impls(records: Sequence[BenchRecord]) -> list[str]:
    """Implementations in order of appearance, kda2's own first."""
    names = list(dict.fromkeys(r.impl for r in records))
    return sorted(names, key=lambda name: not name.startswith("kda2:"))


def _by_case(records: Sequence[BenchRecord]) -> dict[str, dict[str, BenchRecord]]:
    """Cases of one gate and number of heads stand together, in order of first appearance."""
    table: dict[str, dict[str, BenchRecord]] = {}
    for r in sorted(records, key=lambda r: (REGIMES.index(r.case["gate"]), r.case["heads"])):
        table.setdefault(r.name, {})[r.impl] = r
    return table


def _time(record: BenchRecord | None) -> str:
    if record is None:
        return ""
    if record.median_us is None:
        return record.status
    p95 = f" (p95 {record.p95_us:.1f})" if record.p95_us is not None else ""
    return f"{record.median_us:.1f}{p95}{' (host)' if record.host_paced else ''}"


def _ratio(record: BenchRecord | None, base: BenchRecord | None) -> str:
    """Only within one run: times of two runs do not compare. A ratio that says nothing is shown as such."""
    if record is None or base is None or not record.median_us or not base.median_us or record.run != base.run:
        return ""
    word = (record.verdict or "").partition("(")[0]
    if word == "invalid":
        return word
    unclear = word == "inconclusive" and record.against == base.impl
    return f"{base.median_us / record.median_us:.2f}x{' (inconclusive)' if unclear else ''}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(c.replace('|', '/').replace(chr(10), ' ') for c in cells)} |"

    return [line(heads), line(["---", *["---:"] * (len(heads) - 1)]), *(line(row) for row in rows)]
