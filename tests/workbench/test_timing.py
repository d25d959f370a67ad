"""Timing: turns in a shuffled order, comparisons that find no difference where none is and the one that is, whatever
the clock does, and the wall clock beside the events."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable

import pytest
import torch

from kda2.errors import InvalidValue
from kda2.workbench.profiler import timing
from kda2.workbench.profiler.environment import state
from kda2.workbench.profiler.timing import Ratio, Timing, burst, compare, interleave

CPU = torch.device("cpu")
TICK_US = 0.032


def test_timing_takes_turns_and_rotates_inputs() -> None:
    order: list[str] = []
    calls = {name: [lambda s=f"{name}{i}": order.append(s) for i in range(3)] for name in "ab"}
    timings = interleave(calls, samples=6, where=CPU, warmup=1)
    timed = order[6:]
    assert [int(x[1]) for x in timed] == [0, 1, 2] * 4  # every call takes the next set
    assert len(timings["a"].device_us) == len(timings["b"].device_us) == 6
    assert timings["a"].wall_us is not None and timings["a"].wall_us >= sum(timings["a"].device_us)


def test_every_other_turn_is_the_one_before_backwards() -> None:
    order: list[str] = []
    calls = {name: [lambda name=name: order.append(name)] for name in "abc"}

    def turns(seed: int) -> list[str]:
        order.clear()
        interleave(calls, samples=40, where=CPU, warmup=1, seed=seed)
        return ["".join(order[i : i + 3]) for i in range(3, len(order), 3)]

    first = turns(0)
    assert all(there == back[::-1] for there, back in zip(first[::2], first[1::2], strict=True))
    assert set(first) == {"".join(x) for x in itertools.permutations("abc")}
    assert first == turns(0) != turns(1)


def test_timing_tells_slow_from_fast() -> None:
    timings = interleave({"slow": [lambda: time.sleep(2e-3)], "fast": [lambda: None]}, samples=20, where=CPU)
    assert timings["slow"].median_us >= 2000
    assert compare(timings["slow"], timings["fast"]).verdict == "faster"
    assert compare(timings["fast"], timings["slow"]).verdict == "slower"


def test_a_slow_one_takes_fewer_turns() -> None:
    calls = {"slow": [lambda: time.sleep(2e-3)], "fast": [lambda: None]}
    timings = interleave(calls, samples=60, where=CPU, limit_s=0.05)
    assert 20 <= len(timings["slow"].device_us) <= 26
    assert len(timings["fast"].device_us) == 60
    assert compare(timings["slow"], timings["fast"]).turns == len(timings["slow"].device_us)


def test_device_time_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is still at work when the host is done."""

    class Clock(timing._Wall):
        def time(self, name: str, call: timing.Call) -> timing._Sample:
            call()
            return lambda: 1e6 if name == "slow" else 1.0, 1.0

    monkeypatch.setattr(timing, "_Wall", Clock)
    timings = interleave({"slow": [lambda: None], "fast": [lambda: None]}, samples=60, where=CPU, limit_s=22.5)
    assert len(timings["slow"].device_us) == 23
    assert len(timings["fast"].device_us) == 60


