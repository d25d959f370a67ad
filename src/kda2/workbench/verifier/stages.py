"""The ladder from the parent's side: each stage asks a child process and turns what it says, or how it ended, into a
verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from kda2.testing import FAMILIES
from kda2.workbench.records import Verdict
from kda2.workbench.verifier import policy
from kda2.workbench.verifier.code import COMPILED, RECORDED, not_run
from kda2.workbench.verifier.conditions import Conditions
from kda2.workbench.verifier.foreign import BROKEN, CHANGED, NEEDS_GPU, REFUSED, Changed, source_of
from kda2.workbench.verifier.numerics import CHEATS, MOST_DIAGNOSED, Interview
from kda2.workbench.verifier.process import Child, Children, Ended, elapsed
from kda2.workbench.verifier.questions import (
    AGAIN,
    OTHER_DTYPES,
    argument_names,
    first_probe,
    other_dtypes,
    pose,
)
from kda2.workbench.verifier.subject import FILE, Subject

Heard = Callable[[str], None]
# Implementations whose kernels no interpreter runs on a CPU, and what they are written in.
_COMPILED = {"hopper": "Gluon"}
_CODE: tuple[Literal["L0"], Literal["L1"], Literal["L2"]] = ("L0", "L1", "L2")


def code(child: Child, subject: Subject, on: Conditions) -> list[Verdict]:
    """L0, L1 and L2."""
    task = {
        "kind": "code", "subject": subject.plain(), "arguments": argument_names(subject, on.spec), "arch": on.arch,
        "capture": on.capture, "device": on.device,
    }  # fmt: skip
    start, found, phase = time.perf_counter(), list[Verdict](), ""
    inputs = pose(on, subject, first_probe(on, subject)).inputs[0] if subject.impl == FILE else None
    try:
        for answer in child.ask(task, inputs):
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


def numerics(
    children: Children, subject: Subject, on: Conditions, heard: Heard, parts: int = 1, diagnosed: int = MOST_DIAGNOSED
) -> Verdict:
    """L3 on the CPU, L4 on a GPU, the probes shared by `parts` children. `heard` is told the name of each probe when it
    has been answered."""
    stage: Literal["L3", "L4"] = "L4" if on.on_gpu else "L3"
    probes = on.families if subject.stage else on.probes
    if (language := _compiled_only(subject, on)) is not None:
        return not_run((stage,), f"no interpreter runs {language} kernels")[0]
    interpreted = subject.impl in (FILE, "triton") and not on.on_gpu
    start = time.perf_counter()

    def child() -> Child:
        return Child(children, interpreted=interpreted, limits=on.limits)

    def interview(mine: Child) -> Interview:
        return Interview(mine, subject, on, diagnosed)

    def answered(name: str) -> None:
        if name in probes:
            heard(name)

    then = other_dtypes(on, subject)
    results, ended = _answers(child, interview, probes, then, parts, answered)
    not_served = {name: results.pop(name)["says"] for name in OTHER_DTYPES if _is_refused(results.get(name))}
    evidence: dict[str, Any] = {"families": results, "seed": on.seed, "on": _where(on, interpreted)}
    evidence |= {"not_served": not_served} if not_served else {}
    if ended is not None:
        gate = "protocol" if ended[1] == "garbled" else "process"
        return _failed(stage, evidence | {"ended": ended[0], "gate": gate}, start)
    for name, result in results.items():
        if not result["ok"] and name in FAMILIES:
            result["probes"] = FAMILIES[name].probes
    return Verdict(stage=stage, outcome=_outcome(results, probes), evidence=evidence, seconds=elapsed(start))


def _answers(
    child: Callable[[], Child],
    interview: Callable[[Child], Interview],
    probes: Sequence[str],
    then: Sequence[str],
    parts: int,
    heard: Heard,
) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """The answers by probe, and how a child ended if one did, in words and by kind. One child gets all probes at once;
    of several, each takes the next one when it is done with the last."""
    results: dict[str, Any] = {}
    ended: list[tuple[str, str]] = []
    shares = iter([tuple(probes)] if parts == 1 else [(name,) for name in probes])

    def work() -> None:
        some: tuple[str, ...] = ()
        try:
            with child() as mine:
                asking = interview(mine)
                for some in shares:  # a list's iterator, which threads may share
                    if ended:
                        return
                    for name, result in asking.ask(some, then):
                        results[name] = result
                        if name in some:
                            heard(name)
        except Ended as e:
            unanswered = next((name for name in some if name not in results), "the last probe")
            ended.append((f"the process ended before {unanswered!r} was answered: {e}", e.kind))

    with ThreadPoolExecutor(parts) as pool:
        for future in [pool.submit(work) for _ in range(parts)]:
            future.result()
    order = [name for probe in probes for name in (probe, *(AGAIN if probe == probes[0] else ()))] + list(then)
    return {name: results[name] for name in order if name in results}, ended[0] if ended else None


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


def _is_refused(result: Mapping[str, Any] | None) -> bool:
    return result is not None and result.get("ended") == REFUSED


def _outcome(results: Mapping[str, Mapping[str, Any]], probes: tuple[str, ...]) -> str:
    """Pass if every probe passed; a refusal is neither a pass nor a mistake, and nor is the judge's own failure."""
    wrong = [r for r in results.values() if not r["ok"]]
    if any(r.get("ended") == CHANGED or r.get("gate") in CHEATS for r in wrong):
        return "invalid"
    if any(r.get("ended") not in (REFUSED, NEEDS_GPU, BROKEN) for r in wrong):
        return "fail"
    if needing := [r for r in wrong if r["ended"] == NEEDS_GPU]:
        return f"not_run(it needs a GPU: {needing[0]['says']})"
    if wrong:
        return "inconclusive"
    if not probes:
        return "not_run(no probe was asked for)"
    return "pass" if all(name in results for name in probes) else "fail"


def _where(on: Conditions, interpreted: bool) -> str:
    place = f"{on.device}, Triton's interpreter" if interpreted else on.device
    if on.capture is None:
        return place
    return place + (f", first {on.tokens} tokens of the capture" if on.tokens is not None else ", the whole capture")


def _failed(stage: Literal["L0", "L1", "L2", "L3", "L4", "L6"], evidence: Mapping[str, Any], start: float) -> Verdict:
    return Verdict(stage=stage, outcome="fail", evidence=dict(evidence), seconds=elapsed(start))
