"""Latency: several implementations in one loop, turn by turn, on inputs that have left the cache.

On a GPU a call is timed by CUDA events around it. Before each one the device is put to sleep for longer than the host
needs to enqueue the call, so that the events measure the device alone; the host's time is kept apart as `call_us`.
A sample whose device woke too early is taken again. On the CPU both are the wall clock.

A device's clock drifts, jumps and beats, so samples of one implementation are no independent draws. Those of one turn
share what the device was doing: implementations are compared turn by turn.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kda2 import device
from kda2.errors import InvalidValue, KDA2Error

if TYPE_CHECKING:  # it is a Triton kernel, which not every platform has
    from kda2.workbench.profiler.neighbour import Neighbour

Call = Callable[[], Any]
P95_SAMPLES = 1000
# A speed-up below this is none: one and the same kernel differs by up to so much from where its code and buffers lie.
LEAST_EFFECT = 0.01
# Turns that a comparison needs, and samples that a call gets however slow it is.
FEWEST_TURNS = 20
# A sleeping GPU counts clock cycles; no part kda2 knows runs faster than this: a sleep lasts as asked or longer.
CYCLES_PER_US = 2000.0
# A call that a sleeping device's queue cannot hold is late however long the sleep: it is given up after so many tries.
_TRIES = 5
# A call beside which a neighbour of this length is too short is given up.
_LONGEST_BESIDE_US = 1e7
_BOOTSTRAPS = 1000
# Less than any clock resolves, so that no time is 0.
_LEAST_US = 1e-3
# Left out at each end of the resampled ratios. Blocks to draw from are few: what remains, 98 % of them, holds the truth
# in about 95 % of simulated runs.
_OUTSIDE = 0.01
# A reading of the SMs' clock: half a millisecond of sleep, beside which the launch does not count.
_READING_CYCLES = 1_000_000
_TURNS_PER_READING = 20
# A device that has just woken takes a moment to reach its clock: readings until ten agree, but no more than these.
_SETTLED, _READINGS_TO_SETTLE = 0.01, 400


@dataclass(frozen=True)
class Timing:
    """The samples of one implementation, in microseconds; the i-th is of turn i. `host_paced`: the call has more
    launches than the device's queue holds, so that its time on the device holds waits for the host.

    Of the whole run: `wall_us` is what it took on the host's clock, `sm_mhz` readings of the SMs' clock from its begin
    to its end; None and empty where they were not taken.
    """

    device_us: tuple[float, ...]
    call_us: tuple[float, ...]
    host_paced: bool = False
    wall_us: float | None = None
    sm_mhz: tuple[float, ...] = ()

    @property
    def median_us(self) -> float:
        return statistics.median(self.device_us)

    @property
    def p95_us(self) -> float | None:
        """The 95th percentile; None below 1000 samples, where it would be little more than a maximum."""
        if len(self.device_us) < P95_SAMPLES:
            return None
        return statistics.quantiles(self.device_us, n=20)[-1]

    @property
    def median_call_us(self) -> float:
        return statistics.median(self.call_us)


@dataclass(frozen=True)
class Ratio:
    """How many times faster B is than A, and the interval in which that lies; `turns` are those that both took."""

    low: float
    value: float
    high: float
    turns: int

    @property
    def verdict(self) -> str:
        """ "faster" or "slower" if the whole interval is beyond `LEAST_EFFECT`, else "inconclusive"."""
        if self.turns < FEWEST_TURNS:
            return "inconclusive"
        if self.low > 1.0 + LEAST_EFFECT:
            return "faster"
        return "slower" if self.high < 1.0 / (1.0 + LEAST_EFFECT) else "inconclusive"


def compare(a: Timing, b: Timing, seed: int = 0) -> Ratio:
    """B's speed relative to A's (time of A over time of B), both measured in the same interleaved run.

    The unit is a pair of turns, in which each stood first as often as last: there the clock's drift and the effects of
    the order cancel. The value is the interquartile mean of the units' ratios; the interval is bootstrapped from blocks
    of consecutive units.
    """
    turns = min(len(a.device_us), len(b.device_us))
    if not turns:
        raise InvalidValue("timings", "of at least one turn each", f"{len(a.device_us)} and {len(b.device_us)} samples")
    a_logs, b_logs = np.log(np.maximum([a.device_us[:turns], b.device_us[:turns]], _LEAST_US))
    logs = a_logs - b_logs
    units = logs[: turns // 2 * 2].reshape(-1, 2).mean(axis=1) if turns > 1 else logs
    rng, block = np.random.default_rng(seed), round(len(units) ** (1 / 3))
    starts = rng.integers(len(units), size=(_BOOTSTRAPS, math.ceil(len(units) / block), 1))
    drawn = ((starts + np.arange(block)) % len(units)).reshape(_BOOTSTRAPS, -1)[:, : len(units)]
    low, high = np.quantile(_middle(units[drawn]), (_OUTSIDE, 1.0 - _OUTSIDE))
    return Ratio(math.exp(low), math.exp(_middle(units)), math.exp(high), turns)


def _middle(x: Any) -> Any:
    """The mean of the middle half along the last axis: like a median it ignores outliers, and unlike one it resolves
    less than a tick of the clock."""
    rest = x.shape[-1] // 4
    return np.sort(x, axis=-1)[..., rest : x.shape[-1] - rest].mean(axis=-1)


def input_sets(bytes_per_set: int, where: torch.device) -> int:
    """How many sets of inputs to rotate so that each has left the L2 cache before its next turn."""
    if where.type != "cuda":
        return 1
    return 1 + 2 * device.gpu(where.index or 0).l2_bytes // max(bytes_per_set, 1)


def interleave(
    calls: Mapping[str, Sequence[Call]], samples: int, where: torch.device, warmup: int = 5, limit_s: float = math.inf,
    seed: int = 0, neighbour: Neighbour | None = None,
) -> dict[str, Timing]:  # fmt: skip
    """Time each implementation `samples` times, in turn. `calls[name]` holds one call per input set.

    Who comes first, and after whom, is drawn anew (from `seed`) for every other turn; the turn between has the same
    order backwards. Every call takes the next input set, whoever it belongs to, so that none finds its inputs warmed by
    another. An implementation whose calls have taken `limit_s` seconds, of the host or of the device, is passed over
    once it has 20 samples. With a `neighbour` every device time is taken while that one copies.
    """
    clock = clock_of(where, neighbour)
    for name, own in calls.items():
        for i in range(max(warmup, len(own))):
            clock.warm(name, own[i % len(own)])
    device_us: dict[str, list[float]] = {name: [] for name in calls}
    call_us: dict[str, list[float]] = {name: [] for name in calls}
    readings, orders, turn = clock.settle(), orders_of(calls, seed), itertools.count()
    start = time.perf_counter()
    for i in range(samples):
        taken = {}
        for name in next(orders):
            if i < FEWEST_TURNS or max(sum(call_us[name]), sum(device_us[name])) <= limit_s * 1e6:
                taken[name] = _take(clock, name, calls[name], turn)
        clock.synchronize()
        for name, (read, host) in taken.items():
            device_us[name].append(read())
            call_us[name].append(host)
        if i == samples - 1 or i % _TURNS_PER_READING == _TURNS_PER_READING - 1:
            readings += clock.sm_mhz()
    wall_us = (time.perf_counter() - start) * 1e6
    return {
        name: Timing(tuple(device_us[name]), tuple(call_us[name]), name in clock.host_paced, wall_us, tuple(readings))
        for name in calls
    }


def clock_of(where: torch.device, neighbour: Neighbour | None = None) -> Clock:
    """The clock of a device."""
    return _Cuda(where, neighbour) if where.type == "cuda" else _Wall()


def _take(clock: Clock, name: str, calls: Sequence[Call], turn: Iterator[int]) -> _Sample:
    """A sample of an implementation; each try takes the next of its input sets."""
    while True:
        sample = clock.time(name, calls[next(turn) % len(calls)])
        if sample is not None:
            return sample


def orders_of(names: Iterable[str], seed: int) -> Iterator[list[str]]:
    """The orders of the turns: one at random, then the same backwards."""
    rng, order = random.Random(seed), list(names)
    while True:
        rng.shuffle(order)
        yield list(order)
        yield order[::-1]


def burst(call: Call, count: int, where: torch.device) -> float:
    """Microseconds per call, by the host's clock, of `count` calls enqueued back to back and waited for.

    It holds whatever the calls set going on the device, on any stream, so that work which events do not see shows as
    the larger of this and the event's time. Inputs stay in the cache, and a host that is slower than the device sets
    the pace: it may be less than the time of a single call, or as long as the call's host time.
    """
    if count < 1:
        raise InvalidValue("count", "at least 1", str(count))
    _wait(where)
    start = time.perf_counter()
    for _ in range(count):
        call()
    _wait(where)
    return (time.perf_counter() - start) * 1e6 / count


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


# A sample: how to read the device's time once it is done, and the host's time.
_Sample = tuple[Callable[[], float], float]


class _Wall:
    """The CPU's clock: a call has ended when it returns."""

    __slots__ = ()
    host_paced: frozenset[str] = frozenset()

    def warm(self, name: str, call: Call) -> None:
        call()

    def time(self, name: str, call: Call) -> _Sample:
        start = time.perf_counter()
        call()
        us = (time.perf_counter() - start) * 1e6
        return lambda: us, us

    def synchronize(self) -> None:
        pass

    def settle(self) -> list[float]:
        return []

    def sm_mhz(self) -> list[float]:
        return []


