"""`kda2 ledger`: reading and verifying an audit trail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kda2.cli.common import FAILED, Json, command, out
from kda2.errors import InvalidValue
from kda2.workbench import ledger
from kda2.workbench.gist import gist
from kda2.workbench.records import LedgerLine
from kda2.workbench.report import write_report

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
def verify(file: File, as_json: Json = False) -> None:
    """Check every hash of the chain; exit code 1 if one does not hold."""
    found = ledger.verify(file)
    unfinished = found.ok and _is_unfinished(file)
    if as_json:
        document = {"ok": found.ok, "lines": found.lines, "head": found.head, "problem": found.problem}
        print(json.dumps(document | {"unfinished": unfinished}))
    elif found.ok:
        out.print(f"{found.lines} lines hold, head {found.head}")
        if unfinished:
            out.print("it has no end: what wrote it was interrupted, or is still going")
    else:
        out.print(f"[red]broken[/red]: {escape(found.problem)}; the {found.lines} lines before it hold")
    if not found.ok:
        raise typer.Exit(FAILED)


def _is_unfinished(file: Path) -> bool:
    """Whether the ledger of a run lacks its choice, or that of a verification or an audit what was found in the end."""
    lines = list(ledger.read(file))
    if not lines or lines[0].kind != "run":
        return False
    end = "choice" if "rounds" in lines[0].payload else "audited" if _is_audit(lines) else "judged"
    return all(line.kind != end for line in lines)


def _is_audit(lines: Sequence[LedgerLine]) -> bool:
    return bool(lines) and "seeds" in lines[0].payload


@app.command()
@command
def report(
    file: File,
    target: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Make the report of a ledger, finished or not."""
    if _is_audit(list(ledger.read(file))):
        raise InvalidValue("FILE", "the ledger of a run, a verification or a growth", f"{file}, of an audit",
                           "kda2 ledger log shows it")  # fmt: skip
    write_report(file, target)
    if as_json:
        print(json.dumps({"report": str(target)}))
    else:
        out.print(f"wrote {target}", highlight=False, soft_wrap=True)


@app.command()
@command
def log(file: File, as_json: Json = False) -> None:
    """Print one line for each entry."""
    lines = ledger.read(file)
    if as_json:
        print(json.dumps([line.model_dump(mode="json") for line in lines]))
        return
    for line in lines:
        text = escape(gist(line))
        out.print(f"{line.seq:4} {line.utc} {line.hash[:12]} {line.kind:<9} {text}", highlight=False, soft_wrap=True)
