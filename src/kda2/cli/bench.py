"""`kda2 bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape

from kda2 import device
from kda2.cli.common import FAILED, Json, command, err, out
from kda2.dispatch import registered
from kda2.errors import InvalidValue
from kda2.workbench.profiler import captured
from kda2.workbench.profiler import cold as cold_start
from kda2.workbench.profiler.bench import Plan, Writer, run, typed_case
from kda2.workbench.profiler.peers import OWN
from kda2.workbench.profiler.suites import MADE_REGIMES, Suite, case_name, load_suite, select
from kda2.workbench.profiler.table import results_table
from kda2.workbench.records import BenchRecord

NO_DEVICE = "No CUDA device here: nothing is measured. (--device cpu times small cases on the CPU.)"


@command
def bench(
    suite: Annotated[
        str,
        typer.Argument(
            help="A suite under benchmarks/suites (such as kda-prefill), a TOML file, or a captured call "
            "(CALL.safetensors)."
        ),
    ],
    folder: Annotated[Path, typer.Option("--out", help="Where <suite>.jsonl is appended.")],
    cases: Annotated[str | None, typer.Option(help="Regular expression over names such as H64-8192-strong.")] = None,
    gates: Annotated[str | None, typer.Option(help="Comma-separated gate regimes, such as strong,softplus.")] = None,
    impls: Annotated[str | None, typer.Option(help="Comma-separated, e.g. triton,fla,flash_kda,cudnn.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Timed calls per case; p95 needs 1000.")] = None,
    where: Annotated[str, typer.Option("--device", help="cuda, cuda:1, or cpu (small cases, --impls torch).")] = "cuda",
    cold: Annotated[
        bool, typer.Option(help="Time the first call in a new process with an empty kernel cache.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure a suite or a captured call: correctness first, then latency, all implementations in one interleaved
    run."""
    capture = Path(suite).absolute() if suite.endswith(".safetensors") else None
    wanted, target = _suite(suite, capture, cases, gates), _device(where)
    if target is None:
        if as_json:
            print(json.dumps({"records": [], "says": NO_DEVICE}))
        else:
            out.print(NO_DEVICE)
        return
    plan = _plan(wanted, cases, gates, impls, samples, target, capture)
    write, records = Writer(folder, plan.suite.suite), []
    say = err if as_json else out
    try:
        for record in (cold_start.run if cold else run)(plan, say.print):
            write(record)
            records.append(record)
            say.print(_progress(record), highlight=False)
    finally:
        if as_json:
            print(json.dumps({"records": [json.loads(r.line()) for r in records], "file": str(write.path)}))
        elif records:
            out.print(results_table(records, plan.impls))
            out.print(f"{len(records)} records in {write.path}")
    if not any(r.status == "ok" for r in records):
        raise typer.Exit(FAILED)


def _device(name: str) -> torch.device | None:
    """The device to measure on; None if it is a GPU and there is none."""
    try:
        target = torch.device(name)
    except RuntimeError as e:
        raise InvalidValue("--device", "cuda, cuda:<index> or cpu", repr(name)) from e
    if target.type == "cpu":
        return torch.device("cpu")
    if target.type != "cuda":
        raise InvalidValue("--device", "cuda, cuda:<index> or cpu", repr(name))
    count = len(device.gpus())
    if count and (target.index or 0) >= count:
        raise InvalidValue("--device", f"one of {count} CUDA devices", repr(name))
    return torch.device("cuda", target.index or 0) if count else None


def _suite(name: str, capture: Path | None, cases: str | None, gates: str | None) -> Suite:
    if capture is None:
        return load_suite(name)
    for option, value in (("--cases", cases), ("--gates", gates)):
        if value is not None:
            raise InvalidValue(option, "absent beside a captured call, which is one case", repr(value))
    return captured.suite(capture)


def _plan(
    suite: Suite,
    cases: str | None,
    gates: str | None,
    impls: str | None,
    samples: int | None,
    target: torch.device,
    capture: Path | None,
) -> Plan:
    regimes = _split("--gates", gates)
    if unknown := [g for g in regimes or () if g not in MADE_REGIMES]:
        raise InvalidValue("--gates", f"among {MADE_REGIMES}", repr(unknown[0]))
    every = list(suite.case) if capture is not None else suite.cases(regimes)
    for case in every:
        typed_case(suite.op, case)
    chosen = select(every, cases)
    own = {i.name for i in registered(suite.op)}
    names = (OWN + n if n in own else n for n in _split("--impls", impls) or _usual(suite, target))
    return Plan(suite, tuple(chosen), tuple(dict.fromkeys(names)), samples or suite.samples, target, capture)


def _usual(suite: Suite, target: torch.device) -> tuple[str, ...]:
    """The suite's implementations; on a CPU those that run there."""
    if target.type != "cpu":
        return suite.impls
    here = {OWN + i.name for i in registered(suite.op) if "cpu" in i.capability.devices}
    return tuple(name for name in suite.impls if name in here) or ("kda2:torch",)


def _split(option: str, text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise InvalidValue(option, "at least one name", repr(text))
    return parts


def _progress(r: BenchRecord) -> str:
    what = f"{r.median_us:9.1f} us" if r.median_us else escape(r.status)
    if "family" in r.case and r.status == "ok":
        what = ", ".join(f"{name} {error:.1e}" for name, error in r.rel_err.items())
    return f"  {case_name(r.case):<44} {r.impl:<14} {what}"
