"""The ladder from the parent's side: each stage asks a child process and turns what it says, or how it ended, into a
verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from kda2 import device
from kda2.dispatch import capability
from kda2.ops.kda import spec
from kda2.testing import FAMILIES
from kda2.workbench.capture import Capture
from kda2.workbench.profiler.timing import Timing, compare
from kda2.workbench.records import Verdict
from kda2.workbench.verifier import policy
from kda2.workbench.verifier.code import COMPILED, RECORDED, not_run
from kda2.workbench.verifier.foreign import Changed, source_of
from kda2.workbench.verifier.latency import REFILLED
from kda2.workbench.verifier.numerics import BROKEN, CAPTURE, CHANGED, NEEDS_GPU, REFUSED
from kda2.workbench.verifier.process import Child, Children, Ended, Limits, elapsed
from kda2.workbench.verifier.subject import FILE, Subject

Heard = Callable[[str], None]
# Implementations whose kernels no interpreter runs on a CPU, and what they are written in.
_COMPILED = {"hopper": "Gluon"}
_CODE: tuple[Literal["L0"], Literal["L1"], Literal["L2"]] = ("L0", "L1", "L2")


@dataclass(frozen=True)
class Conditions:
    """What subjects are judged on: the captured call (None for none), its first `tokens` (None: all), probe families
    and their sizes (fields of `kda2.testing.Problem`), the architecture to build for, and where to run; see `of`."""

    arch: int
    device: str
    capture: str | None
    tokens: int | None
    families: tuple[str, ...]
    sizes: Mapping[str, Any]
    seed: int
    limits: Limits = Limits()  # noqa: RUF009 - frozen
    variant_tokens: int | None = None
    file_sizes: Mapping[str, Any] = field(default_factory=dict)

    def of(self, subject: Subject, derived: bool) -> Conditions:
        """The conditions of one subject: a file gets sizes of its own and the whole captured call, what was derived
        from another candidate `variant_tokens` of it, and an implementation that serves some sizes only gets those."""
        if subject.impl == FILE:
            return replace(self, tokens=None, sizes=self.file_sizes or self.sizes)
        own = replace(self, sizes=served_sizes(subject.impl, self.sizes))
        return replace(own, tokens=self.variant_tokens) if derived else own

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def probes(self) -> tuple[str, ...]:
        """The families, after the captured call if there is one."""
        return (*([CAPTURE] if self.capture is not None else []), *self.families)


def served_sizes(impl: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of probes with K and V replaced by those that an implementation serves, if it serves only some."""
    limits, found = capability("kda", impl), dict(sizes)
    if limits is not None and {"K", "V"} <= found.keys():
        found["K"], found["V"] = limits.channels(found["K"], found["V"])
    return found


def code(child: Child, subject: Subject, on: Conditions) -> list[Verdict]:
    """L0, L1 and L2."""
    task = {
        "kind": "code", "subject": subject.plain(), "arch": on.arch, "capture": on.capture, "device": on.device,
        "sizes": dict(on.sizes), "seed": on.seed,
    }  # fmt: skip
    start, found, phase = time.perf_counter(), list[Verdict](), ""
    try:
        for answer in child.ask(task):
            if "phase" in answer:
                phase = answer["phase"]
            else:
                found.append(Verdict.model_validate(answer["verdict"]))
    except Ended as e:
        found += _ended_early(len(found), phase, e, start)
    return found


def _ended_early(done: int, phase: str, e: Ended, start: float) -> list[Verdict]:
    """Verdicts on the stages of code that a process left without one when it ended."""
    left: tuple[Literal["L0", "L1", "L2"], ...] = _CODE[done:]
    says = f"the process ended while {phase or (COMPILED if done else 'its code was read')}: {e}"
    if not left:
        return []
    if phase == RECORDED:  # launches that are only recorded leave garbage, which host code may stumble over
        return not_run(left, says)
    return [_failed(left[0], {"ended": says}, start), *not_run(left[1:], "the process ended")]


