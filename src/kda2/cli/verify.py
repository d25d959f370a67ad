"""`kda2 verify`: a kernel of one's own, or an implementation of the library, through the ladder."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from kda2 import device
from kda2.cli.common import FAILED, Json, chosen_of, command, out
from kda2.cli.run import styled
from kda2.cli.sizes import sizes_of as named_sizes
from kda2.dispatch import registered
from kda2.errors import InvalidValue
from kda2.testing import Problem, make
from kda2.testing.limits import NAMES
from kda2.testing.stages import STAGES as KDA_STAGES
from kda2.workbench import candidates as kernels
from kda2.workbench.capture import Capture
from kda2.workbench.journal import Journal, alone
from kda2.workbench.judge import Judge
from kda2.workbench.loop import FILE_SIZES, GPU_SIZES, SEEDS, check_dtypes, check_seed
from kda2.workbench.parts import arch_of
from kda2.workbench.planner.problem import assignments
from kda2.workbench.profiler import environment
from kda2.workbench.profiler.problems import DTYPES
from kda2.workbench.records import STAGES, Candidate
from kda2.workbench.verifier import Conditions, Limits, sanitizer, timed
from kda2.workbench.verifier.conditions import served_sizes
from kda2.workbench.verifier.foreign import REFUSED
from kda2.workbench.verifier.imported import axes_of, contract, sizes_of
from kda2.workbench.verifier.questions import RANDOM, probes_of
from kda2.workbench.verifier.subject import IMPORTED
from kda2.workbench.verifier.words import margins, reasons

OPERATORS = ("kda", "kda_step")
# The call that is timed where none was captured.
TIMED = {"T": 4096, "H": 16, "HV": 16, "K": 128, "V": 128}
TIMED_STEP = {"B": 128, "H": 16, "HV": 16, "K": 128, "V": 128}
# Failed probes that are told in full.
SHOWN = 2


@command
def verify(
    what: Annotated[str, typer.Argument(metavar="FILE", help="A Python file with run(**inputs); or triton, hopper.")],
    spec: Annotated[
        str, typer.Option(help="The operator that it computes: kda, kda_step, or the JSON file of a contract.")
    ] = "kda",
    stage: Annotated[
        str | None, typer.Option(help=f"The one stage that the file computes: {', '.join(KDA_STAGES)}.")
    ] = None,
    inputs: Annotated[Path | None, typer.Option(help="A captured call, judged and timed too.")] = None,
    sizes: Annotated[
        str | None, typer.Option("--problem", help="Sizes of the probes, e.g. K=128,V=128,H=2,HV=4,T=200,dtype=fp16.")
    ] = None,
    families: Annotated[str, typer.Option(help="Regular expression over probe families.")] = "",
    target: Annotated[str, typer.Option(help="Architecture to build its Triton kernels for.")] = "sm_90",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds of silence after which it is given up.")] = 120,
    samples: Annotated[int, typer.Option(min=20, help="Timed calls; p95 needs 1000.")] = timed.SAMPLES,
    check: Annotated[str, typer.Option(help=f"Tools of compute-sanitizer: {', '.join(sanitizer.TOOLS)}.")] = ",".join(
        sanitizer.USUAL
    ),
    count: Annotated[bool, typer.Option("--count/--no-count", help="Read its counters with Nsight Compute.")] = True,
    seed: Annotated[int | None, typer.Option(help="Seed of the probe inputs; fresh and secret unless given.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where its ledger goes; runs/verify/<run> unless given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge one kernel: its code, its numerics on every probe family, its memory, latency and counters where there is a
    GPU."""
    op = spec if spec in OPERATORS else IMPORTED
    check_seed(seed)
    tools = _tools(check)
    if stage is not None and (inputs is not None or op != "kda"):
        raise InvalidValue("--stage", "absent beside --inputs and another operator", stage, "stages are kda's alone")
    if inputs is not None and op != "kda":
        raise InvalidValue("--inputs", "absent beside --spec", str(inputs), "captured calls are of kda")
    candidate = _candidate(what, stage, op)
    gpu = bool(device.gpus())
    where = folder or Path("runs") / "verify" / environment.new_run()
    wanted = _wanted(candidate, spec, gpu, sizes)
    chosen = (RANDOM,) if op == IMPORTED else chosen_of(families, probes_of(op))
    arch = arch_of(target)
    with alone(where):
        if (where / "ledger.jsonl").exists():
            raise InvalidValue("--out", "a folder without a ledger", str(where), "each verification takes its own")
        capture = _capture(inputs, where, wanted if gpu and stage is None and op == "kda" else None)
        on = Conditions(
            arch=arch, device="cuda:0" if gpu else "cpu", capture=capture, tokens=None, families=chosen, sizes=wanted,
            seed=secrets.randbelow(SEEDS) if seed is None else seed, limits=Limits(timeout),
            spec=spec if op == IMPORTED else None, timed_sizes=TIMED_STEP if op == "kda_step" else {},
        )  # fmt: skip
        judged = _judged(candidate, on, where, as_json, samples, tools, count)
    if as_json:
        print(json.dumps(_plain(judged, on, where)))
    else:
        _tell(judged, on, where)
    if not judged.correct or any(v.outcome == "inconclusive" for v in judged.verdicts):
        raise typer.Exit(FAILED)


