"""`kda2 spec`: reading an operator's contract, and exchanging it with FlashInfer-Trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kda2.cli.common import Json, command, out
from kda2.contract import OpSpec, TensorSpec
from kda2.errors import InvalidValue
from kda2.ops.kda.spec import SPECS
from kda2.workbench import interchange

app = typer.Typer(no_args_is_help=True, help="An operator's contract: tensors, options, tolerances, workloads.")
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
    table = Table("dtype", "relative L2", "element, in RMS", title="Tolerances", title_justify="left")
    for t in spec.tolerances:
        table.add_row(t.dtype, f"{t.relative_l2:g}", f"{t.element_rms:g}")
    return table


def _workloads(spec: OpSpec) -> Table:
    table = Table("workload", "weight", "axes", "options", title="Workloads", title_justify="left")
    for w in spec.workloads:
        axes, options = ("  ".join(f"{k} {v}" for k, v in x.items()) for x in (w.axes, w.options))
        table.add_row(escape(w.name), f"{w.weight:g}", escape(axes), escape(options))
    return table
