"""`kda2 spec`: reading an operator's contract, and exchanging it with FlashInfer-Trace."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from kda2.cli.common import FAILED, STOPPED, Json, check_op, command, err, families_of, out
from kda2.contract import OpSpec, TensorSpec, Tolerance
from kda2.contract.calibration import Calibration, dump, load, merged, tolerances
from kda2.errors import InvalidValue
from kda2.ops.kda.spec import CALIBRATIONS, KDA, SPECS
from kda2.testing import calibrate as calibration
from kda2.workbench import interchange

app = typer.Typer(no_args_is_help=True, help="An operator's contract: tensors, options, tolerances, workloads.")
ANY = "any other"
Op = Annotated[str, typer.Argument(help=f"One of {', '.join(SPECS)}.")]


@app.command()
@command
def show(op: Op, as_json: Json = False) -> None:
    """Print a contract, its content hash first."""
    _print(_spec(op), as_json)


@app.command()
@command
def export(
    op: Op,
    folder: Annotated[Path, typer.Argument(help="Made if absent: a data set of flashinfer-bench.")],
    workload: Annotated[str | None, typer.Option(help="The only workload to export; `show` lists them.")] = None,
    as_json: Json = False,
) -> None:
    """Write definitions and workloads for flashinfer-bench."""
    written = interchange.export(_spec(op), folder, workload)
    if as_json:
        print(json.dumps({"written": [str(path) for path in written]}))
        return
    for path in written:
        out.print(str(path), highlight=False, soft_wrap=True, markup=False)


@app.command("import")
@command
def import_(
    definition: Annotated[Path, typer.Argument(help="A definition.json of FlashInfer-Trace.")],
    workloads: Annotated[Path | None, typer.Option(help="Its workloads.jsonl.")] = None,
    as_json: Json = False,
) -> None:
    """Print the contract that a definition holds. What `export` wrote gives the contract that was exported."""
    _print(interchange.load(definition, workloads), as_json)


@app.command()
@command
def calibrate(
    op: Op,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the small sizes; large ones get fewer.")] = 20,
    impls: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(calibration.FAITHFUL),
    dtypes: Annotated[str, typer.Option(help="Comma-separated; the others stay as they are.")] = ",".join(
        KDA.judged_dtypes
    ),
    families: Annotated[
        str, typer.Option(help="Regular expression over probe families; the others stay as they are.")
    ] = "",
    to: Annotated[Path | None, typer.Option("--out", help="Where the measurements go, to be merged elsewhere.")] = None,
    merge: Annotated[list[Path] | None, typer.Option(help="Take these measurements and make none here.")] = None,
    write: Annotated[bool, typer.Option(help="Put the measurements into the package's table.")] = False,
    check: Annotated[
        bool, typer.Option(help="End with 1 if an implementation is beyond a limit, or a limit is far too loose.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure faithful implementations, and say what tolerances follow.

    Prints the worst error of each over its limit, and the limits that would change; nothing changes without --write.
    What was measured before, elsewhere or of others, stays in the table.
    """
    check_op(op)
    stored = load(CALIBRATIONS.read_text())
    if merge:
        found = calibration.Findings(tuple(c for path in merge for c in _measured(path)))
    else:
        chosen = families_of(families)
        found = calibration.measure(_names(impls), _here(device), seeds, _names(dtypes), err.print, chosen)
    table = merged(stored, found.calibrations)
    if to is not None:
        to.write_text(dump(found.calibrations))
    if write:
        CALIBRATIONS.write_text(dump(table))
    before, after = tolerances(stored), tolerances(table)
    loose = [f"{_row(old)}: {_pair(old)}, measured {_pair(new)}" for old, new in calibration.loose(before, after)]
    changes = list(calibration.changes(before, after))
    if as_json:
        print(json.dumps(_findings(found, changes, loose)))
    else:
        _print_findings(found, changes, loose, write)
    if found.stopped:
        err.print(f"stopped before {found.stopped}; what was measured before it is kept")
        raise typer.Exit(STOPPED)
    if check and (found.faults or loose):
        raise typer.Exit(FAILED)


def _measured(path: Path) -> tuple[Calibration, ...]:
    if not path.is_file():
        raise InvalidValue("--merge", "a file that --out wrote", f"{path}, which does not exist")
    return load(path.read_text())


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))


def _here(device: str) -> str:
    if device not in ("cpu", "cuda"):
        raise InvalidValue("--device", "cpu or cuda", repr(device))
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidValue("--device", "cpu, where there is no CUDA device", repr(device))
    return device


Changes = list[tuple[Tolerance | None, Tolerance | None]]


