"""The audit itself: everything in the catalogue goes through the verifier, and the verifier is what is judged."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kda2.dispatch import registered
from kda2.testing import Problem, make
from kda2.testing.mutants import MUTANTS, STEP_MUTANTS
from kda2.testing.verify import trial
from kda2.workbench.audit.catalogue import CHEATS, FAITHFUL, Cheat
from kda2.workbench.capture import Capture
from kda2.workbench.profiler.problems import DTYPES
from kda2.workbench.records import Verdict
from kda2.workbench.verifier import Children, Conditions, Limits, Subject, policy, stages, timed
from kda2.workbench.verifier.code import WITH_KERNELS
from kda2.workbench.verifier.conditions import served_sizes
from kda2.workbench.verifier.numerics import Interview, Result
from kda2.workbench.verifier.process import Child, Ended
from kda2.workbench.verifier.questions import CallQuestion, Question, StepQuestion, argument_names, probes_of
from kda2.workbench.verifier.subject import MUTANT
from kda2.workbench.verifier.words import reasons

# A mutant must exceed a limit by this much on one quantity of one family; less is luck.
CLEAR = 3.0
SEEDS = 20
# Probes of files that cheat: what they do shows on any, and some need one that is packed or of another form.
CHEAT_PROBES = ("random", "no_decay", "ragged", "weak_gate")
CHEAT_SIZES = {"T": 20, "B": 2, "H": 1, "HV": 2, "K": 16, "V": 12}
SEED_SIZES = {"T": 36, "B": 2, "H": 1, "HV": 2, "K": 16, "V": 12}
GPU_SIZES = {"T": 100, "B": 2, "H": 2, "HV": 4, "K": 128, "V": 128}
# The call that is timed, long enough that a kernel that forgets shows, and on a CPU short enough for plain torch.
TIMED = {
    "cpu": Problem(T=24, H=1, HV=2, K=16, V=12, regime="weak"),
    "cuda": Problem(T=640, H=2, HV=4, K=64, V=64, regime="weak"),
}
# A file that hangs is given up soon; honest ones answer a probe in far less.
SILENCE_S = {"cpu": 8.0, "cuda": 30.0}
# Gates that hold an answer to a limit.
_MEASURED = ("numerics", "repeat")
_TIMED_GATES = ("timed outputs", "wall", "floor")
_SAMPLES = 30
Kind = Literal["mutant", "cheat", "faithful"]
Idle = queue.SimpleQueue[Child]
Run = Callable[[Children, Idle], "Row"]


@dataclass(frozen=True)
class Row:
    """What became of one entry. `gates`: those that refused it, with the margin by which (None where there is no
    number); `expected`: the gate that the catalogue names ("" for what must pass); `on`: family and quantity."""

    name: str
    kind: Kind
    says: str
    expected: str
    gates: Mapping[str, float | None] = field(default_factory=dict)
    on: str = ""
    why: str = ""
    not_run: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it came out as it must: refused clearly, by the gate that the catalogue names, or passed."""
        if self.not_run:
            return True
        if self.kind == "faithful":
            return not self.gates
        if self.expected not in self.gates:
            return False
        margin = self.gates[self.expected]
        return margin is None or margin > CLEAR

    def plain(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "gates": dict(self.gates), "ok": self.ok}


@dataclass(frozen=True)
class Options:
    """Where the audit runs, which entries it takes (a regular expression over names), how many seeds the faithful get,
    and how many children work at once."""

    device: str
    only: str = ""
    seeds: int = SEEDS
    workers: int = 2
    seed: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def kind(self) -> str:
        return "cuda" if self.on_gpu else "cpu"


def audit(options: Options, folder: Path, heard: Callable[[Row], None]) -> list[Row]:
    """Every entry that `options` name, in the catalogue's order; `heard` is told of each as it is done. `folder` is for
    the call that is timed."""
    children, rows = Children(), dict[str, Row]()
    capture = _timed_call(options, folder)
    jobs = list(_jobs(options, capture))
    idle: Idle = queue.SimpleQueue()

    def work(job: _Job) -> Row:
        start = time.perf_counter()
        row = job.run(children, idle)
        return dataclasses.replace(row, seconds=round(time.perf_counter() - start, 2))

    try:
        with ThreadPoolExecutor(options.workers) as pool:
            for row in pool.map(work, [job for job in jobs if not job.alone]):
                rows[row.name] = row
                heard(row)
        for job in jobs:
            if job.alone:  # it is timed, and nothing may run beside it
                rows[job.name] = work(job)
                heard(rows[job.name])
    finally:
        children.kill()
    return [rows[job.name] for job in jobs]


@dataclass(frozen=True)
class _Job:
    name: str
    run: Run
    alone: bool = False


