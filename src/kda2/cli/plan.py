"""`kda2 plan`: the specification book of a problem."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kda2.cli.common import Json, command
from kda2.workbench.planner import Problem, render_text, write_book
from kda2.workbench.planner import plan as make_plan


@command
def plan(
    op: Annotated[str, typer.Argument(help="The operator: kda.")],
    target: Annotated[str, typer.Option(help="Architecture to plan for.")] = "sm_90",
    problem: Annotated[
        str,
        typer.Option(
            help="T=8192,H=64 and so on. Keys: T, B, H, HV, K, V, C, dtype, gate, qk_l2norm, state, seqlens "
            "(1300+547+2048). Unless given: T=8192, B=1, H=64, HV=H, K=V=128, C=64, bf16, bounded, fp32 states."
        ),
    ] = "",
    sms: Annotated[int | None, typer.Option(help="Multiprocessors; 78 on sm_90 is an H20.")] = None,
    gpu: Annotated[str | None, typer.Option(help="The part by name, e.g. H100; the architecture's usual one.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where to write plan.json, plan.txt, plan.html and test_blocks.py.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Count a problem before a kernel is written: blocks, interfaces, budgets, floors and generated unit tests."""
    made = make_plan(op, target, Problem.parse(problem), sms, gpu)
    written = () if folder is None else write_book(made, folder)
    if as_json:
        print(made.line())
        return
    print(render_text(made), end="")
    for path in written:
        print(f"wrote {path}")
