"""L6 from the judge's side: subjects timed turn by turn, each stranger in a process of its own, with cross-checks that
no process can make for itself: the judge's own clock, the device's datasheet, and the outputs of timed calls."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda2 import device
from kda2.ops.kda import spec
from kda2.workbench.capture import Capture
from kda2.workbench.profiler.timing import FEWEST_TURNS, Timing, compare, orders_of
from kda2.workbench.records import Verdict
from kda2.workbench.verifier.conditions import Conditions
from kda2.workbench.verifier.numerics import finite, plain
from kda2.workbench.verifier.process import Child, Children, Ended, elapsed
from kda2.workbench.verifier.questions import Timed, argument_names, timed_question
from kda2.workbench.verifier.subject import FILE, Subject

SAMPLES = 200
# Seconds after which a slow subject has samples enough.
LIMIT_S = 2.0
REFILLED = "refilled inputs"
# A burst of calls lasts about so long, in seconds, and may take this many times what clock and host say of each.
_BURST_S, _BURST_SLACK, _BURST_OVERHEAD_US = 0.05, 2.0, 100.0
_MOST_BURST, _BURSTS = 2000, 3
_NO_ANSWER = "what its process said is no answer"


@dataclass
class Standing:
    """What is known of one subject. `why`: what was wrong, by the gate that saw it; `ended`: how it ended."""

    name: str
    subject: Subject
    device_us: list[float] = field(default_factory=list)
    call_us: list[float] = field(default_factory=list)
    host_paced: bool = False
    ended: str = ""
    why: dict[str, str] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def timing(self) -> Timing:
        return Timing(tuple(self.device_us), tuple(self.call_us), self.host_paced)

    def verdict(self, base: tuple[str, Timing | None], floor: float | None, start: float) -> Verdict:
        """L6, beside the baseline (name, timing); `start` is when it began."""
        if self.ended or not self.device_us:
            gate = next(iter(self.why), "process")
            evidence: dict[str, Any] = {"ended": self.ended or "it was not timed", "gate": gate}
            return Verdict(stage="L6", outcome="fail", evidence=evidence, seconds=elapsed(start))
        timing = self.timing
        evidence = {
            "median_us": round(timing.median_us, 3),
            "p95_us": timing.p95_us,
            "max_us": round(max(timing.device_us), 3),
            "call_us": round(timing.median_call_us, 3),
            "samples": len(timing.device_us),
            "host_paced": timing.host_paced,
            "floor_us": floor and round(floor, 3),
            "stages_us": {},
            **self.evidence,
        }
        if base[1] is not None:
            ratio = compare(base[1], timing)
            evidence["against"] = base[0]
            evidence["speed"] = {"low": ratio.low, "value": ratio.value, "high": ratio.high, "verdict": ratio.verdict}
        if self.why:
            evidence |= {"ended": next(iter(self.why.values())), "gate": next(iter(self.why)), "gates": dict(self.why)}
        return Verdict(stage="L6", outcome="invalid" if self.why else "pass", evidence=evidence, seconds=elapsed(start))

    @property
    def is_slow(self) -> bool:
        return max(sum(self.device_us), sum(self.call_us)) > LIMIT_S * 1e6


class _Stand:
    """One child and the subjects that it times."""

    def __init__(self, children: Children, subjects: Mapping[str, Subject], on: Conditions) -> None:
        self.child = Child(children, limits=on.limits)
        self.on = on
        self.subjects = {name: Standing(name, subject) for name, subject in subjects.items()}
        self.question: Timed = timed_question(on, next(iter(subjects.values())))

    @property
    def running(self) -> list[Standing]:
        return [s for s in self.subjects.values() if not s.ended]

    def ask(
        self, kind: str, about: Sequence[Standing], inputs: Any = None, wants: Sequence[str] = (), **task: Any
    ) -> dict[str, Any] | None:
        """What the child says, which must hold `wants`; None if it ended, which is then the end of `about` (of all if
        the process is gone)."""
        try:
            said = list(self.child.ask({"kind": kind, **task}, inputs))
        except Ended as e:
            for s in self.running:
                s.ended = f"the process that timed it ended: {e}"
                s.why["process"] = s.ended
            return None
        for line in said:
            if "ended" in line:
                at = self.subjects.get(str(line.get("name")), about[0])
                at.ended = at.why[str(line.get("gate") or "process")] = str(line["says"])
                return None
        answer = said[-1] if said else {}
        if any(name not in answer for name in wants):  # a file that knows the protocol may say anything
            about[0].ended = about[0].why["protocol"] = _NO_ANSWER
            return None
        return answer

    def answer(self, about: Standing) -> dict[str, Tensor] | None:
        """The tensors that came with what was said last; None if they are none, which ends the child."""
        try:
            return self.child.answer()
        except Ended as e:
            about.ended = about.why["protocol"] = str(e)
            return None

    def bind(self) -> None:
        first = next(iter(self.subjects.values()))
        said: list[dict[str, Any]] = []
        task = {
            "kind": "bind", "device": self.on.device,
            "subjects": {name: s.subject.plain() for name, s in self.subjects.items()},
            "arguments": argument_names(first.subject, self.on.spec), "outputs": self.question.outputs,
            "in_place": self.question.in_place, "moving": self.question.moving, "axis": self.question.axis,
        }  # fmt: skip
        try:
            said += self.child.ask(task, self.question.inputs[0])
        except Ended as e:
            for s in self.running:
                s.ended = f"the process that timed it ended: {e}"
        for line in said:
            if "ended" in line:
                self.subjects[line["name"]].ended = str(line["says"])

    def time(self, names: Sequence[str]) -> None:
        said = self.ask("time", [self.subjects[names[0]]], wants=("samples", "host_paced"), names=list(names))
        if said is None:
            return
        for name, (device_us, call_us) in said["samples"].items():
            self.subjects[name].device_us.append(float(device_us))
            self.subjects[name].call_us.append(float(call_us))
        for name in said["host_paced"]:
            self.subjects[name].host_paced = True


def latency(
    children: Children, subjects: Mapping[str, Subject], baseline: str, on: Conditions, samples: int = SAMPLES
) -> tuple[dict[str, Verdict], dict[str, Timing]]:
    """L6 of several subjects that passed their numerics, and the timings behind the verdicts.

    Files get a process each; what is kda2's own shares one. One that ends takes nobody else with it.
    """
    start = time.perf_counter()
    own = {name: s for name, s in subjects.items() if s.impl != FILE}
    groups = [*([own] if own else []), *({name: s} for name, s in subjects.items() if s.impl == FILE)]
    stands = [_Stand(children, group, on) for group in groups]
    try:
        for stand in stands:
            stand.bind()
        every = {name: s for stand in stands for name, s in stand.subjects.items()}
        at = {name: stand for stand in stands for name in stand.subjects}
        clocked = time.perf_counter()
        _turns(every, at, samples)
        wall_s = time.perf_counter() - clocked
        floor = datasheet_floor_us(on)
        for s in every.values():
            _cross_check(at[s.name], s, floor, wall_s)
    finally:
        for stand in stands:
            stand.child.close()
    timings = {name: s.timing for name, s in every.items() if not s.ended and s.device_us}
    base = timings.get(baseline)
    verdicts = {
        name: every[name].verdict((baseline, base if name != baseline else None), floor, start) for name in subjects
    }
    return verdicts, {name: t for name, t in timings.items() if verdicts[name].passed}


def _turns(every: Mapping[str, Standing], at: Mapping[str, _Stand], samples: int) -> None:
    """All samples: in every turn each subject once, in an order that changes from turn to turn."""
    order = orders_of(every, random.randrange(2**31))
    for turn in range(samples):
        left = [every[name] for name in next(order)]
        taking = [s for s in left if not s.ended and (turn < FEWEST_TURNS or not s.is_slow)]
        for stand, group in groupby(taking, key=lambda s: at[s.name]):
            if still := [s for s in group if not s.ended]:  # one of them may have ended their process
                _believing(still[0], partial(stand.time, [s.name for s in still]))


def _cross_check(stand: _Stand, s: Standing, floor: float | None, wall_s: float) -> None:
    """What the judge can see of a timing from outside."""
    if s.ended or not s.device_us:
        return
    timing = s.timing
    if floor is not None and timing.median_us < floor:
        s.why["floor"] = f"{timing.median_us:.1f} us is below the {floor:.1f} us that the device's datasheet allows"
    if sum(timing.device_us) > wall_s * 1e6:
        s.why["wall"] = f"its samples add up to more than the {wall_s:.1f} s that the measurement took"
    for check in (_burst, _timed_outputs, _refilled):
        if not s.ended:
            _believing(s, partial(check, stand, s))
    if not s.ended and s.subject.configs is not None:
        said = stand.ask("stages", [s], wants=("stages",), name=s.name)
        s.evidence["stages_us"] = said["stages"] if said else {}


def _believing(s: Standing, take: Callable[[], None]) -> None:
    """Take what a process says as what it should be; if it is something else, that is the end of it."""
    try:
        take()
    except (AttributeError, KeyError, TypeError, ValueError):
        s.ended = s.why["protocol"] = _NO_ANSWER


def _burst(stand: _Stand, s: Standing) -> None:
    """Calls back to back on the judge's own clock: what runs beside the stream that is timed shows here."""
    each = max(s.timing.median_us, s.timing.median_call_us, 1.0)
    count = int(min(max(_BURST_S * 1e6 / each, 10), _MOST_BURST))
    most, wall = _BURST_SLACK * each + _BURST_OVERHEAD_US, math.inf
    said: dict[str, Any] | None = None
    answer: dict[str, Tensor] | None = None
    for _ in range(_BURSTS):
        start = time.perf_counter()
        said = stand.ask("burst", [s], wants=("shifts",), name=s.name, count=count)
        took = (time.perf_counter() - start) * 1e6 / count
        if said is None or (answer := stand.answer(s)) is None:
            return
        wall = min(wall, took)
        if wall <= most:
            break  # the others would only tell how busy the machine is
    if said and answer and not stand.question.in_place:  # else the state has gone through all of the calls
        _judged(stand, s, said["shifts"], answer)
    s.evidence["burst_us"] = round(wall, 3)
    if wall > most:
        s.why["wall"] = (
            f"{count} calls back to back take {wall:.1f} us each on the judge's clock, where device and host say "
            f"{each:.1f}: work goes on that its clock does not see"
        )