def _jobs(options: Options, capture: Path) -> Iterator[_Job]:
    wanted = re.compile(options.only)
    # those that take longest first
    for faithful in _faithful(options, capture):
        if wanted.search(faithful.name):
            yield faithful
    for cheat in CHEATS:
        if wanted.search(cheat.name):
            timed_too = cheat.gate in _TIMED_GATES
            yield _Job(cheat.name, _of_cheat(cheat, options, capture), options.on_gpu and timed_too)
    if options.on_gpu:
        return  # what they compute has nothing to do with a device
    for name in MUTANTS:
        if wanted.search(name):
            yield _Job(name, _of_mutant(name, "kda", options))
    for name in STEP_MUTANTS:
        if wanted.search(f"step: {name}"):
            yield _Job(f"step: {name}", _of_mutant(name, "kda_step", options))


# --- mutants ---


def _of_mutant(name: str, op: str, options: Options) -> Run:
    mutant: Any = (MUTANTS if op == "kda" else STEP_MUTANTS)[name]
    subject = Subject(MUTANT, file=name, op=op)

    def question(dtype: str) -> Question:
        own = {"dtype": DTYPES[dtype], "seed": options.seed}
        if op == "kda_step":
            return StepQuestion(mutant.family, mutant.call(**own))
        asked = trial(mutant.family, mutant.problem(**own))
        return CallQuestion(asked, asked.kwargs)

    def run(children: Children, idle: Idle) -> Row:
        found = []
        with _lent(children, idle) as child:
            for dtype in ("bf16", "fp32"):
                result = Interview(child, subject, _conditions(options, {}), diagnosed=0).put(question(dtype))
                if "ended" in result:
                    return Row(_shown(name, op), "mutant", mutant.says, "numerics", why=str(result["says"]))
                margin, quantity = _worst(result)
                found.append((margin, f"{mutant.family}, {quantity}, {dtype}"))
        margin, on = min(found)
        gates = {"numerics": _number(margin)} if margin > 1.0 else {}
        return Row(_shown(name, op), "mutant", mutant.says, "numerics", gates, on)

    return run


def _shown(name: str, op: str) -> str:
    return f"step: {name}" if op == "kda_step" else name


def _number(margin: float) -> float | None:
    return None if math.isinf(margin) else round(margin, 2)


def _worst(result: Result) -> tuple[float, str]:
    """By how many times its limit the quantity that is furthest off is so, and its name."""
    margins = {n: math.inf if q["margin"] is None else q["margin"] for n, q in result["quantities"].items()}
    name = max(margins, key=lambda n: margins[n], default="no answer")
    return margins.get(name, math.inf), name


# --- files that cheat ---


def _of_cheat(cheat: Cheat, options: Options, capture: Path) -> Run:
    subject = Subject.of_file(cheat.file)

    def run(children: Children, idle: Idle) -> Row:
        row = Row(cheat.name, "cheat", cheat.says, cheat.gate)
        if cheat.needs == "cuda" and not options.on_gpu:
            return dataclasses.replace(row, not_run="it needs a GPU")
        on = _conditions(options, GPU_SIZES if options.on_gpu else CHEAT_SIZES, CHEAT_PROBES, str(capture))
        verdicts = list(_ladder(children, subject, on, cheat.gate))
        return dataclasses.replace(row, **_refused(verdicts))

    return run


def _ladder(children: Children, subject: Subject, on: Conditions, expected: str) -> Iterator[Verdict]:
    """L0 as a reading, the numerics, and the clock where nothing has refused it."""
    yield _policy(subject)
    numbers = stages.numerics(children, subject, dataclasses.replace(on, capture=None), lambda _: None, diagnosed=0)
    yield numbers
    if not numbers.refuted and not _policy(subject).refuted:
        yield timed.latency(children, {"it": subject}, "it", on, _SAMPLES)[0]["it"]


def _policy(subject: Subject) -> Verdict:
    assert subject.file is not None
    found = policy.checks(Path(subject.file).read_bytes(), argument_names(subject))
    wrong = {name: check for name, check in found.items() if not check.ok}
    evidence = {"ended": "; ".join(str(check) for check in wrong.values()), "gate": "policy"} if wrong else {}
    return Verdict(stage="L0", outcome="invalid" if wrong else "pass", evidence=evidence)