def numerics(children: Children, subject: Subject, on: Conditions, heard: Heard, parts: int = 1) -> Verdict:
    """L3 on the CPU, L4 on a GPU, the probes shared by `parts` children. `heard` is told the name of each probe when it
    has been answered."""
    stage: Literal["L3", "L4"] = "L4" if on.on_gpu else "L3"
    probes = on.families if subject.stage else on.probes
    if (language := _compiled_only(subject, on)) is not None:
        return not_run((stage,), f"no interpreter runs {language} kernels")[0]
    interpreted = subject.impl in (FILE, "triton") and not on.on_gpu
    task = {
        "kind": "numerics", "subject": subject.plain(), "probes": probes, "capture": on.capture, "tokens": on.tokens,
        "sizes": dict(on.sizes), "device": on.device, "seed": on.seed,
    }  # fmt: skip
    start = time.perf_counter()

    def child() -> Child:
        return Child(children, interpreted=interpreted, limits=on.limits)

    results, ended = _answers(child, task, probes, parts, heard)
    evidence: dict[str, Any] = {"families": results, "seed": on.seed, "on": _where(on, interpreted)}
    if ended is not None:
        return _failed(stage, evidence | {"ended": ended}, start)
    for name, result in results.items():
        if not result["ok"] and name in FAMILIES:
            result["probes"] = FAMILIES[name].probes
    return Verdict(stage=stage, outcome=_outcome(results, probes), evidence=evidence, seconds=elapsed(start))


def _answers(
    child: Callable[[], Child], task: Mapping[str, Any], probes: Sequence[str], parts: int, heard: Heard
) -> tuple[dict[str, Any], str | None]:
    """The answers by probe, and how a child ended if one did. One child gets all probes at once; of several, each takes
    the next one when it is done with the last."""
    results: dict[str, Any] = {}
    ended: list[str] = []
    shares = iter([tuple(probes)] if parts == 1 else [(name,) for name in probes])

    def work() -> None:
        some: tuple[str, ...] = ()
        try:
            with child() as mine:
                for some in shares:  # a list's iterator, which threads may share
                    if ended:
                        return
                    for answer in mine.ask({**task, "probes": some}):
                        results[answer["name"]] = answer["result"]
                        heard(answer["name"])
        except Ended as e:
            unanswered = next((name for name in some if name not in results), "the last probe")
            ended.append(f"the process ended before {unanswered!r} was answered: {e}")

    with ThreadPoolExecutor(parts) as pool:
        for future in [pool.submit(work) for _ in range(parts)]:
            future.result()
    return {name: results[name] for name in probes if name in results}, ended[0] if ended else None


def _compiled_only(subject: Subject, on: Conditions) -> str | None:
    """The language of kernels that cannot run here."""
    if subject.impl in _COMPILED and not on.on_gpu:
        return _COMPILED[subject.impl]
    if subject.file is None or subject.sha256 is None or on.on_gpu:
        return None
    try:
        return policy.without_interpreter(source_of(Path(subject.file), subject.sha256))
    except Changed:  # its process says so
        return None


def _outcome(results: Mapping[str, Mapping[str, Any]], probes: tuple[str, ...]) -> str:
    """Pass if every probe passed; a refusal is neither a pass nor a mistake, and nor is the judge's own failure."""
    wrong = [r for r in results.values() if not r["ok"]]
    if any(r.get("ended") == CHANGED for r in wrong):
        return "invalid"
    if any(r.get("ended") not in (REFUSED, NEEDS_GPU, BROKEN) for r in wrong):
        return "fail"
    if needing := [r for r in wrong if r["ended"] == NEEDS_GPU]:
        return f"not_run(it needs a GPU: {needing[0]['says']})"
    if wrong:
        return "inconclusive"
    if not probes:
        return "not_run(no probe was asked for)"
    return "pass" if len(results) == len(probes) else "fail"


def _where(on: Conditions, interpreted: bool) -> str:
    place = f"{on.device}, Triton's interpreter" if interpreted else on.device
    if on.capture is None:
        return place
    return place + (f", first {on.tokens} tokens of the capture" if on.tokens is not None else ", the whole capture")