def _timed_outputs(stand: _Stand, s: Standing) -> None:
    """The outputs of timed calls that nobody knew would be looked at."""
    said = stand.ask("finish", [s], wants=("shifts", "gates"))
    if said is None:
        return
    if s.subject.impl == FILE:
        s.why |= {str(gate): str(says) for gate, says in said["gates"].items()}
    margins = []
    for index, shifts in enumerate(said["shifts"][s.name]):
        if stand.ask("kept", [s], name=s.name, index=index) is None or (answer := stand.answer(s)) is None:
            return
        margins.append(_judged(stand, s, shifts, answer))
    if not margins:
        s.why["protocol"] = "its process kept the outputs of no timed call"
    known = [m for m in margins if m is not None]
    s.evidence["timed_outputs"] = {
        "checked": len(margins), "margin": max(known) if known and len(known) == len(margins) else None,
    }  # fmt: skip


def _judged(stand: _Stand, s: Standing, shifts: Mapping[str, Any], answer: dict[str, Tensor]) -> float | None:
    """Hold the outputs of a timed call to what is right for its contents; returns by how much of their limit they are
    off, None for what is not finite."""
    verdict = stand.question.moved(_places(shifts)).judge([answer], [])
    if not verdict.ok:
        worst = next(c for c in verdict.comparisons if not c.ok)
        s.why["timed outputs"] = f"what it returned while it was timed is wrong: {worst.explain()}"
    return finite(verdict.margin)


def _places(shifts: Mapping[str, Any]) -> dict[str, int]:
    return {str(name): int(places) for name, places in shifts.items()}


def _refilled(stand: _Stand, s: Standing) -> None:
    """Once more with other contents in the same tensors."""
    question = stand.question.other()
    if stand.ask("refill", [s], question.inputs[0], name=s.name) is None or (answer := stand.answer(s)) is None:
        return
    verdict = question.judge([answer], [])
    s.evidence[REFILLED] = plain(verdict)
    if not verdict.ok:
        worst = next(c for c in verdict.comparisons if not c.ok)
        s.why["repeat"] = (
            f"after the timing, with other contents in the same tensors, its answer was wrong: {worst.explain()}"
        )


def datasheet_floor_us(on: Conditions) -> float | None:
    """The least time that the device's datasheet allows for the timed call; None where nobody has looked it up, or the
    operator's costs are not known."""
    where = torch.device(on.device)
    ceilings = device.gpu(where.index or 0).ceilings if where.type == "cuda" else None
    if ceilings is None or on.capture is None:
        return None
    case = Capture.load(Path(on.capture)).case()
    return ceilings.floor_us(spec.bytes_moved(case), spec.flops(case), datasheet=True)