def _refused(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The gates that refused, the first reason, and on what."""
    gates, whys, on = dict[str, float | None](), list[str](), ""
    for verdict in verdicts:
        if not verdict.refuted:
            continue
        whys += reasons(verdict)
        for name, result in verdict.evidence.get("families", {}).items():
            if not result["ok"] and result.get("gate"):
                margin, quantity = _worst(result)
                on = on or f"{name}, {quantity}"
                gates.setdefault(result["gate"], _number(margin) if result["gate"] in _MEASURED else None)
        named = verdict.evidence.get("gates") or ([verdict.evidence["gate"]] if "gate" in verdict.evidence else [])
        for gate in named:
            gates.setdefault(gate, None)
    return {"gates": gates, "why": whys[0] if whys else "", "on": on}


# --- what must pass ---


def _faithful(options: Options, capture: Path) -> Iterator[_Job]:
    for op in ("kda", "kda_step"):
        for implementation in registered(op):
            name = implementation.name
            if not options.on_gpu and name in WITH_KERNELS:
                continue  # the interpreter would take an hour; a GPU takes seconds
            yield _Job(_shown(name, op), _of_implementation(name, op, options))
    for file in FAITHFUL:
        if file.needs == "cpu" or options.on_gpu:
            yield _Job(file.name, _of_file(file.name, file.file, file.says, options, capture))
            if options.on_gpu:
                yield _Job(f"{file.name}, timed", _of_timed(file.name, file.file, options, capture), alone=True)


def _of_implementation(name: str, op: str, options: Options) -> Run:
    subject = Subject(name, op=op)

    def run(children: Children, idle: Idle) -> Row:
        sizes = served_sizes(name, GPU_SIZES if options.on_gpu else SEED_SIZES)
        return _seeds(children, subject, _conditions(options, sizes, probes_of(op)), options, _shown(name, op),
                      "kda2's own")  # fmt: skip

    return run


def _of_file(name: str, file: Path, says: str, options: Options, capture: Path) -> Run:
    subject = Subject.of_file(file)

    def run(children: Children, idle: Idle) -> Row:
        on = _conditions(options, GPU_SIZES if options.on_gpu else CHEAT_SIZES, probes_of("kda"))
        return _seeds(children, subject, on, options, name, says)

    return run


def _of_timed(name: str, file: Path, options: Options, capture: Path) -> Run:
    subject = Subject.of_file(file)

    def run(children: Children, idle: Idle) -> Row:
        on = _conditions(options, {}, (), str(capture))
        verdict = timed.latency(children, {"it": subject}, "it", on, _SAMPLES)[0]["it"]
        return Row(f"{name}, timed", "faithful", "its clock is believed", "", **_refused([verdict]))

    return run


def _seeds(
    children: Children, subject: Subject, on: Conditions, options: Options, name: str, says: str
) -> Row:  # fmt: skip
    """All probes for many seeds in a row; the first refusal ends it."""
    row, largest = Row(name, "faithful", says, ""), (0.0, "")
    try:
        with Child(children, limits=on.limits) as child:
            for seed in range(options.seed, options.seed + options.seeds):
                interview = Interview(child, subject, dataclasses.replace(on, seed=seed))
                for probe, result in interview.ask(on.families):
                    if not result["ok"]:
                        margin, quantity = _worst(result)
                        gates = {result["gate"] or "numerics": _number(margin)}
                        where = f"{probe}, {quantity}, seed {seed}"
                        return dataclasses.replace(row, gates=gates, on=where, why=str(result.get("says", "")))
                    if result["quantities"]:
                        margin, quantity = _worst(result)
                        largest = max(largest, (margin, f"{probe}, {quantity}, seed {seed}"))
    except Ended as e:
        return dataclasses.replace(row, gates={"process": None}, why=str(e))
    return dataclasses.replace(row, on=f"{largest[1]}: {largest[0]:.2f} of its limit")


# --- in common ---


def _conditions(
    options: Options, sizes: Mapping[str, Any], probes: tuple[str, ...] = (), capture: str | None = None
) -> Conditions:
    return Conditions(
        arch=90, device=options.device, capture=capture, tokens=None, families=probes, sizes=sizes, seed=options.seed,
        limits=Limits(SILENCE_S[options.kind]),
    )  # fmt: skip


def _timed_call(options: Options, folder: Path) -> Path:
    """The call on which clocks are tried."""
    file = folder / "timed.safetensors"
    problem = dataclasses.replace(TIMED[options.kind], seed=options.seed)
    Capture(make(problem), {"made": "for the audit"}).save(file)
    return file


@contextlib.contextmanager
def _lent(children: Children, idle: Idle) -> Iterator[Child]:
    """A child that asks one mutant after another; it is kept unless it ended."""
    try:
        child = idle.get_nowait()
    except queue.Empty:
        child = Child(children, limits=Limits(60.0))
    yield child
    if child.alive:
        idle.put(child)


def names() -> list[str]:
    """Every name of the catalogue, whatever it needs."""
    own = [_shown(i.name, op) for op in ("kda", "kda_step") for i in registered(op)]
    files = [faithful.name for faithful in FAITHFUL] + [cheat.name for cheat in CHEATS]
    return [*own, *files, *MUTANTS, *(_shown(name, "kda_step") for name in STEP_MUTANTS)]


def survivors(rows: Sequence[Row]) -> list[Row]:
    """What passed and should not have, and what should have and did not."""
    return [row for row in rows if not row.ok]
