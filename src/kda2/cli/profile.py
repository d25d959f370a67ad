"""`kda2 profile`: counters of a command's kernels, and what they say."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kda2.cli.common import FAILED, Json, command, err, out, seconds
from kda2.errors import InvalidValue
from kda2.workbench.profiler import ncu
from kda2.workbench.profiler.environment import new_run
from kda2.workbench.profiler.ncu.drive import REPORT
from kda2.workbench.profiler.ncu.figures import FIGURES, values

app = typer.Typer(no_args_is_help=True, help="Counters of kernels (Nsight Compute), and what they say.")
RUNS = Path("runs") / "profile"
_STDERR = 2

Kernels = Annotated[str | None, typer.Option(help="Regular expression over kernel names; all kernels unless given.")]
Gates = Annotated[
    str | None,
    typer.Option(help=f"Hold the counters to a set of gates: {', '.join(ncu.PRESETS)}. Exit code 1 if one is not ok."),
]


@app.command()
@command
def run(
    words: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to run, e.g. -- python bench.py.")],
    kernels: Kernels = None,
    launches: Annotated[int | None, typer.Option(min=1, help="The most launches to profile; all unless given.")] = None,
    skip: Annotated[int, typer.Option(min=0, help="Launches to leave out first, such as those that warm up.")] = 0,
    folder: Annotated[
        Path | None, typer.Option("--out", help="An empty or new folder; runs/profile/<run> unless given.")
    ] = None,
    timeout: Annotated[str | None, typer.Option(help="End the command after this time, such as 90s or 10m.")] = None,
    gates: Gates = None,
    as_json: Json = False,
) -> None:
    """Run a command under Nsight Compute and say what costs time in its kernels. Needs ncu (KDA2_NCU names it), and the
    right to read the GPU's counters. Each launch is repeated some forty times."""
    _check_gates(gates)
    where = folder or RUNS / new_run()
    try:
        report = ncu.profile(
            words, where, kernels=kernels, launches=launches, skip=skip,
            timeout_s=None if timeout is None else _timeout(timeout), stdout=_STDERR if as_json else None,
        )  # fmt: skip
    except KeyboardInterrupt:
        if (where / REPORT).exists():
            err.print(f"what was profiled stands in {where / REPORT}: kda2 profile import reads it", soft_wrap=True)
        raise
    _tell(report, gates, as_json, failed=report.command_status != 0)


@app.command("import")
@command
def import_(
    file: Annotated[Path, typer.Argument(help="A .ncu-rep file, or the CSV of its raw page.")],
    kernels: Kernels = None,
    gates: Gates = None,
    as_json: Json = False,
) -> None:
    """Say what costs time in the kernels of a report that was made elsewhere (`ncu --set full --import-source yes`)."""
    _check_gates(gates)
    _tell(ncu.read_report(file, kernels), gates, as_json, failed=False)


def _timeout(text: str) -> float:
    try:
        return seconds(text)
    except InvalidValue as e:
        raise InvalidValue("--timeout", e.wanted, e.got) from e


def _check_gates(gates: str | None) -> None:
    if gates is not None and gates not in ncu.PRESETS:
        raise InvalidValue("--gates", f"one of {', '.join(ncu.PRESETS)}", repr(gates))


def _tell(report: ncu.Report, gates: str | None, as_json: bool, failed: bool) -> None:
    results = ncu.check(gates, report) if gates else []
    if as_json:
        print(json.dumps(_plain(report, gates, results)))
    else:
        for kernel in report.kernels:
            _tell_kernel(kernel)
        if gates:
            _tell_gates(ncu.PRESETS[gates], results)
        for note in report.notes:
            out.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    if failed or any(result.outcome == "not ok" for result in results):
        raise typer.Exit(FAILED)


def _plain(report: ncu.Report, gates: str | None, results: list[ncu.GateResult]) -> dict[str, Any]:
    document = ncu.evidence(report)
    if gates:
        preset = ncu.PRESETS[gates]
        limits = {"max_error": preset.max_error, "p95_gain": preset.p95_gain}
        document["gates"] = {
            "preset": gates,
            "results": [result.model_dump(mode="json", exclude_none=True) for result in results],
            **{name: limit for name, limit in limits.items() if limit is not None},
        }
    return document


def _tell_kernel(kernel: ncu.KernelProfile) -> None:
    out.print(_figures(kernel))
    found = ncu.findings(kernel)
    for finding in found:
        out.print(f"{finding.severity:>6}  {escape(finding.sentence)}", highlight=False, soft_wrap=True)
    missing = ncu.not_collected(kernel)
    if missing:
        names = ", ".join(missing[:3]) + (", ..." if missing[3:] else "")
        text = f"{len(missing)} counters are n/a, so what they would show is not known: {names}"
        out.print(escape(text), highlight=False, soft_wrap=True)
    elif not found:
        out.print("nothing found")
    out.print()


def _figures(kernel: ncu.KernelProfile) -> Table:
    sizes = {"grid": kernel.grid, "block": kernel.block}
    title = [f"{kernel.launch}: {kernel.short_name}"]
    title += [f"{name} {'x'.join(map(str, size))}" for name, size in sizes.items() if size is not None]
    table = Table(title=escape(", ".join(title)), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_column(justify="right")
    rows = [(FIGURES[name].what.removeprefix("the "), _number(name, x)) for name, x in values(kernel.metrics).items()]
    half = -(-len(rows) // 2)
    for left, right in zip_longest(rows[:half], rows[half:], fillvalue=("", "")):
        table.add_row(*left, *right)
    return table


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "n/a"
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.5g}"
    return f"{text} {FIGURES[name].unit}".rstrip()


def _tell_gates(preset: ncu.Preset, results: list[ncu.GateResult]) -> None:
    table = Table(title=f"gates: {preset.name}", title_justify="left")
    for heading in ("kernel", "figure", "wanted", "is", ""):
        table.add_column(heading, justify="right" if heading in ("wanted", "is") else "left")
    for result in results:
        wanted = f"{result.comparison} {result.threshold:g}"
        what = FIGURES[result.figure].what.removeprefix("the ")
        kernel = escape(f"{result.launch}: {result.kernel}")
        table.add_row(kernel, what, wanted, _number(result.figure, result.value), result.outcome)
    out.print(table)
    if preset.max_error is not None:
        out.print(f"not in a report, and wanted as well: a maximum error below {preset.max_error:g} against fp64")
    if preset.p95_gain is not None:
        out.print(f"not in a report, and wanted as well: a p95 at least {preset.p95_gain:g} % below the baseline's")