def _tools(text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in found if name not in sanitizer.TOOLS]:
        raise InvalidValue("--check", f"among {', '.join(sanitizer.TOOLS)}", repr(unknown[0]))
    return found


def _wanted(candidate: Candidate, spec: str, gpu: bool, text: str | None) -> dict[str, Any]:
    """The probes' sizes."""
    if candidate.op == IMPORTED:
        known = contract(spec)
        return {**sizes_of(known), **_axes(text, axes_of(known))}
    usual = served_sizes(candidate.impl, GPU_SIZES if gpu else FILE_SIZES)
    named = named_sizes(text, group=2)
    dtype = {"dtype": NAMES[named["dtype"]]} if "dtype" in named else {}  # the ledger holds plain data
    wanted = {**usual, **named, **dtype}
    if served_sizes(candidate.impl, wanted) != wanted:
        raise InvalidValue("--problem", f"K and V that {candidate.name} serves", f"K={wanted['K']},V={wanted['V']}")
    if candidate.op == "kda_step":
        wanted.pop("T", None)
    return wanted


def _axes(text: str | None, known: set[str]) -> dict[str, int]:
    found = {}
    for name, value in assignments(text or "").items():
        if name not in known or not value.isdecimal() or not int(value):
            wanted = f"{', '.join(sorted(known))} with a number above 0"
            raise InvalidValue("--problem", wanted, f"{name}={value}")
        found[name] = int(value)
    return found


def _candidate(what: str, stage: str | None, op: str) -> Candidate:
    if stage is not None and stage not in KDA_STAGES:
        raise InvalidValue("--stage", f"one of {', '.join(KDA_STAGES)}", repr(stage))
    names = [i.name for i in registered(op)] if op in OPERATORS else []
    if what not in names:
        if not what.endswith(".py"):
            known = f", or one of {', '.join(names)}" if names else ""
            raise InvalidValue("FILE", f"a Python file{known}", repr(what))
        return kernels.of_file(Path(what), stage, op)
    if stage is not None:
        raise InvalidValue("--stage", "given with a file", repr(what), "the library's stages are tested as a whole")
    return Candidate(name=what, op=op, impl=what, writer=kernels.WRITER, source=environment.source_hash("kda", what))


def _capture(inputs: Path | None, folder: Path, sizes: Mapping[str, Any] | None) -> str | None:
    """The file of the captured call; where a GPU can time one and none was captured, a random one."""
    if inputs is not None:
        check_dtypes(Capture.load(inputs))
        return str(inputs.resolve())
    if sizes is None:
        return None
    problem = Problem(**{**TIMED, "K": sizes["K"], "V": sizes["V"]}, dtype=DTYPES[sizes.get("dtype", "bf16")])
    file = folder / "random.safetensors"
    Capture(make(problem), {"made": "random inputs, gates of mixed depth"}).save(file)
    return str(file.resolve())