class _Cuda:
    """CUDA events around each call on the device's current stream."""

    __slots__ = ("beside_us", "host_paced", "host_us", "late", "neighbour", "where")

    def __init__(self, where: torch.device, neighbour: Neighbour | None = None) -> None:
        self.where = where
        self.neighbour = neighbour
        self.host_us: dict[str, float] = {}
        self.beside_us: dict[str, float] = {}  # how long the neighbour has to go on
        self.late: dict[str, int] = {}
        self.host_paced: set[str] = set()

    def warm(self, name: str, call: Call) -> None:
        self.synchronize()
        start = time.perf_counter()
        call()
        self.host_us[name] = (time.perf_counter() - start) * 1e6  # the last warm-up's, when nothing compiles any more
        self.late[name] = 0
        self.synchronize()
        self.beside_us[name] = 2.0 * (time.perf_counter() - start) * 1e6

    def time(self, name: str, call: Call) -> _Sample | None:
        """A sample, or None if the device woke up before the call was enqueued (the next try sleeps longer) or its
        neighbour was done before it (the next one goes on for longer)."""
        with torch.cuda.device(self.where):
            before, after = _event(), _event()
            asleep_us = 0.0 if name in self.host_paced else 1.5 * self.host_us[name] + 20.0
            if self.neighbour is not None:
                self.neighbour.start(asleep_us + self.beside_us[name])
            if asleep_us:
                torch.cuda._sleep(int(asleep_us * CYCLES_PER_US))
            before.record()
            start = time.perf_counter()
            call()
            host = (time.perf_counter() - start) * 1e6
            after.record()
            late = before.query()
        if late and name not in self.host_paced:
            self.host_us[name] = max(self.host_us[name], host)
            self.late[name] += 1
            if self.late[name] == _TRIES:
                self.host_paced.add(name)
            return None
        self.late[name] = 0
        if self.neighbour is not None and not self.neighbour.outlived(after):
            self._prolong(name)
            return None
        return lambda: before.elapsed_time(after) * 1e3, host

    def _prolong(self, name: str) -> None:
        self.beside_us[name] *= 2.0
        if self.beside_us[name] > _LONGEST_BESIDE_US:
            raise KDA2Error(f"no copy of {_LONGEST_BESIDE_US / 1e6:.0f} s goes on for as long as {name} beside it")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)

    def sm_mhz(self) -> list[float]:
        """One reading of the SMs' clock: a sleep's cycles over its microseconds."""
        with torch.cuda.device(self.where):
            before, after = _event(), _event()
            before.record()
            torch.cuda._sleep(_READING_CYCLES)
            after.record()
            after.synchronize()
        return [_READING_CYCLES / (before.elapsed_time(after) * 1e3)]

    def settle(self) -> list[float]:
        """Wait for the clock that the device keeps under load, and read it."""
        last: list[float] = []
        for _ in range(_READINGS_TO_SETTLE):
            last = [*last[-9:], *self.sm_mhz()]
            if len(last) == 10 and max(last) <= (1.0 + _SETTLED) * min(last):
                break
        return last[-1:]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


Clock = _Wall | _Cuda