def _findings(found: calibration.Findings, changes: Changes, loose: list[str]) -> dict[str, Any]:
    margins = [
        {"dtype": dtype, "family": family, "output": output, "margins": by_impl}
        for (dtype, family, output), by_impl in found.margins.items()
    ]
    plain = [{"before": old and asdict(old), "after": new and asdict(new)} for old, new in changes]
    return {
        "margins": margins, "not_run": found.missing, "faults": found.faults, "changes": plain, "too_loose": loose,
    }  # fmt: skip


def _print_findings(found: calibration.Findings, changes: Changes, loose: list[str], written: bool) -> None:
    if found.margins:
        out.print(_margins(found))
    _lines("was not run", (f"{name}: {why}" for name, why in found.missing.items()))
    _lines("beyond its limits", found.faults)
    _lines("a limit is too loose", loose)
    for old, new in changes:
        row = _row(old or new)
        out.print(f"{row}: {_pair(old)} -> {_pair(new)}", highlight=False, soft_wrap=True, markup=False)
    what = "changed" if written else "would change; --write changes them"
    out.print(f"{len(changes)} limits {what}", highlight=False)


def _margins(found: calibration.Findings) -> Table:
    """The worst error over its limit: 1 is the limit."""
    impls = list(dict.fromkeys(name for by_impl in found.margins.values() for name in by_impl))
    table = Table("dtype", "family", "output", *impls, title="Margins: error / limit", title_justify="left")
    for row, by_impl in found.margins.items():
        table.add_row(*row, *(f"{by_impl[name]:.2f}" if name in by_impl else "" for name in impls))
    return table


def _lines(head: str, lines: Iterable[str]) -> None:
    for line in lines:
        out.print(f"{head}: {line}", highlight=False, soft_wrap=True, markup=False)


def _row(t: Tolerance | None) -> str:
    return "" if t is None else f"{t.dtype}, {t.family or ANY}{f', {t.output}' if t.output else ''}"


def _pair(t: Tolerance | None) -> str:
    return "none" if t is None else f"{t.relative_l2:g} and {t.element_rms:g}"


def _spec(op: str) -> OpSpec:
    if op not in SPECS:
        raise InvalidValue("op", f"one of {', '.join(SPECS)}", repr(op))
    return SPECS[op]


def _print(spec: OpSpec, as_json: bool) -> None:
    if as_json:
        print(spec.to_json())
        return
    _line("name", f"{spec.name}, version {spec.version}")
    _line("hash", spec.content_hash)
    _line("source", spec.source)
    _line("oracle", spec.oracle)
    for name, values in spec.options.items():
        _line("option", f"{name}: {', '.join(map(str, values))}")
    _line("families", ", ".join(spec.families) or "none")
    out.print(_tensors(spec))
    if spec.tolerances:
        out.print(_tolerances(spec))
    if spec.workloads:
        out.print(_workloads(spec))


def _line(name: str, words: str) -> None:
    out.print(f"[bold]{name:<9}[/bold]{escape(words)}", highlight=False, soft_wrap=True)


def _tensors(spec: OpSpec) -> Table:
    table = Table("tensor", "shape", "dtypes", "", title="Tensors", title_justify="left")
    for way, tensors in (("in", spec.inputs), ("out", spec.outputs)):
        for t in tensors:
            table.add_row(f"{way} {t.name}", escape(f"[{', '.join(t.shape)}]"), ", ".join(t.dtypes), _about(t))
    return table


def _about(t: TensorSpec) -> str:
    return escape("; ".join([*(["optional"] if t.optional else []), *([t.meaning] if t.meaning else [])]))


def _tolerances(spec: OpSpec) -> Table:
    """A row for each dtype and family: relative L2 and element limit of each output."""
    outputs = list(dict.fromkeys(t.output for t in spec.tolerances if t.output)) or [""]
    heads = [f"{output}{': ' if output else ''}relative L2, element" for output in outputs]
    title = "Tolerances (element errors in RMS)"
    table = Table("dtype", "family", *heads, title=title, title_justify="left")
    for dtype, family in dict.fromkeys((t.dtype, t.family) for t in spec.tolerances):
        limits = (spec.tolerance(dtype, family, output) for output in outputs)
        table.add_row(dtype, family or ANY, *(f"{t.relative_l2:g}, {t.element_rms:g}" for t in limits))
    return table


def _workloads(spec: OpSpec) -> Table:
    table = Table("workload", "weight", "axes", "options", title="Workloads", title_justify="left")
    for w in spec.workloads:
        axes, options = ("  ".join(f"{k} {v}" for k, v in x.items()) for x in (w.axes, w.options))
        table.add_row(escape(w.name), f"{w.weight:g}", escape(axes), escape(options))
    return table
