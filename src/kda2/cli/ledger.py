"""`kda2 ledger`: reading and verifying an audit trail."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kda2.cli.common import FAILED, command, out
from kda2.workbench import ledger
from kda2.workbench.records import LedgerLine

app = typer.Typer(no_args_is_help=True, help="The hash-chained record of what was tried.")
File = Annotated[
    Path,
    typer.Argument(
        help="A ledger, e.g. runs/kda/<run>/ledger.jsonl. Whole lines cut from its end show in its head alone: compare "
        "that with the report's."
    ),
]


@app.command()
@command
def verify(file: File) -> None:
    """Check every hash of the chain; exit code 1 if one does not hold."""
    found = ledger.verify(file)
    if not found.ok:
        out.print(f"[red]broken[/red]: {escape(found.problem)}; the {found.lines} lines before it hold")
        raise typer.Exit(FAILED)
    out.print(f"{found.lines} lines hold, head {found.head}")


@app.command()
@command
def log(file: File) -> None:
    """Print one line for each entry."""
    for line in ledger.read(file):
        out.print(f"{line.seq:4} {line.utc} {line.hash[:12]} {line.kind:<12} {escape(_gist(line))}", highlight=False)


def _gist(line: LedgerLine) -> str:
    p = line.payload
    if line.kind == "verdict":
        return f"{p['candidate']}  {p['verdict']['stage']}  {p['verdict']['outcome']}"
    return str(p.get("name") or p.get("chosen") or p.get("op") or "")
