"""`kda2 tune`: what a run measured enters the shipped tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kda2.cli.common import Json, command, out
from kda2.workbench import tuner

app = typer.Typer(
    no_args_is_help=True, help="Tuned configurations: what kda2 run has measured, and the shipped tables."
)


@app.command()
@command
def promote(
    ledger: Annotated[Path, typer.Argument(help="The ledger of a finished run, e.g. runs/kda/<run>/ledger.jsonl.")],
    table: Annotated[Path | None, typer.Option(help="The table to write; the checkout's unless given.")] = None,
    as_json: Json = False,
) -> None:
    """Write the configuration that a run chose into its table. Refuses what was not measured, did not pass, or is no
    faster than what ships."""
    done = tuner.promote(ledger, table)
    if as_json:
        print(json.dumps({"candidate": done.candidate, "table": str(done.table), "rows": done.rows}))
        return
    for row in done.rows:
        out.print(escape(f"{row['stage']} {row['config']} for {row['when']}"), highlight=False, soft_wrap=True)
    out.print(f"{escape(done.candidate)} stands in {done.table}", highlight=False, soft_wrap=True)
    out.print("It serves every call of this key, whatever its tokens and heads; only the run's own call was measured.")
