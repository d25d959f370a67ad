"""Runs a suite: every case on every implementation, checked against the fp64 oracle and only then timed, turn by turn.
A probe family's errors are all that is wanted of it.

Records are written one by one as they are measured, so that stopping a run loses nothing it has finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda2 import device
from kda2.errors import InvalidType, InvalidValue
from kda2.workbench import files
from kda2.workbench.profiler import captured, environment, families, fields
from kda2.workbench.profiler.peers import OWN, Bound, NotServed, Peer, find
from kda2.workbench.profiler.problems import (
    CapturedCase,
    Case,
    FamilyCase,
    PrefillCase,
    Problem,
    StepCase,
    make_problem,
    oracle,
    relative_error,
)
from kda2.workbench.profiler.suites import CAPTURED, Suite, case_name
from kda2.workbench.profiler.timed import TimedRun, timed
from kda2.workbench.profiler.timing import compare, input_sets
from kda2.workbench.profiler.verdict import Finding, above, judge
from kda2.workbench.records import BenchRecord

SEED = 20251126
# The largest share of free memory that rotated inputs may take.
_INPUT_SHARE = 0.25


@dataclass(frozen=True)
class Plan:
    """What a run measures; `capture` is the file of a captured call. `preset` is only noted. With `itself` every call
    is timed twice in each turn and compared with itself, with `neighbour` all are timed beside a copy."""

    suite: Suite
    cases: tuple[dict[str, Any], ...]
    impls: tuple[str, ...]
    samples: int
    where: torch.device
    capture: Path | None = None
    preset: str = "default"
    itself: bool = False
    neighbour: bool = False


class Writer:
    """Appends records to DIR/<suite>.jsonl, each on the disk before the next is measured."""

    def __init__(self, folder: Path, suite: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{suite}.jsonl"
        files.check_appendable(self.path)

    def __call__(self, record: BenchRecord) -> None:
        files.append_line(self.path, record.line())


@dataclass
class _Contender:
    """One implementation on one case: bound to each input set, with what is known of it so far."""

    peer: Peer
    bound: list[Bound]
    rel_err: dict[str, float]
    max_abs_err: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    status: str = "ok"


def run(plan: Plan, say: Callable[[str], None]) -> Iterator[BenchRecord]:
    """Measure case by case and yield a record for each implementation. `say` receives plain sentences on what is not
    measured."""
    peers = available(plan.impls, say)
    stamp = environment.machine(plan.where) | {"run": environment.new_run(), "suite": plan.suite.suite}
    for case in plan.cases:
        yield from _measure(case, plan, peers, stamp, say)


def available(names: Sequence[str], say: Callable[[str], None]) -> list[Peer]:
    """The implementations that can be imported here; the others are said plainly."""
    peers = []
    for name in names:
        try:
            peers.append(find(name))
        except NotServed as e:
            say(str(e))
    return peers


def typed_case(op: str, case: dict[str, Any]) -> Case:
    """A suite's case, checked."""
    model: type[Case] = StepCase if op == "kda_step" else PrefillCase
    if case.get("gate") == CAPTURED:
        model = CapturedCase
    elif "family" in case:
        model = FamilyCase
    try:
        return model.model_validate(case)
    except ValueError as e:
        raise InvalidValue("case", f"a {model.__name__}", f"{case}: {e}") from e


def problem_of(case: Case, where: torch.device, seed: int, capture: Path | None) -> Problem:
    """The problem of a case; that of a captured call or a family is the same for every seed, in memory of its own."""
    if isinstance(case, CapturedCase):
        assert capture is not None
        return captured.problem(case, capture, where)
    if isinstance(case, FamilyCase):
        return families.problem(case, where)
    return make_problem(case, where, seed)


