"""`kda2 profile ablate`: a kernel with one stage left out or doubled, and what it is bound by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from kda2 import device
from kda2.cli.common import Json, command, err, out
from kda2.cli.sizes import sizes_of
from kda2.dispatch import capability
from kda2.errors import InvalidValue
from kda2.testing import Problem, make
from kda2.workbench import files
from kda2.workbench.capture import Capture
from kda2.workbench.loop import check_dtypes
from kda2.workbench.profiler.ablation import LABEL, Ablation, Variant
from kda2.workbench.runs import named

NO_DEVICE = "No CUDA device here: nothing is timed."
# The call where none is given.
_USUAL = {"T": 4096, "H": 16, "HV": 16, "K": 128, "V": 128}


@command
def ablate(
    what: Annotated[str, typer.Argument(help="triton or hopper; or a Python file with run(**inputs).")],
    sizes: Annotated[
        str | None, typer.Option("--problem", help="Sizes of the call, e.g. T=8192,H=64,dtype=bf16.")
    ] = None,
    inputs: Annotated[Path | None, typer.Option(help="A captured call instead.")] = None,
    stages: Annotated[str, typer.Option(help="Regular expression over kernels to leave out and double.")] = "",
    samples: Annotated[int, typer.Option(min=20, help="Timed calls of each variant.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    target: Annotated[Path | None, typer.Option("--out", help="A JSON file to write the ablation to.")] = None,
    as_json: Json = False,
) -> None:
    """Time a kernel with each stage left out and doubled, and say what binds it. The variants are wrong on purpose:
    their times enter no table and no record. The kernel runs in this process."""
    if target is not None and target.suffix != ".json":
        raise InvalidValue("--out", "a file whose name ends in .json", str(target), "records are .jsonl; this is none")
    capture = _capture(what, sizes, inputs, seed)
    name, run = named(what)
    if not device.gpus():
        print(json.dumps({"ablation": None, "says": NO_DEVICE})) if as_json else out.print(NO_DEVICE)
        return
    # these import Triton
    from kda2.workbench.profiler.ablation.measure import ablate as measure
    from kda2.workbench.profiler.ablation.planned import arithmetic_floors

    where, say = torch.device("cuda", 0), err if as_json else out
    found = measure(
        run, name, capture, where, stages=stages, samples=samples,
        arithmetic=arithmetic_floors(what, capture, device.gpu(0).arch),
        say=lambda text: say.print(escape(text), highlight=False),
    )  # fmt: skip
    if target is not None:
        files.replace_whole(target, found.line() + "\n")
    if as_json:
        print(found.line())
    else:
        tell(found)


def _capture(what: str, sizes: str | None, inputs: Path | None, seed: int) -> Capture:
    if inputs is not None:
        if sizes is not None:
            raise InvalidValue("--problem", "absent beside --inputs: the captured call has its own sizes", repr(sizes))
        check_dtypes(capture := Capture.load(inputs))
        return capture
    chosen = {**_USUAL, **sizes_of(sizes)}
    if (limits := capability("kda", what)) is not None:
        K, V = limits.channels(chosen["K"], chosen["V"])
        if (K, V) != (chosen["K"], chosen["V"]):
            raise InvalidValue("--problem", f"K and V that {what} serves", f"K={chosen['K']},V={chosen['V']}")
    return Capture(make(Problem(**chosen, seed=seed)), {"made": "random inputs, gates of mixed depth"})


def tell(found: Ablation) -> None:
    """Print an ablation."""
    table = Table("variant", "", "device, us", "host, us", "speed", title=f"{found.name}: variants {LABEL}")
    for v in found.variants:
        label = LABEL if v.wrong else ""
        table.add_row(escape(v.name), label, *([escape(v.failed), "", ""] if v.failed else _cells(v)))
    out.print(table)
    for stage in found.stages:
        parts = f"{stage.launches} launch{'es' if stage.launches > 1 else ''}, {stage.programs} programs"
        saves = "" if stage.saves_us is None else f"; left out it saves {stage.saves_us:.1f} us"
        adds = "" if stage.adds_us is None else f", doubled it adds {stage.adds_us:.1f}"
        _print(f"{stage.name} ({parts}): {stage.alone_us:.1f} us by itself{saves}{adds}; bound by {stage.bound}")
        for says in stage.evidence:
            _print(f"    {says}")
    out.print(f"[bold]{escape(found.name)} is bound by {found.bound}[/bold]", highlight=False)
    for says in found.evidence:
        _print(f"    {says}")
    _print(f"These times are of kernels that are {LABEL}; they enter no table and no record.")


def _cells(v: Variant) -> list[str]:
    low, value, high = v.speed or (1.0, 1.0, 1.0)
    speed = f"{value:.2f} ({low:.2f} to {high:.2f})" if v.speed else ""
    return [f"{v.device_us:.1f}", f"{v.host_us:.1f}", speed]


def _print(text: str) -> None:
    out.print(escape(text), highlight=False, soft_wrap=True)
