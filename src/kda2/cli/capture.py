"""`kda2 capture`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kda2.cli.common import command
from kda2.workbench.capture.command import Kept, Result, run
from kda2.workbench.capture.store import LIMIT

_STDERR = 2
_FOREVER = 1e7


@command
def capture(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the captures: a new or an empty one.")],
    words: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What to run, e.g. -- python train.py --steps 1.")
    ],
    limit: Annotated[int, typer.Option(min=1, help="The most files to write.")] = LIMIT,
    every: Annotated[
        bool, typer.Option("--all", help="Keep every call, not only the first of each shape, dtype and option.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was kept as JSON; the command's own output goes to stderr.")
    ] = False,
) -> None:
    """Run a command and keep the calls of KDA that it makes: kda2.kda, kda2.kda_step, and FLA's chunk_kda and
    fused_recurrent_kda. The exit code is the command's, or 1 if nothing was captured. What was kept is listed on
    stderr."""
    result = run(words, folder, limit, every, stdout=_STDERR if as_json else None)
    if as_json:
        print(json.dumps(_plain(result)))
    _tell(result, table=not as_json)
    raise typer.Exit(result.exit_code)


def _tell(result: Result, table: bool) -> None:
    err = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    if result.files and table:
        err.print(_table(result.files))
        first = result.files[0].path
        err.print(f"next: kda2 run kda --inputs {escape(str(first))}", highlight=False, soft_wrap=True)
    for text in result.skipped:
        err.print(f"skipped {escape(text)}", highlight=False, soft_wrap=True)
    for text in result.trouble:
        err.print(f"kda2: {escape(text)}", highlight=False, soft_wrap=True)


def _table(files: Sequence[Kept]) -> Table:
    table = Table(title=f"captured calls in {escape(str(files[0].path.parent))}", title_justify="left")
    for heading in ("file", "function", "shape", "dtype", "gate", "median half-life"):
        table.add_column(heading, overflow="fold")
    for kept in files:
        row = _row(kept)
        cells = (kept.path.name, row["function"], _shape(row), row["dtype"], row["gate"])
        table.add_row(*(escape(text) for text in cells), _half_life(row["half_life_tokens"]))
    return table


def _row(kept: Kept) -> dict[str, Any]:
    """A capture without its longer facts."""
    names = ("batch", "tokens", "sequences", "heads", "value_heads", "K", "V", "dtype", "gate", "lower_bound")
    facts = kept.facts
    return {
        "file": str(kept.path),
        "function": facts["origin"]["function"],
        **{name: facts[name] for name in names},
        "half_life_tokens": facts["regime"].get("half_life_tokens", {}).get("p50"),
        "origin": facts["origin"],
    }


def _shape(row: dict[str, Any]) -> str:
    heads = f"H{row['heads']}" + (f"/{row['value_heads']}" if row["value_heads"] != row["heads"] else "")
    packed = f" N{row['sequences']}" if row["sequences"] != row["batch"] else ""
    return f"B{row['batch']} T{row['tokens']}{packed} {heads} K{row['K']} V{row['V']}"


def _half_life(tokens: float | None) -> str:
    if tokens is None:
        return "-"
    return "no decay" if tokens > _FOREVER else f"{tokens:.3g} tokens"


def _plain(result: Result) -> dict[str, Any]:
    return {
        "status": result.status,
        "files": [_row(kept) for kept in result.files],
        "skipped": list(result.skipped),
        "trouble": list(result.trouble),
    }
