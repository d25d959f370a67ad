"""`kda2 bench`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from kda2 import device
from kda2.cli.common import FAILED, Json, command, err, out
from kda2.dispatch import registered
from kda2.errors import InvalidValue
from kda2.workbench.profiler import against as records_against
from kda2.workbench.profiler import captured, presets
from kda2.workbench.profiler import cold as cold_start
from kda2.workbench.profiler.against import Change
from kda2.workbench.profiler.bench import Plan, Writer, run, typed_case
from kda2.workbench.profiler.peers import OWN
from kda2.workbench.profiler.suites import MADE_REGIMES, Suite, case_name, load_suite, select
from kda2.workbench.profiler.table import call_table, changes_table, criteria_table, results_table
from kda2.workbench.profiler.timing import Ratio
from kda2.workbench.records import BenchRecord, Speed

NO_DEVICE = "No CUDA device here: nothing is measured. (--device cpu times small cases on the CPU.)"


@command
def bench(
    suite: Annotated[
        str,
        typer.Argument(
            help="A suite under benchmarks/suites (such as kda-prefill), a TOML file, or a captured call "
            "(CALL.safetensors). Records (FILE.jsonl, FILE.jsonl:RUN) are only read, for --against and --preset."
        ),
    ],
    folder: Annotated[Path | None, typer.Option("--out", help="Where <suite>.jsonl is appended.")] = None,
    cases: Annotated[str | None, typer.Option(help="Regular expression over names such as H64-8192-strong.")] = None,
    gates: Annotated[str | None, typer.Option(help="Comma-separated gate regimes, such as strong,softplus.")] = None,
    impls: Annotated[str | None, typer.Option(help="Comma-separated, e.g. triton,fla,flash_kda,cudnn.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Timed calls per case; p95 needs 1000.")] = None,
    where: Annotated[str, typer.Option("--device", help="cuda, cuda:1, or cpu (small cases, --impls torch).")] = "cuda",
    cold: Annotated[
        bool, typer.Option(help="Time the first call in a new process with an empty kernel cache.")
    ] = False,
    itself: Annotated[
        bool, typer.Option("--itself", help="Compare every call with itself too; fail if a difference is found.")
    ] = False,
    neighbour: Annotated[
        bool, typer.Option("--neighbour", help="Time every call beside a kernel that copies through the memory.")
    ] = False,
    preset: Annotated[str, typer.Option(help=f"Criteria to apply: {', '.join(presets.PRESETS)}.")] = "default",
    against: Annotated[
        str | None,
        typer.Option(help="FILE.jsonl or FILE.jsonl:RUN: say what moved since, and what was not the same then."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a suite or a captured call: correctness first, then latency, all implementations in one interleaved
    run. With --against, compare with earlier records; exit code 1 if something became slower beyond noise."""
    presets.check(preset)
    before = against and records_against.load(against)
    if ".jsonl" in Path(suite).name:
        options = {"--out": folder, "--gates": gates, "--impls": impls, "--samples": samples}
        options |= {"--cold": cold or None, "--itself": itself or None, "--neighbour": neighbour or None}
        _only_read(suite, before or None, preset, cases, options, as_json)
        return
    capture = Path(suite).absolute() if suite.endswith(".safetensors") else None
    wanted, target = _suite(suite, capture, cases, gates), _device(where)
    if folder is None:
        raise InvalidValue("--out", "a folder for the records", "none")
    if target is None:
        if as_json:
            print(json.dumps({"records": [], "says": NO_DEVICE}))
        else:
            out.print(NO_DEVICE)
        return
    if cold and (itself or neighbour):
        raise InvalidValue("--cold", "without --itself and --neighbour: a first call is timed alone", "both")
    if neighbour and target.type != "cuda":
        raise InvalidValue("--neighbour", "absent on the CPU, where a kernel has no neighbours", "--neighbour")
    plan = replace(
        _plan(wanted, cases, gates, impls, samples, target, capture), preset=preset, itself=itself, neighbour=neighbour
    )
    write, records = Writer(folder, plan.suite.suite), list[BenchRecord]()
    say = err if as_json else out
    try:
        for record in (cold_start.run if cold else run)(plan, lambda text: say.print(text, markup=False)):
            write(record)
            records.append(record)
            say.print(_progress(record), highlight=False)
    finally:
        found = list(records_against.changes(before or [], records))
        _show(plan, records, found if before else None, write.path, as_json)
    failed = not any(r.status == "ok" for r in records) or any(c.worse for c in found)
    if failed or any(r.itself is not None and not _same(r.itself, r.samples) for r in records):
        raise typer.Exit(FAILED)


def _show(plan: Plan, records: list[BenchRecord], found: list[Change] | None, path: Path, as_json: bool) -> None:
    """The records, what the preset's criteria say of them, and what moved."""
    if as_json:
        document = {"records": [json.loads(r.line()) for r in records], "file": str(path)}
        print(json.dumps(document | _document(plan.preset, records, found)))
    elif records:
        out.print(results_table(records, plan.impls))
        if (calls := call_table(records, plan.impls)) is not None:
            out.print(calls)
        _print_judged(plan.preset, records, found)
        out.print(f"{len(records)} records in {path}")


def _only_read(
    after: str, before: list[BenchRecord] | None, preset: str, cases: str | None, options: dict[str, Any], as_json: bool
) -> None:
    """Records of before, compared with others or held to a preset's criteria: nothing is measured."""
    if before is None and preset == "default":
        raise InvalidValue("--against", "the records to compare with, or a --preset given", "none")
    for option, value in options.items():
        if value is not None:
            raise InvalidValue(option, "absent beside records, which are read and not measured", repr(value))
    records = records_against.load(after, "suite")
    if cases is not None:
        chosen = {case_name(case) for case in select([r.case for r in records], cases)}
        records = [r for r in records if case_name(r.case) in chosen]
    found = None if before is None else list(records_against.changes(before, records))
    if as_json:
        print(json.dumps(_document(preset, records, found)))
    else:
        _print_judged(preset, records, found)
    if any(c.worse for c in found or ()):
        raise typer.Exit(FAILED)


def _document(preset: str, records: list[BenchRecord], found: list[Change] | None) -> dict[str, Any]:
    criteria = list(presets.apply(preset, records))
    document: dict[str, Any] = {"preset": preset, "criteria": criteria} if criteria else {}
    if found is not None:
        document |= {"changes": [c.plain() for c in found], "says": list(records_against.summary(found))}
    return document


def _print_judged(preset: str, records: list[BenchRecord], found: list[Change] | None) -> None:
    if criteria := list(presets.apply(preset, records)):
        out.print(criteria_table(preset, criteria))
    if found:
        out.print(changes_table(found))
        for sentence in records_against.summary(found):
            out.print(sentence, highlight=False, markup=False)
    elif found is not None:
        out.print("Nothing to compare: no case and implementation has a time in both.")


def _same(itself: Speed, samples: int) -> bool:
    return Ratio(itself.low, itself.value, itself.high, samples).verdict == "inconclusive"


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
    return f"  {r.name:<44} {r.impl:<14} {what}"