def latency(
    children: Children, subjects: Mapping[str, Subject], baseline: str, on: Conditions
) -> tuple[dict[str, Verdict], dict[str, Timing]]:
    """L6 of several subjects that passed their numerics, in one child, and the timings behind the verdicts. If that
    ends, each is timed in a child of its own, beside the baseline: one must not take the others with it."""
    assert on.capture is not None
    start = time.perf_counter()
    answers, ended = _measured(children, subjects, on)
    if ended is not None and len(subjects) > 1:
        answers, ended = {}, None
        for name in subjects:
            pair = {n: subjects[n] for n in dict.fromkeys((baseline, name)) if n in subjects}
            found, how = _measured(children, pair, on)
            answers[name] = found[name] if how is None else {"name": name, "ended": how}
    floor = datasheet_floor_us(Capture.load(Path(on.capture)), torch.device(on.device))
    timings = {name: _timing(a["timing"]) for name, a in answers.items() if "timing" in a}
    verdicts = {}
    for name in subjects:
        answer = answers.get(name, {"ended": ended or "it gave no answer"})
        if "ended" in answer:
            verdicts[name] = _failed("L6", {"ended": f"the process that timed it ended: {answer['ended']}"}, start)
        elif "raised" in answer:
            verdicts[name] = _failed("L6", {"ended": f"it raised {answer['raised']}"}, start)
        else:
            base = timings.get(baseline) if name != baseline else None
            verdicts[name] = _timed(answer, timings[name], (baseline, base), floor, start)
    return verdicts, {name: t for name, t in timings.items() if verdicts[name].passed}


def _measured(
    children: Children, subjects: Mapping[str, Subject], on: Conditions
) -> tuple[dict[str, dict[str, Any]], str | None]:
    """What a child says of each subject, and how it ended if it did before it had said all."""
    task = {
        "kind": "latency", "subjects": {name: s.plain() for name, s in subjects.items()}, "capture": on.capture,
        "device": on.device,
    }  # fmt: skip
    answers: dict[str, dict[str, Any]] = {}
    try:
        with Child(children, limits=on.limits) as child:
            for answer in child.ask(task):
                answers[answer["name"]] = answer
    except Ended as e:
        return answers, str(e)
    return answers, None


def _timed(
    answer: Mapping[str, Any], timing: Timing, base: tuple[str, Timing | None], floor: float | None, start: float
) -> Verdict:
    wall = time.perf_counter() - start
    evidence: dict[str, Any] = {
        "median_us": round(timing.median_us, 3),
        "p95_us": timing.p95_us,
        "max_us": round(max(timing.device_us), 3),
        "call_us": round(timing.median_call_us, 3),
        "samples": len(timing.device_us),
        "host_paced": timing.host_paced,
        "floor_us": floor and round(floor, 3),
        "stages_us": answer["stages"],
        REFILLED: answer["refilled"],
    }
    if base[1] is not None:
        ratio = compare(base[1], timing)
        evidence["against"] = base[0]
        evidence["speed"] = {"low": ratio.low, "value": ratio.value, "high": ratio.high, "verdict": ratio.verdict}
    why = _impossible(timing, floor, wall)
    if not answer["refilled"]["ok"]:
        says = next((q["says"] for q in answer["refilled"]["quantities"].values() if not q["ok"]), "")
        why = f"after the timing, with other contents in the same tensors, its answer was wrong: {says}"
    if why:
        evidence["ended"] = why
    return Verdict(stage="L6", outcome="invalid" if why else "pass", evidence=evidence, seconds=elapsed(start))


def _impossible(timing: Timing, floor: float | None, wall_s: float) -> str:
    """Why a time cannot be, "" if it can: below what the datasheet allows, or longer in sum than the parent waited."""
    if floor is not None and timing.median_us < floor:
        return f"{timing.median_us:.1f} us is below the {floor:.1f} us that the device's datasheet allows"
    if sum(timing.device_us) > wall_s * 1e6:
        return f"its samples add up to more than the {wall_s:.1f} s that the measurement took"
    return ""


def datasheet_floor_us(capture: Capture, where: torch.device) -> float | None:
    """The least time that the device's datasheet allows for the captured call; None where nobody has looked it up."""
    ceilings = device.gpu(where.index or 0).ceilings if where.type == "cuda" else None
    case = capture.case()
    return None if ceilings is None else ceilings.floor_us(spec.bytes_moved(case), spec.flops(case), datasheet=True)


def _timing(plain: Mapping[str, Any]) -> Timing:
    return Timing(tuple(plain["device_us"]), tuple(plain["call_us"]), plain["host_paced"])


def _failed(stage: Literal["L0", "L1", "L2", "L3", "L4", "L6"], evidence: Mapping[str, Any], start: float) -> Verdict:
    return Verdict(stage=stage, outcome="fail", evidence=dict(evidence), seconds=elapsed(start))
