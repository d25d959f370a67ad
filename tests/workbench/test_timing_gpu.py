"""Timing on a GPU: hosts that fall behind, work that events do not see, a neighbour, and the SMs' clock."""

from __future__ import annotations

import time

import pytest
import torch

from kda2.workbench.profiler import environment
from kda2.workbench.profiler.neighbour import Neighbour
from kda2.workbench.profiler.timing import burst, compare, interleave

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)


def test_a_host_that_falls_behind_costs_no_device_time() -> None:
    """It was quick while warming up, so that the first sleeps of the device are too short."""
    x, calls = torch.zeros(1, device=GPU), 0

    def falls_behind() -> None:
        nonlocal calls
        calls += 1
        if calls > 10 and calls % 2:
            time.sleep(3e-3)
        x.add_(1)

    timing = interleave({"x": [falls_behind]}, samples=20, where=GPU, warmup=10)["x"]
    assert max(timing.call_us) > 3000
    assert max(timing.device_us) < 1000
    assert not timing.host_paced


def test_more_launches_than_the_queue_holds_are_said_to_be_paced_by_the_host() -> None:
    x = torch.zeros(1, device=GPU)
    calls = {"many": [lambda: [x.add_(1) for _ in range(5000)]], "one": [lambda: x.add_(1)]}
    timings = interleave(calls, samples=3, where=GPU)
    assert timings["many"].host_paced and not timings["one"].host_paced
    assert timings["many"].median_us > 1000


def test_a_kernel_against_itself_is_inconclusive() -> None:
    x = torch.randn(4096, 4096, device=GPU)
    timings = interleave({"a": [lambda: x.mul_(1.0)], "b": [lambda: x.mul_(1.0)]}, samples=200, where=GPU)
    ratio = compare(timings["a"], timings["b"])
    assert ratio.verdict == "inconclusive", ratio


def test_a_burst_sees_what_runs_on_another_stream() -> None:
    elsewhere, x = torch.cuda.Stream(GPU), torch.zeros(1, device=GPU)

    def hides() -> None:
        with torch.cuda.stream(elsewhere):
            torch.cuda._sleep(2_000_000)
        x.add_(1)

    seen = interleave({"hides": [hides]}, samples=20, where=GPU)["hides"]
    assert burst(hides, 10, GPU) > 500 > seen.median_us


def test_the_sms_clock_is_read_from_begin_to_end() -> None:
    x = torch.zeros(1, device=GPU)
    timing = interleave({"x": [lambda: x.add_(1)]}, samples=60, where=GPU)["x"]
    assert len(timing.sm_mhz) == 4
    assert all(200 < mhz < 4000 for mhz in timing.sm_mhz)
    assert max(timing.sm_mhz) < 1.1 * min(timing.sm_mhz)


def test_a_neighbour_takes_bandwidth_from_a_copy() -> None:
    neighbour = Neighbour(GPU)
    source = torch.zeros(64 * 2**20, dtype=torch.int32, device=GPU)
    target = torch.empty_like(source)
    calls = {"copy": [lambda: target.copy_(source)]}
    alone = interleave(calls, samples=30, where=GPU)["copy"]
    beside = interleave(calls, samples=30, where=GPU, neighbour=neighbour)["copy"]
    assert neighbour.gbps > 100
    assert beside.median_us > 1.1 * alone.median_us


def test_the_driver_tells_the_state_of_this_gpu() -> None:
    with environment.watched(GPU) as found:
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            torch.cuda._sleep(1_000_000)
            torch.cuda.synchronize(GPU)
    assert found["mem_mhz"] > 100 and 0 < found["temperature_c"] < 120
