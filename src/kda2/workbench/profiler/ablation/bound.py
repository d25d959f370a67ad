"""What a kernel is bound by, from what was measured of it: a pure function, and the rule in words.

1. launches    as many empty launches take at least half of the time, or the host needs longer to enqueue the call than
               the device to run it.
2. memory      the bytes that the kernel is given, moved once at the measured copy rate, take 60 % of the time or more;
   arithmetic  so do the operations that it must do, at the rate of the multiprocessors that have a program. The
               larger share names the bound.
3. scaling     neither ceiling is near, so programs are added: one to each multiprocessor, then as many as fit on it at
               once. If a program more costs half of what the first did, or more, they compete for issue slots, pipes
               or shared memory: arithmetic. If it costs less, they wait: latency.
4. latency     only one program fits, or there is one for each multiprocessor at most: none shares a multiprocessor, so
               each waits on its own chain of steps.

A call without launches to be seen has no programs to add. It is latency if half the heads take 80 % of its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Name = Literal["memory", "arithmetic", "latency", "launches", "unclear"]
# Past this share of a ceiling less than 1.7 times can be gained without doing less.
NEAR = 0.6
# Beyond this no memory has moved the bytes: datasheets promise 13 % more than a large copy reaches.
CACHED = 1.15
# The share of empty launches from which they dominate.
DOMINATES = 0.5
# Half the parallel work that takes this share of the time or more was not shared out.
SAME = 0.8
# The price of a program more, in units of the first, from which programs compete.
COMPETE = 0.5


@dataclass(frozen=True)
class Floor:
    """The least microseconds that something allows, and what it was counted from."""

    us: float
    counted: str


@dataclass(frozen=True)
class Measured:
    """Of a call, or of one stage by itself; None where it is not known.

    `us` is on the device; `call_us` the host's time for the call, `host_paced` as `Timing` has it. `launches` are its
    kernels and `empty_us` the time of as many empty ones. `memory` and `arithmetic` are floors. `programs` are CTAs of
    the largest launch, `resident` how many of them fit on one of `sms` multiprocessors at once. `one_us` is that launch
    with one program to a multiprocessor, `more_us` with `more` of them, at most as many as fit. `half_us` is the time
    of the call with half the heads or sequences.
    """

    us: float
    call_us: float | None = None
    host_paced: bool = False
    launches: int | None = None
    empty_us: float | None = None
    memory: Floor | None = None
    arithmetic: Floor | None = None
    programs: int | None = None
    resident: int | None = None
    sms: int | None = None
    one_us: float | None = None
    more_us: float | None = None
    more: float | None = None
    half_us: float | None = None

    @property
    def used(self) -> float:
        """The share of multiprocessors that have a program."""
        return min(1.0, self.programs / self.sms) if self.programs and self.sms else 1.0


@dataclass(frozen=True)
class Bound:
    """What binds, and the sentences that show it."""

    name: Name
    evidence: tuple[str, ...]


def classify(m: Measured) -> Bound:
    """The bound by the rule above; "unclear" where too little was measured to say."""
    evidence = [*_launch_words(m), *_share_words(m)]
    if _launches_dominate(m):
        return Bound("launches", tuple(evidence))
    shares = _shares(m)
    near = [name for name in shares if shares[name] >= NEAR]
    if near:
        return Bound(max(near, key=lambda name: shares[name]), tuple(evidence))
    name, words = _by_scaling(m)
    return Bound(name, (*evidence, *words))


def _launches_dominate(m: Measured) -> bool:
    empty = m.empty_us is not None and m.empty_us >= DOMINATES * m.us
    return empty or m.host_paced or (m.call_us is not None and m.call_us > m.us)


def _launch_words(m: Measured) -> list[str]:
    words = []
    if m.empty_us is not None and m.launches:
        kernels = "1 empty launch takes" if m.launches == 1 else f"{m.launches} empty launches take"
        words.append(f"{kernels} {m.empty_us:.1f} us, {m.empty_us / m.us:.0%} of {m.us:.1f}")
    if m.host_paced:
        words.append("it makes more launches than the device's queue holds, so the device waits for the host")
    elif m.call_us is not None and m.call_us > m.us:
        words.append(
            f"the host takes {m.call_us:.1f} us to enqueue what the device does in {m.us:.1f}: called one by one, the "
            "host sets the pace; a CUDA graph would not"
        )
    return words


def _shares(m: Measured) -> dict[Name, float]:
    """Floors over the time; arithmetic has only the multiprocessors that have a program."""
    shares: dict[Name, float] = {}
    if m.memory is not None and m.memory.us <= CACHED * m.us:
        shares["memory"] = m.memory.us / m.us
    if m.arithmetic is not None:
        shares["arithmetic"] = m.arithmetic.us / m.used / m.us
    return shares


def _share_words(m: Measured) -> list[str]:
    words = []
    if m.memory is not None:
        cached = "" if m.memory.us <= CACHED * m.us else ": the cache serves them, or it does not touch them all"
        words.append(f"{m.memory.counted} take {m.memory.us:.1f} us, {m.memory.us / m.us:.0%} of the time{cached}")
    if m.arithmetic is not None:
        where = "" if m.used == 1.0 else f" on the {m.used:.0%} of multiprocessors that have a program"
        us = m.arithmetic.us / m.used
        words.append(f"{m.arithmetic.counted} take {us:.1f} us{where}, {us / m.us:.0%} of the time")
    return words


def _by_scaling(m: Measured) -> tuple[Name, list[str]]:
    if m.one_us is not None and m.more_us is not None and m.more is not None and m.more > 1:
        return _by_adding(m, m.one_us, m.more_us, m.more)
    if m.programs and m.sms and m.programs <= m.sms:
        why = (
            f"its {m.programs} programs have {m.sms} multiprocessors: each waits on its own chain, or they are too few"
        )
        return "latency", [why]
    if m.resident == 1:
        return "latency", ["one program at a time fits on a multiprocessor: it waits on its own chain"]
    if m.half_us is None or m.programs:
        return "unclear", ["neither ceiling is near, and nothing was timed that tells waiting from competing"]
    said = f"half as much parallel work takes {m.half_us:.1f} us, {m.half_us / m.us:.2f} of the time"
    if m.half_us >= SAME * m.us:
        return "latency", [f"{said}: each part waits on its own chain of steps, or there are too few of them"]
    return "unclear", [f"{said}, and no launch was seen whose programs could be counted"]


def _by_adding(m: Measured, one: float, more_us: float, more: float) -> tuple[Name, list[str]]:
    launch = m.empty_us / m.launches if m.empty_us is not None and m.launches else 0.0
    price = (more_us - one) / max(one - launch, 0.1 * one) / (more - 1)
    said = (
        f"one program on each multiprocessor takes {one:.1f} us, {more:.3g} take {more_us:.1f}: "
        f"one more costs {price:.2f} of the first"
    )
    if price >= COMPETE:
        return "arithmetic", [f"{said}, so they compete for issue slots, pipes or shared memory"]
    return "latency", [f"{said}, so each waits on its own chain"]