def _judged(
    candidate: Candidate, on: Conditions, folder: Path, quiet: bool, samples: int, tools: tuple[str, ...], count: bool
) -> Candidate:
    """The candidate with its verdicts, which the folder's ledger holds."""
    journal = Journal(folder / "ledger.jsonl")
    journal.begin(
        {
            "op": candidate.op, "spec": on.spec, "arch": on.arch, "seed": on.seed, "families": list(on.families),
            "sizes": dict(on.sizes),
            "capture": on.capture and environment.file_hash(Path(on.capture)),
            "environment": environment.machine(torch.device(on.device)),
        }
    )  # fmt: skip
    judge = Judge(journal, on, _quiet if quiet else _say)
    try:
        judge.judge([candidate])
        if on.on_gpu and candidate.parameters.get("stage") is None and journal.candidate(candidate.name).correct:
            if tools:
                judge.check_memory(candidate.name, tools)
            if journal.candidate(candidate.name).correct:
                judge.time_against_shipped(candidate.name, samples)
            if count and journal.candidate(candidate.name).correct:
                judge.count(candidate.name)
        judge.finish([candidate.name])
    finally:
        judge.close()
    return journal.candidate(candidate.name)


def _quiet(name: str, stage: str, text: str) -> None:
    pass


def _say(name: str, stage: str, text: str) -> None:
    if text.partition("(")[0] in ("pass", "fail", "invalid", "inconclusive", "not_run"):
        out.print(f"  {stage} {STAGES[stage]:<32} {styled(text)}", highlight=False)


def _tell(judged: Candidate, on: Conditions, folder: Path) -> None:
    out.print()
    not_run: dict[str, list[str]] = {}
    for verdict in judged.verdicts:
        whys = [] if verdict.passed else reasons(verdict)
        if verdict.outcome.startswith("not_run"):
            not_run.setdefault(whys[0], []).append(verdict.stage)
            continue
        for why in whys[:SHOWN]:
            out.print(f"{verdict.stage} {escape(why)}", highlight=False, soft_wrap=True)
        if rest := [why.partition(":")[0] for why in whys[SHOWN:]]:
            out.print(f"{verdict.stage} and on {', '.join(rest)}: see the ledger, or --json", highlight=False)
    for why, stages in not_run.items():
        out.print(f"not run: {', '.join(stages)}, {escape(why)}", highlight=False, soft_wrap=True)
    for line in margins(judged.verdicts):
        out.print(escape(line), highlight=False)
    if judged.latency_us is not None:
        out.print(f"{judged.latency_us:.1f} us, {_against(judged)}", highlight=False)
    out.print(f"[bold]{escape(judged.name)}: {_verdict(judged)}[/bold]", soft_wrap=True)
    took = ", ".join(f"{v.stage} {v.seconds:.1f}" for v in judged.verdicts if v.seconds)
    out.print(f"seconds: {took}", highlight=False)
    sizes = ", ".join(f"{name}={value}" for name, value in on.sizes.items())
    out.print(f"{len(on.families)} families at {sizes}, seed {on.seed}", highlight=False)
    out.print(f"ledger {folder / 'ledger.jsonl'}", highlight=False, soft_wrap=True)


def _against(judged: Candidate) -> str:
    evidence = next(v.evidence for v in judged.verdicts if v.stage == "L6")
    if (speed := evidence.get("speed")) is None:
        return "nothing to compare with"
    return (
        f"{speed['value']:.2f} times as fast as kda2's {evidence['against']} "
        f"({speed['low']:.2f} to {speed['high']:.2f}): {speed['verdict']}"
    )


def _verdict(judged: Candidate) -> str:
    if any(v.refuted for v in judged.verdicts):
        return "refused"
    unclear = [v for v in judged.verdicts if v.outcome == "inconclusive"]
    if unclear:
        refuses = any(r.get("ended") == REFUSED for v in unclear for r in v.evidence.get("families", {}).values())
        return "inconclusive: " + ("it refuses some of the probes" if refuses else "the judge itself failed on a probe")
    return "correct on every probe" if judged.correct else "not judged: none of its numerics could run here"


def _plain(judged: Candidate, on: Conditions, folder: Path) -> dict[str, Any]:
    return {
        "name": judged.name,
        "families": list(on.families),
        "sizes": dict(on.sizes),
        "seed": on.seed,
        "verdict": _verdict(judged),
        "correct": judged.correct,
        "latency_us": judged.latency_us,
        "verdicts": {v.stage: v.outcome for v in judged.verdicts},
        "margins": margins(judged.verdicts),
        "reasons": {v.stage: reasons(v) for v in judged.verdicts if not v.passed},
        "ledger": str(folder / "ledger.jsonl"),
    }