class Weather:
    """What a device does to the time of a call: a factor for the `n`-th call of a run, the `first` of its turn or not,
    of the implementation that ran just before (`again`) or not."""

    def __init__(self, seed: int, calls: int) -> None:
        self.rng, self.calls, self.wander = random.Random(seed), calls, 0.0
        self.at, self.phase = self.rng.randrange(calls), self.rng.uniform(0.0, 2.0 * math.pi)

    def quiet(self, n: int, first: bool, again: bool) -> float:
        return 1.0

    def drifts(self, n: int, first: bool, again: bool) -> float:
        return 1.0 + 0.2 * n / self.calls

    def jumps(self, n: int, first: bool, again: bool) -> float:
        return 1.15 if n > self.at else 1.0

    def wanders(self, n: int, first: bool, again: bool) -> float:
        self.wander = 0.95 * self.wander + self.rng.gauss(0.0, 0.015)
        return math.exp(self.wander)

    def beats(self, n: int, first: bool, again: bool) -> float:
        return 1.0 + 0.03 * math.sin(2.0 * math.pi * n / 7.3 + self.phase)

    def beats_with_the_turns(self, n: int, first: bool, again: bool) -> float:
        return 1.0 + 0.03 * math.sin(math.pi * n + self.phase)

    def favours_the_first(self, n: int, first: bool, again: bool) -> float:
        return 0.95 if first else 1.0

    def favours_who_has_just_run(self, n: int, first: bool, again: bool) -> float:
        return 0.95 if again else 1.0

    def hiccups(self, n: int, first: bool, again: bool) -> float:
        return 1.0 + (self.rng.expovariate(1.0) if self.rng.random() < 0.05 else 0.0)

    def everything(self, n: int, first: bool, again: bool) -> float:
        each = (self.drifts, self.jumps, self.wanders, self.beats, self.favours_the_first, self.hiccups)
        return math.prod(factor(n, first, again) for factor in each)


WEATHERS = [name for name in vars(Weather) if not name.startswith("_")]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ratio]:
    """`simulated(weather, seed, a_us, b_us)`: B against A, timed by a simulated clock of 32 ns ticks and 1 % noise."""

    def run(weather: str, seed: int, a_us: float, b_us: float, turns: int = 200) -> Ratio:
        rng, factor = random.Random(seed), getattr(Weather(seed, 2 * turns), weather)
        cost, counter, last = {"a": a_us, "b": b_us}, itertools.count(), [""]

        class Clock(timing._Wall):
            def warm(self, name: str, call: timing.Call) -> None:
                pass

            def time(self, name: str, call: timing.Call) -> timing._Sample:
                n = next(counter)
                us = cost[name] * factor(n, n % 2 == 0, last[0] == name) * rng.gauss(1.0, 0.01)
                last[0] = name
                ticks = math.floor(us / TICK_US + rng.random())  # the call begins anywhere within a tick
                return lambda: ticks * TICK_US, 1.0

        monkeypatch.setattr(timing, "_Wall", Clock)
        timings = interleave({name: [lambda: None] for name in cost}, turns, CPU, seed=seed)
        return compare(timings["a"], timings["b"])

    return run


SEEDS = range(50)


@pytest.mark.parametrize("us", [3.0, 100.0])
@pytest.mark.parametrize("weather", WEATHERS)
def test_a_against_a_is_inconclusive(weather: str, us: float, simulated: Callable[..., Ratio]) -> None:
    found = [simulated(weather, seed, us, us) for seed in SEEDS]
    assert sum(r.verdict != "inconclusive" for r in found) <= 1
    assert sum(r.low <= 1.0 <= r.high for r in found) >= 44


@pytest.mark.parametrize("us", [3.0, 100.0])
@pytest.mark.parametrize("weather", WEATHERS)
def test_three_per_cent_are_found(weather: str, us: float, simulated: Callable[..., Ratio]) -> None:
    assert sum(simulated(weather, seed, 1.03 * us, us).verdict == "faster" for seed in SEEDS) >= 49
    assert sum(simulated(weather, seed, us, 1.03 * us).verdict == "slower" for seed in SEEDS) >= 49


@pytest.mark.parametrize("weather", WEATHERS)
def test_a_few_turns_claim_nothing_false(weather: str, simulated: Callable[..., Ratio]) -> None:
    found = [simulated(weather, seed, 100.0, 100.0, turns=20) for seed in SEEDS]
    assert sum(r.verdict != "inconclusive" for r in found) <= 2


def test_a_fixed_order_would_take_the_place_in_the_turn_for_a_difference(
    simulated: Callable[..., Ratio], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "orders_of", lambda names, seed: itertools.repeat(list(names)))
    assert {simulated("favours_the_first", seed, 100.0, 100.0).verdict for seed in range(10)} == {"slower"}


