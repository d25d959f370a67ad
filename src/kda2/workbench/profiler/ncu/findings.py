"""What is wrong with a kernel, from its counters: each finding with its number, its place, its cause and a remedy.

A rule whose figure is n/a finds nothing; `not_collected` says which counters were missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from kda2.workbench.profiler.ncu.figures import FIGURES
from kda2.workbench.profiler.ncu.metrics import ISSUING, SAMPLES, STALLS, Stall
from kda2.workbench.profiler.ncu.model import Finding, Instruction, KernelProfile
from kda2.workbench.profiler.ncu.rules import BUSY, RULES, Rule
from kda2.workbench.profiler.ncu.seen import Seen

Bound = Literal["memory", "compute", "latency"]
# Below this share of a warp's time a stall is one of many.
STALL = 20.0
# An instruction with less of the samples than this is not what to look at first.
HOT = 10.0
# Severities by weight: a quarter of the time, and what a measurement can just tell.
_HIGH, _MEDIUM = 0.25, 0.05


def bound(kernel: KernelProfile) -> Bound | None:
    """What holds the kernel back: the memory system or the arithmetic, if either is busy for most of the time; else
    latency. None where the counters for it are n/a."""
    seen = Seen(kernel)
    compute, memory = seen["compute"], seen["memory"]
    if compute is None or memory is None:
        return None
    if max(compute, memory) < BUSY:
        return "latency"
    return "memory" if memory >= compute else "compute"


def findings(kernel: KernelProfile) -> list[Finding]:
    """What costs time in this launch: first what bounds it, then by weight, the heaviest first."""
    seen = Seen(kernel)
    found = [_by_rule(rule, seen) for rule in RULES if rule.finds(seen)]
    found += _stalls(seen)
    found += _hot(seen)
    return [*_bound(seen), *sorted(found, key=lambda finding: -finding.weight)]


def _finding(
    seen: Seen, metric: tuple[str, str, str], value: float, limit: tuple[Literal["above", "below"], float],
    words: tuple[str, str], weight: float, at: Instruction | None = None,
) -> Finding:  # fmt: skip
    """`metric` is its name, what it is and its unit; `words` are the cause and the remedy."""
    weight = min(max(weight, 0.0), 1.0)
    return Finding(
        kernel=seen.kernel.short_name, launch=seen.kernel.launch, metric=metric[0], what=metric[1], unit=metric[2],
        value=value, comparison=limit[0], threshold=limit[1], cause=words[0], suggestion=words[1], weight=weight,
        severity="high" if weight >= _HIGH else "medium" if weight >= _MEDIUM else "low",
        source=None if at is None else at.source, instruction=None if at is None else at.text,
    )  # fmt: skip


def _by_rule(rule: Rule, seen: Seen) -> Finding:
    figure, value = FIGURES[rule.figure], seen[rule.figure]
    assert value is not None  # a rule finds nothing in what is n/a
    at = _most(seen.kernel, rule.place) if rule.place else None
    metric = (figure.formula, figure.what, figure.unit)
    words = (rule.cause(seen), rule.suggestion)
    return _finding(seen, metric, value, (rule.comparison, rule.threshold), words, rule.weight(seen), at)


def _most(kernel: KernelProfile, count: Callable[[Instruction], float]) -> Instruction | None:
    """The instruction with most of something, if any has some of it."""
    most = max(kernel.instructions, key=count, default=None)
    return most if most is not None and count(most) > 0 else None


_LEVELS = {"dram": "DRAM", "l2": "L2", "l1": "L1 and shared memory"}
_REMEDY = {
    "memory": "Move fewer bytes through it, or spread them better over time.",
    "compute": "Do less work, or move it to a pipe that is idle.",
    "latency": "Overlap more: longer pipelines, more warps, fewer barriers; the stalls below say what is waited for.",
}


def _bound(seen: Seen) -> Iterator[Finding]:
    kind = bound(seen.kernel)
    if kind is None:
        return
    busiest = max("memory", "compute", key=lambda name: seen.known(name))
    if kind == "memory":
        levels = {name: value for name in _LEVELS if (value := seen[name]) is not None}
        level = max(levels, key=lambda name: levels[name], default=None)
        cause = "It is bound by memory" + (f", most of all by {_LEVELS[level]}." if level else ".")
    elif kind == "compute":
        cause = "It is bound by arithmetic."
    else:
        cause = "It is bound by latency: neither memory nor arithmetic is busy."
    figure = FIGURES[busiest]
    metric = (figure.formula, figure.what, figure.unit)
    limit: Literal["above", "below"] = "below" if kind == "latency" else "above"
    yield _finding(seen, metric, seen.known(busiest), (limit, BUSY), (cause, _REMEDY[kind]), 1.0)


def _stalls(seen: Seen) -> Iterator[Finding]:
    """Reasons that take a good part of a warp's time, where schedulers have slots left that they cost."""
    metrics = seen.kernel.metrics
    total = sum(metrics.get(name, 0.0) for name in (*ISSUING, *(stall.counter for stall in STALLS)))
    if not total or not seen.idles:
        return
    for stall in STALLS:
        share = 100 * metrics.get(stall.counter, 0.0) / total
        if share >= STALL:
            at = _most(seen.kernel, lambda instruction, stall=stall: instruction.metrics.get(stall.sampled, 0.0))  # type: ignore[misc]
            metric = (f"{stall.counter} / sum of all", f"the share of time stalled for {stall.cycles}", "%")
            words = (f"{stall.cause} ({metrics[stall.counter]:.3g} cycles an instruction.)", stall.suggestion)
            yield _finding(seen, metric, share, ("above", STALL), words, seen.slack * share / 100, at)


def _hot(seen: Seen) -> Iterator[Finding]:
    """Single instructions at which a good part of all samples were taken."""
    kernel = seen.kernel
    total = sum(instruction.metrics.get(SAMPLES, 0.0) for instruction in kernel.instructions)
    for instruction in kernel.instructions:
        share = 100 * instruction.metrics.get(SAMPLES, 0.0) / total if total else 0.0
        reason = _reason(instruction)
        if share >= HOT and reason is not None:
            metric = (SAMPLES, f"the share of samples at one instruction (mostly {reason.cycles})", "%")
            words = (_read_as(reason), reason.suggestion)
            yield _finding(seen, metric, share, ("above", HOT), words, seen.slack * share / 100, instruction)


def _read_as(reason: Stall) -> str:
    """The cause; a scoreboard's is set by an earlier instruction than the one that waits."""
    return reason.cause + (" What it waits for stands further up." if "scoreboard" in reason.cycles else "")


def _reason(instruction: Instruction) -> Stall | None:
    most = max(STALLS, key=lambda stall: instruction.metrics.get(stall.sampled, 0.0))
    return most if most.sampled in instruction.metrics else None
