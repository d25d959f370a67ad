"""`kda2 growth`: how the error of an implementation grows with the length of a sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kda2 import device
from kda2.cli.common import FAILED, Json, command, err, out, seconds
from kda2.dispatch import capability
from kda2.errors import InvalidValue
from kda2.testing import Problem
from kda2.testing.inputs import Regime
from kda2.workbench import growth as growths
from kda2.workbench.growth import GATES, Growth
from kda2.workbench.journal import Journal, alone
from kda2.workbench.profiler.environment import new_run
from kda2.workbench.profiler.problems import DTYPES
from kda2.workbench.runs import answering

# Channels and heads that the oracle, in fp64, stands for 65536 tokens within a minute or so.
_ON_CPU, _ON_GPU = (32, 1), (128, 4)


@command
def growth(
    what: Annotated[str, typer.Argument(help="An implementation, e.g. triton; or a Python file with run(**inputs).")],
    gates: Annotated[str, typer.Option(help=f"Comma-separated, among {', '.join(GATES)}.")] = "strong,weak,mixed,none",
    tokens: Annotated[str, typer.Option(help="Shortest and longest sequence; each is twice the one before.")] = (
        "64:65536"
    ),
    dtype: Annotated[str, typer.Option(help=f"Of the inputs: {', '.join(DTYPES)}.")] = "bf16",
    heads: Annotated[int | None, typer.Option(min=1, help="Heads; 4 on a GPU and 1 elsewhere unless given.")] = None,
    channels: Annotated[
        int | None, typer.Option(min=1, help="K and V; 128 on a GPU and 32 elsewhere unless given.")
    ] = None,
    budget: Annotated[str, typer.Option(help="Time for all curves, such as 90s, 10m or 1h.")] = "10m",
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    ledger: Annotated[
        Path | None,
        typer.Option("--out", help="The ledger that gets the curves, appended to; runs/growth/<run> unless given."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure relative errors against fp64 for ever longer sequences, and name the law that they follow. A report with
    the curves is made by `kda2 ledger report`."""
    problem = _problem(what, dtype, heads, channels, seed)
    plan = growths.Plan(
        problem,
        tuple(_gate(g.strip()) for g in gates.split(",")),
        growths.doublings(tokens),
        seconds(budget),
    )
    path = ledger or Path("runs") / "growth" / new_run() / "ledger.jsonl"
    say = err if as_json else out
    with alone(path.parent), answering(what, problem.device) as (name, run):
        journal = Journal(path)
        found = growths.measure(run, name, plan, lambda text: say.print(f"  {escape(text)}", highlight=False), journal)
    if as_json:
        print(json.dumps({"growth": found.model_dump(mode="json", by_alias=True), "ledger": str(path)}))
    else:
        _tell(found, path)
    if found.failed:
        raise typer.Exit(FAILED)


def _gate(name: str) -> Regime:
    found = next((g for g in GATES if g == name), None)
    if found is None:
        raise InvalidValue("--gates", f"among {', '.join(GATES)}", repr(name))
    return found


def _problem(what: str, dtype: str, heads: int | None, channels: int | None, seed: int) -> Problem:
    if dtype not in DTYPES:
        raise InvalidValue("--dtype", f"one of {', '.join(DTYPES)}", repr(dtype))
    on_gpu = bool(device.gpus())
    usual_channels, usual_heads = _ON_GPU if on_gpu else _ON_CPU
    K = V = channels or usual_channels
    if (limits := capability("kda", what)) is not None:
        if channels is not None and limits.channels(K, V) != (K, V):
            raise InvalidValue("--channels", f"a number that {what} serves", str(channels))
        K, V = limits.channels(K, V)
    H = heads or usual_heads
    return Problem(H=H, HV=H, K=K, V=V, dtype=DTYPES[dtype], seed=seed, device="cuda:0" if on_gpu else "cpu")


def _tell(found: Growth, path: Path) -> None:
    table = Table("gate", "quantity", "T", "error", "T", "error", "law", title=f"{found.name}, {found.dtype}")
    for curve in found.curves:
        ends = [curve.points[0], curve.points[-1]] if curve.points else []
        for quantity, fit in curve.fits.items():
            cells = [c for p in ends for c in (str(p.tokens), growths.number(p.errors[quantity]))]
            table.add_row(curve.gate, quantity, *cells, fit.says)
    out.print(table)
    for curve in found.curves:
        if curve.ended:
            out.print(f"{curve.gate}: {escape(curve.ended)}", highlight=False, soft_wrap=True)
    out.print(f"ledger {escape(str(path))}", highlight=False, soft_wrap=True)
