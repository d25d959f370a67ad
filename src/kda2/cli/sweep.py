"""`kda2 sweep`: faults that come only with some shape."""

from __future__ import annotations

import json
import secrets
from typing import Annotated

import typer
from rich.markup import escape

from kda2 import device
from kda2.cli.common import FAILED, Json, command, err, out, seconds
from kda2.cli.sizes import sizes_of
from kda2.dispatch import capability
from kda2.errors import InvalidValue
from kda2.testing import Problem
from kda2.workbench import sweep as sweeps
from kda2.workbench.loop import SEEDS, check_seed
from kda2.workbench.runs import answering
from kda2.workbench.sweep import Swept, Tried

# K and V, and the shapes drawn beside those that are always tried.
_ON_CPU, _ON_GPU = (16, 40), (128, 200)
# Failing shapes told in full.
_SHOWN = 8


@command
def sweep(
    what: Annotated[str, typer.Argument(help="An implementation, e.g. triton; or a Python file with run(**inputs).")],
    repeats: Annotated[int, typer.Option(min=1, help="Calls of each shape; their answers are compared too.")] = 3,
    sizes: Annotated[str | None, typer.Option("--problem", help="Channels and dtype, e.g. K=128,V=64,dtype=fp16.")] = (
        None
    ),
    draws: Annotated[int | None, typer.Option(min=0, help="Shapes drawn beside those that are always tried.")] = None,
    budget: Annotated[str, typer.Option(help="Time for the shapes, such as 90s, 10m or 1h.")] = "10m",
    seed: Annotated[int | None, typer.Option(help="Seed of inputs and drawn shapes; fresh unless given.")] = None,
    as_json: Json = False,
) -> None:
    """Judge one kernel on many shapes, several times each; say which fail, and the smallest shape that does."""
    check_seed(seed)
    chosen = secrets.randbelow(SEEDS) if seed is None else seed
    gpus = device.gpus()
    channels, usual = _ON_GPU if gpus else _ON_CPU
    base = _problem(what, sizes, channels, chosen, "cuda:0" if gpus else "cpu")
    every = sweeps.shapes(gpus[0].sm_count if gpus else None, usual if draws is None else draws, chosen)
    with answering(what, base.device) as (name, run):
        found = sweeps.sweep(run, base, every, repeats, seconds(budget), _quiet if as_json else _say)
    if as_json:
        print(json.dumps({"name": name, "seed": chosen, "repeats": repeats, **found.plain()}))
    else:
        _tell(name, found, repeats, chosen)
    if found.failing:
        raise typer.Exit(FAILED)
    if all(t.outcome == sweeps.REFUSED for t in found.tried):
        err.print(f"{escape(name)} refuses every shape: {escape(found.tried[0].says)}", highlight=False)
        raise typer.Exit(FAILED)


def _problem(what: str, text: str | None, channels: int, seed: int, where: str) -> Problem:
    sizes = sizes_of(text)
    if swept := [name for name in sizes if name not in ("K", "V", "dtype")]:
        raise InvalidValue("--problem", "of K, V and dtype: the others are swept", swept[0])
    problem = Problem(**{"K": channels, "V": channels, **sizes}, seed=seed, device=where)
    limits = capability("kda", what)
    if limits is not None and limits.channels(problem.K, problem.V) != (problem.K, problem.V):
        K, V = limits.channels(problem.K, problem.V)
        if "K" in sizes or "V" in sizes:
            raise InvalidValue("--problem", f"K and V that {what} serves", f"K={problem.K},V={problem.V}")
        return Problem(**{**sizes, "K": K, "V": V}, seed=seed, device=where)
    return problem


def _quiet(tried: Tried) -> None:
    pass


def _say(tried: Tried) -> None:
    if tried.failed:
        out.print(f"  {tried.shape}: [red]{tried.outcome}[/red]", highlight=False)


def _tell(name: str, found: Swept, repeats: int, seed: int) -> None:
    def tell(text: str) -> None:
        out.print(escape(text), highlight=False, soft_wrap=True)

    for tried in found.failing[:_SHOWN]:
        tell(f"{tried.shape}: {tried.outcome}, {tried.says}")
    if rest := found.failing[_SHOWN:]:
        tell(f"and {', '.join(str(t.shape) for t in rest)}")
    if found.smallest is not None:
        tell(f"the smallest that fails is {found.smallest.shape}: {found.smallest.says}")
        if 2 * len(found.failing) > len(found.tried):
            tell("most shapes fail, so that it may be no fault of a shape: kda2 verify says what is wrong")
        tell(f"beside the smallest, the fault comes with {found.comes_with}")
    if differ := found.nondeterministic:
        worst = max(differ, key=lambda t: t.spread)
        tell(
            f"answers differ from call to call on {len(differ)} shapes, by {worst.spread:.1e} at most ({worst.shape}); "
            "within the limits, that is no fault"
        )
    if refused := [t for t in found.tried if t.outcome == sweeps.REFUSED]:
        tell(f"refused: {len(refused)} shapes, the first {refused[0].shape}: {refused[0].says}")
    if found.stopped:
        tell(found.stopped)
    right = sum(t.outcome == sweeps.OK for t in found.tried)
    tell(f"{name}: {right} of {len(found.tried)} shapes right, {repeats} calls each, seed {seed}")