def test_the_value_is_the_ratio_of_times() -> None:
    a, b = Timing((30.0,) * 40, ()), Timing((20.0,) * 40, ())
    assert compare(a, b) == Ratio(pytest.approx(1.5), pytest.approx(1.5), pytest.approx(1.5), 40)
    assert compare(b, a).verdict == "slower"


def test_turns_are_compared_and_not_medians() -> None:
    """The clock halves in the middle of the run; only the turns say that B takes 3 % longer."""
    noise = random.Random(0)
    a = [100.0 * (2.0 if i >= 100 else 1.0) * noise.gauss(1.0, 1e-3) for i in range(200)]
    b = [1.03 * us * noise.gauss(1.0, 1e-3) for us in a]
    r = compare(Timing(tuple(a), ()), Timing(tuple(b), ()))
    assert r.value == pytest.approx(1 / 1.03, rel=1e-3) and r.high - r.low < 2e-3


def test_an_outlier_moves_nothing() -> None:
    a = Timing((100.0,) * 200, ())
    b = Timing((*(100.0,) * 190, *(9000.0,) * 10), ())
    assert compare(a, b).value == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("low", "high", "turns", "verdict"),
    [
        (1.011, 1.05, 20, "faster"),
        (1.009, 1.05, 20, "inconclusive"),  # less than 1 % is not ruled out
        (1.011, 1.05, 19, "inconclusive"),
        (0.95, 0.989, 20, "slower"),
        (0.95, 0.995, 20, "inconclusive"),
        (1.001, 1.002, 1000, "inconclusive"),  # certain, and nothing
    ],
)
def test_verdicts(low: float, high: float, turns: int, verdict: str) -> None:
    assert Ratio(low, (low + high) / 2, high, turns).verdict == verdict


@pytest.mark.parametrize("turns", [1, 2, 3, 19])
def test_too_few_turns_say_nothing(turns: int) -> None:
    r = compare(Timing((200.0,) * turns, ()), Timing((100.0,) * turns, ()))
    assert (r.value, r.verdict, r.turns) == (pytest.approx(2.0), "inconclusive", turns)


def test_no_turn_is_no_comparison() -> None:
    with pytest.raises(InvalidValue, match="timings must be of at least one turn each, got 0 and 1 samples"):
        compare(Timing((), ()), Timing((1.0,), ()))


def test_a_call_that_takes_no_tick_is_compared_too() -> None:
    r = compare(Timing((1.0,) * 40, ()), Timing((0.0,) * 40, ()))
    assert r.verdict == "faster" and math.isfinite(r.high)


def test_p95_needs_a_thousand_samples() -> None:
    assert Timing(tuple(map(float, range(999))), ()).p95_us is None
    assert Timing(tuple(map(float, range(1000))), ()).p95_us == pytest.approx(949.5, abs=1)


def test_a_burst_is_the_wall_clocks_time_of_a_call() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        time.sleep(1e-3)

    us = burst(call, 5, CPU)
    assert calls == 5 and 1000 <= us < 100_000


@pytest.mark.parametrize("count", [0, -1])
def test_a_burst_has_a_call(count: int) -> None:
    with pytest.raises(InvalidValue, match="count must be at least 1"):
        burst(lambda: None, count, CPU)


def test_what_the_driver_says_is_summed_up() -> None:
    lines = ["2619, 0x0000000000000001, 41, 120.50", "2619, 0x0000000000000004, 55, 690.1", "2500, 0x24, 54, [N/A]"]
    assert state([*lines, "", "No devices were found"]) == {
        "mem_mhz": 2500.0,
        "slowed_by": ["power cap", "temperature, by software"],
        "temperature_c": 55.0,
        "power_w": 690.1,
    }
    assert state(["[N/A], 0x0, [N/A], [N/A]"]) == {"slowed_by": []}
    assert state([]) == {}
