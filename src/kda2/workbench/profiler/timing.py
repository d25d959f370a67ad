"""Latency: several implementations in one loop, turn by turn, on inputs that have left the cache.

On a GPU a call is timed by CUDA events around it. Before each one the device is put to sleep for longer than the host
needs to enqueue the call, so that the events measure the device alone; the host's time is kept apart as `call_us`.
A sample whose device woke too early is taken again. On the CPU both are the wall clock.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kda2 import device

Call = Callable[[], Any]
P95_SAMPLES = 1000
# A sleeping GPU counts clock cycles; no part kda2 knows runs faster than this: a sleep lasts as asked or longer.
CYCLES_PER_US = 2000.0
# A call that a sleeping device's queue cannot hold is late however long the sleep: it is given up after so many tries.
_TRIES = 5
# Samples that a call gets however slow it is.
_FEWEST = 20
_BOOTSTRAPS = 400


@dataclass(frozen=True)
class Timing:
    """The samples of one implementation, in microseconds. `host_paced`: the call has more launches than the device's
    queue holds, so that its time on the device holds waits for the host."""

    device_us: tuple[float, ...]
    call_us: tuple[float, ...]
    host_paced: bool = False

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
    """How many times faster B is than A: a 95 % bootstrap interval of the ratio of medians around its value."""

    low: float
    value: float
    high: float

    @property
    def verdict(self) -> str:
        """ "faster", "slower", or "inconclusive" if the interval holds 1."""
        return "inconclusive" if self.low <= 1.0 <= self.high else "faster" if self.value > 1.0 else "slower"


def compare(a: Timing, b: Timing, seed: int = 0) -> Ratio:
    """B's speed relative to A's (their medians, A over B), both measured in the same interleaved run."""
    rng = random.Random(seed)
    ratios = sorted(
        statistics.median(rng.choices(a.device_us, k=len(a.device_us)))
        / statistics.median(rng.choices(b.device_us, k=len(b.device_us)))
        for _ in range(_BOOTSTRAPS)
    )
    tail = _BOOTSTRAPS // 40
    return Ratio(ratios[tail], a.median_us / b.median_us, ratios[-1 - tail])


def input_sets(bytes_per_set: int, where: torch.device) -> int:
    """How many sets of inputs to rotate so that each has left the L2 cache before its next turn."""
    if where.type != "cuda":
        return 1
    return 1 + 2 * device.gpu(where.index or 0).l2_bytes // max(bytes_per_set, 1)


def interleave(
    calls: Mapping[str, Sequence[Call]], samples: int, where: torch.device, warmup: int = 5, limit_s: float = math.inf
) -> dict[str, Timing]:
    """Time each implementation `samples` times, in turn. `calls[name]` holds one call per input set.

    Every call takes the next input set, whoever it belongs to, so that none finds its inputs warmed by another. An
    implementation whose calls have taken `limit_s` seconds, of the host or of the device, is passed over once it has 20
    samples.
    """
    clock = _Cuda(where) if where.type == "cuda" else _Wall()
    for name, own in calls.items():
        for i in range(max(warmup, len(own))):
            clock.warm(name, own[i % len(own)])
    device_us: dict[str, list[float]] = {name: [] for name in calls}
    call_us: dict[str, list[float]] = {name: [] for name in calls}
    turn = 0
    for i in range(samples):
        timed = []
        for name, own in calls.items():
            if i >= _FEWEST and max(sum(call_us[name]), sum(device_us[name])) > limit_s * 1e6:
                continue
            sample = None
            while sample is None:
                sample = clock.time(name, own[turn % len(own)])
                turn += 1
            timed.append((name, sample))
        clock.synchronize()
        for name, (read, host) in timed:
            device_us[name].append(read())
            call_us[name].append(host)
    return {name: Timing(tuple(device_us[name]), tuple(call_us[name]), name in clock.host_paced) for name in calls}


# A sample: how to read the device's time once it is done, and the host's time.
_Sample = tuple[Callable[[], float], float]


class _Wall:
    """The CPU's clock: a call has ended when it returns."""

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


class _Cuda:
    """CUDA events around each call on the device's current stream."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.host_us: dict[str, float] = {}
        self.late: dict[str, int] = {}
        self.host_paced: set[str] = set()

    def warm(self, name: str, call: Call) -> None:
        self.synchronize()
        start = time.perf_counter()
        call()
        self.host_us[name] = (time.perf_counter() - start) * 1e6  # the last warm-up's, when nothing compiles any more
        self.late[name] = 0
        self.synchronize()

    def time(self, name: str, call: Call) -> _Sample | None:
        """A sample, or None if the device woke up before the call was enqueued; the next try sleeps longer."""
        with torch.cuda.device(self.where):
            before, after = _event(), _event()
            if name not in self.host_paced:
                torch.cuda._sleep(int((1.5 * self.host_us[name] + 20.0) * CYCLES_PER_US))
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
        return lambda: before.elapsed_time(after) * 1e3, host

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
