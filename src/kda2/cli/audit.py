"""`kda2 audit`: the verifier put to the test."""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from kda2 import device
from kda2.cli.common import FAILED, Json, command, err, out
from kda2.errors import InvalidValue
from kda2.workbench.audit import engine
from kda2.workbench.audit.catalogue import GATES
from kda2.workbench.audit.engine import SEEDS, Options, Row, survivors
from kda2.workbench.journal import Journal, alone
from kda2.workbench.loop import SEEDS as SEED_RANGE
from kda2.workbench.loop import check_seed
from kda2.workbench.profiler import environment

# Children that a GPU has memory and multiprocessors for.
_MOST_ON_GPU = 8


@command
def audit(
    only: Annotated[str, typer.Option(help="Regular expression over names of mutants, cheats and the faithful.")] = "",
    cpu: Annotated[bool, typer.Option("--cpu", help="On the CPU, though there is a GPU.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds that what is faithful must pass in a row.")] = SEEDS,
    workers: Annotated[int | None, typer.Option(min=1, help="Kernels judged at once; as many as fit unless given.")] = (
        None
    ),
    seed: Annotated[int | None, typer.Option(help="First seed; fresh and secret unless given.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where its ledger goes; runs/audit/<run> unless given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run wrong kernels, cheats and faithful kernels through the verifier, and print which gate refused which. Fails if
    anything wrong passes, or anything faithful does not."""
    check_seed(seed)
    _expression(only)
    gpu = bool(device.gpus()) and not cpu
    most = min(_MOST_ON_GPU, os.cpu_count() or 1) if gpu else os.cpu_count() or 1
    first = secrets.randbelow(SEED_RANGE - seeds) if seed is None else seed
    options = Options("cuda:0" if gpu else "cpu", only, seeds, workers or most, first)
    where = folder or Path("runs") / "audit" / environment.new_run()
    start, say = time.perf_counter(), err if as_json else out
    with alone(where):
        journal = _journal(where, options)

        def heard(row: Row) -> None:
            journal.note("audit", row.plain())
            say.print(_line(row), highlight=False)

        with tempfile.TemporaryDirectory(prefix="kda2-") as scratch:
            rows = engine.audit(options, Path(scratch), heard)
        failed = survivors(rows)
        summary = _summary(rows, failed, time.perf_counter() - start)
        journal.note("audited", summary)
    if as_json:
        print(json.dumps({**summary, "rows": [row.plain() for row in rows], "ledger": str(where / "ledger.jsonl")}))
    else:
        out.print(_matrix(rows))
        _tell(rows, failed, summary, where)
    if failed or not rows:
        raise typer.Exit(FAILED)


def _expression(text: str) -> None:
    try:
        re.compile(text)
    except re.error as e:
        raise InvalidValue("--only", "a regular expression", repr(text), str(e)) from e
    if not any(re.search(text, name) for name in engine.names()):
        raise InvalidValue("--only", "an expression that finds a mutant, a cheat or a faithful kernel", repr(text))


def _journal(where: Path, options: Options) -> Journal:
    journal = Journal(where / "ledger.jsonl")
    machine = environment.machine(torch.device(options.device))
    facts = {"op": "kda", "seed": options.seed, "seeds": options.seeds, "only": options.only}
    journal.begin({**facts, "environment": machine})
    return journal


def _line(row: Row) -> str:
    wrong = "[bold red]REFUSED[/]" if row.kind == "faithful" else "[bold red]SURVIVES[/]"
    how = "not run" if row.not_run else "ok" if row.ok else wrong
    found = escape(_gates(row) or row.not_run or row.on)
    return f"  {how:<8} {row.seconds:5.1f} s  {row.kind:<8} {escape(row.name)}  {found}"


def _gates(row: Row) -> str:
    return ", ".join(gate if margin is None else f"{gate} {margin:g}x" for gate, margin in row.gates.items())


def _matrix(rows: list[Row]) -> Table:
    """Wrong kernels down, gates across: the margin by which a gate refused, or a cross where there is no number."""
    wrong = [row for row in rows if row.kind != "faithful" and not row.not_run]
    used = [gate for gate in GATES if any(gate in row.gates for row in wrong)]
    table = Table(title="which gate refused which; numbers are multiples of the limit")
    table.add_column("wrong kernel")
    for gate in used:
        table.add_column(gate, justify="right")
    table.add_column("on")
    for row in wrong:
        cells = [_cell(row, gate) for gate in used]
        table.add_row(escape(row.name), *cells, escape(row.on))
    return table


def _cell(row: Row, gate: str) -> str:
    if gate not in row.gates:
        return ""
    margin = row.gates[gate]
    mark = "x" if margin is None else f"{margin:.3g}"
    return f"[bold]{mark}[/]" if gate == row.expected else mark


def _summary(rows: list[Row], failed: list[Row], seconds: float) -> dict[str, Any]:
    ran = [row for row in rows if not row.not_run]
    return {
        "ok": not failed and bool(rows),
        "refused": sum(row.ok for row in ran if row.kind != "faithful"),
        "wrong": sum(row.kind != "faithful" for row in ran),
        "passed": sum(row.ok for row in ran if row.kind == "faithful"),
        "faithful": sum(row.kind == "faithful" for row in ran),
        "not_run": [row.name for row in rows if row.not_run],
        "failed": [row.name for row in failed],
        "seconds": round(seconds, 1),
    }


def _tell(rows: list[Row], failed: list[Row], summary: dict[str, Any], where: Path) -> None:
    def say(text: str) -> None:
        out.print(text, highlight=False, soft_wrap=True)

    for row in rows:
        if row.kind == "faithful" and row.ok and row.on:
            say(f"{escape(row.name)} passes; nearest to a limit on {escape(row.on)}")
    for row in failed:
        what = "is refused though it is right" if row.kind == "faithful" else "is not refused, or not clearly"
        say(f"[bold red]{escape(row.name)} {what}[/] ({escape(row.says)}) {escape(row.why)}")
    if summary["not_run"]:
        say(f"not run, as they need a GPU: {', '.join(summary['not_run'])}")
    say(
        f"[bold]{summary['refused']} of {summary['wrong']} wrong kernels refused, {summary['passed']} of "
        f"{summary['faithful']} faithful ones passed[/], {summary['seconds']} s"
    )
    say(f"ledger {where / 'ledger.jsonl'}")