def _measure(
    raw: dict[str, Any], plan: Plan, peers: Sequence[Peer], stamp: dict[str, Any], say: Callable[[str], None]
) -> Iterator[BenchRecord]:
    case = typed_case(plan.suite.op, raw)
    if isinstance(case, FamilyCase):
        yield from (_errors(peer, case, plan, stamp) for peer in peers)
        return
    try:
        problems = _problems(case, plan)
        contenders = _checked(peers, problems, plan)
    except torch.cuda.OutOfMemoryError:
        say(f"{case_name(raw)}: the inputs and the oracle do not fit in this device's memory")
        return
    fit = {c.peer.name: [b.call for b in c.bound] for c in contenders if c.status == "ok"}
    impossible = floor_us(problems[0], plan.where, datasheet=True)
    try:
        run = timed(fit, plan.samples, plan.where, impossible, plan.itself, plan.neighbour)
    except Exception as e:  # they all answered before; the other cases still count
        say(f"{case_name(raw)}: timing failed ({type(e).__name__}: {_first_line(e)})")
        return
    base = next((name for name in fit if not name.startswith(OWN)), None)
    for c in contenders:
        record = _record(c, run, base, case, problems[0], plan, stamp)
        if record.verdict is not None:
            say(_said(record))
        yield record


def _said(r: BenchRecord) -> str:
    """A verdict as a sentence."""
    if r.speed is None:
        return f"{r.name}: {r.impl}: {r.verdict}"
    interval = f"{r.speed.value:.3f}x ({r.speed.low:.3f} to {r.speed.high:.3f})"
    return f"{r.name}: {r.impl} against {r.against}: {interval}, {r.verdict}"


def _problems(case: Case, plan: Plan) -> list[Problem]:
    """As many input sets as the cache asks for and the memory allows."""
    where = plan.where
    first = problem_of(case, where, SEED, plan.capture)
    bytes_per_set = sum(x.nbytes for x in first.tensors.values())
    wanted = input_sets(bytes_per_set, where)
    if where.type == "cuda":
        free, _ = torch.cuda.mem_get_info(where)
        wanted = max(1, min(wanted, int(_INPUT_SHARE * free) // bytes_per_set))
    return [first, *(problem_of(case, where, SEED + i, plan.capture) for i in range(1, wanted))]


def _checked(peers: Sequence[Peer], problems: Sequence[Problem], plan: Plan) -> list[_Contender]:
    """Every implementation held to the oracle; none serves a case that the operator itself refuses, or to which not
    even the oracle has an answer."""
    try:
        want = oracle(problems[0])
    except (InvalidValue, InvalidType) as e:
        return [_Contender(peer, [], {}, status=f"unsupported({_first_line(e)})") for peer in peers]
    if not all(bool(x.isfinite().all()) for x in want.values()):
        why = "unsupported(the oracle's own answer holds NaN or infinity)"
        return [_Contender(peer, [], {}, status=why) for peer in peers]
    return [_check(peer, problems, want, plan) for peer in peers]


def _check(peer: Peer, problems: Sequence[Problem], want: dict[str, Tensor], plan: Plan) -> _Contender:
    """Bind an implementation and compare its first answer with the oracle's."""
    contender = _Contender(peer, [], {})
    try:
        with torch.no_grad():
            contender.bound = [peer.bind(p) for p in problems]
            got, contender.peak_bytes = _first_answer(contender.bound[0], problems[0], plan.where)
        owned = problems[0].owned(got)
        contender.rel_err = {name: relative_error(x, want[name]) for name, x in owned.items()}
        contender.max_abs_err = {name: absolute_error(x, want[name]) for name, x in owned.items()}
        contender.status = status_of(contender.rel_err, plan.suite.max_rel_err)
    except Exception as e:  # a peer may fail in any way; the run goes on and the record says how
        contender.status = _refusal(e)
    return contender


def _refusal(e: Exception) -> str:
    if isinstance(e, torch.cuda.OutOfMemoryError):
        return "oom"
    return f"unsupported({e})" if isinstance(e, NotServed) else f"unsupported({type(e).__name__}: {_first_line(e)})"


def _errors(peer: Peer, case: FamilyCase, plan: Plan, stamp: dict[str, Any]) -> BenchRecord:
    """How far off an implementation is on a probe family, however far that is."""
    if plan.where.type == "cuda":
        torch.cuda.synchronize(plan.where)  # a device that one implementation broke is no fault of the next
    found = families.Errors()
    try:
        found = families.judge(peer, case, plan.where)
        status = found.wrong or status_of(found.rel_err, plan.suite.max_rel_err)
    except Exception as e:
        status = _refusal(e)
    return BenchRecord(
        **stamp,
        utc=environment.utc_now(),
        case=case.model_dump(mode="json"),
        impl=peer.name,
        rel_err=found.rel_err,
        limit=found.limit or None,
        status=status,
        version=peer.version,
        source=peer.source,
    )


def _first_answer(bound: Bound, problem: Problem, where: torch.device) -> tuple[dict[str, Tensor], int | None]:
    """The outputs of one call, and the bytes it allocated (None off the GPU). A state updated in place is put back."""
    state = problem.tensors.get("state")
    before = state.clone() if state is not None else None
    bound.call()  # compiles
    held = _reset_peak(where)
    if state is not None and before is not None:
        state.copy_(before)
    result = bound.call()
    peak = torch.cuda.max_memory_allocated(where) - held if held is not None else None
    got = {name: x.clone() for name, x in bound.read(result).items()}
    if state is not None and before is not None:
        state.copy_(before)
    return got, peak


def _reset_peak(where: torch.device) -> int | None:
    """The bytes allocated now, from which a peak is counted; None off the GPU."""
    if where.type != "cuda":
        return None
    torch.cuda.synchronize(where)
    torch.cuda.reset_peak_memory_stats(where)
    return torch.cuda.memory_allocated(where)


def absolute_error(got: Tensor, want: Tensor) -> float:
    """The largest error of an element; infinite if anything is not finite or the shapes differ."""
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return math.inf
    return float((got.double() - want).abs().max()) if want.numel() else 0.0


def status_of(rel_err: dict[str, float], limit: float) -> str:
    """ "ok", or why the result is too wrong to be timed."""
    wrong = above(rel_err, limit)
    return f"unsupported(wrong result: relative error {wrong} above {limit:.0e})" if wrong else "ok"


def _first_line(e: Exception) -> str:
    lines = str(e).strip().splitlines()
    return lines[0][:300] if lines else "no message"


def floor_us(problem: Problem, where: torch.device, datasheet: bool = False) -> float | None:
    """The least time the device's measured (or datasheet) rates allow; None where nobody has measured them."""
    ceilings = device.gpu(where.index or 0).ceilings if where.type == "cuda" else None
    costs = problem.costs
    return None if ceilings is None else ceilings.floor_us(costs["bytes"], costs["flops"], datasheet)


def _record(
    c: _Contender,
    run: TimedRun,
    base: str | None,
    case: Case,
    problem: Problem,
    plan: Plan,
    stamp: dict[str, Any],
) -> BenchRecord:
    own, name = run.measured.get(c.peer.name), c.peer.name
    found = _finding(c, run, base, plan)
    status = c.status
    if own is not None and own.impossible_us is not None and own.timing.median_us < own.impossible_us:
        status = f"unsupported(invalid time: {found.verdict[len('invalid(') : -1]})" if found else status
    times: dict[str, Any] = {}
    if own is not None and status == "ok":
        times = fields.times(own.timing, own.burst_us, problem.costs)
        times |= {"speed": fields.speed(found.speed if found else None), "clocks": fields.clocks(own.timing, run.state)}
        if name in run.again:
            times["itself"] = fields.speed(compare(own.timing, run.again[name]))
    floor = floor_us(problem, plan.where)
    return BenchRecord(
        **stamp,
        **times,
        utc=environment.utc_now(),
        case=case.model_dump(mode="json"),
        impl=name,
        rel_err=_finite(c.rel_err),
        max_abs_err=_finite(c.max_abs_err) or None,
        floor_us=floor and round(floor, 3),
        peak_bytes=c.peak_bytes,
        status=status,
        against=base if found is not None and name != base else None,
        verdict=found.verdict if found else None,
        preset=None if plan.preset == "default" else plan.preset,
        neighbour_gbps=run.neighbour_gbps and round(run.neighbour_gbps, 1),
        version=c.peer.version,
        source=c.peer.source,
    )


def _finding(c: _Contender, run: TimedRun, base: str | None, plan: Plan) -> Finding | None:
    """The verdict on an implementation, against the baseline unless it is that itself."""
    wrong = above(c.rel_err, plan.suite.max_rel_err)
    if wrong:
        return Finding(f"incorrect(relative error {wrong} above {plan.suite.max_rel_err:.0e})")
    own = run.measured.get(c.peer.name)
    if own is None:
        return None
    return judge(own, None if c.peer.name == base or base is None else run.measured[base], base or "")


def _finite(errors: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{error:.4g}") for name, error in errors.items() if error < math.inf}
