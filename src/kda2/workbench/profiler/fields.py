"""The fields of a record that come from a timing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kda2.workbench.profiler.timing import Ratio, Timing
from kda2.workbench.records import Clocks, Speed


def times(timing: Timing, burst_us: float | None, costs: Mapping[str, int]) -> dict[str, Any]:
    """Times in microseconds, and the rates that `costs` (`bytes`, `flops`) make of the median."""
    median = timing.median_us
    low, high = _quartiles(timing.device_us)
    us = {
        "median_us": median, "q25_us": low, "q75_us": high, "p95_us": timing.p95_us, "max_us": max(timing.device_us),
        "call_us": timing.median_call_us, "burst_us": burst_us,
    }  # fmt: skip
    rates = {"gbps": costs["bytes"] / median / 1e3, "tflops": costs["flops"] / median / 1e6}
    return {
        **{name: x and round(x, 3) for name, x in us.items()},
        **{name: float(f"{x:.4g}") for name, x in rates.items()},
        "samples": len(timing.device_us),
        "host_paced": timing.host_paced or None,
    }


def _quartiles(us: Sequence[float]) -> tuple[float, float]:
    """The first and the third, never beyond what was measured."""
    if len(us) == 1:
        return us[0], us[0]
    low, _, high = statistics.quantiles(us, n=4, method="inclusive")
    return low, high


def speed(ratio: Ratio | None) -> Speed | None:
    """A ratio as it is recorded."""
    if ratio is None:
        return None
    return Speed(low=round(ratio.low, 4), value=round(ratio.value, 4), high=round(ratio.high, 4))


def clocks(timing: Timing, state: Mapping[str, Any]) -> Clocks | None:
    """The readings of the SMs' clock, and what the driver said meanwhile; None where the clock was not read."""
    if not timing.sm_mhz:
        return None
    mhz = [round(x, 1) for x in timing.sm_mhz]
    return Clocks(before_mhz=mhz[0], after_mhz=mhz[-1], low_mhz=min(mhz), high_mhz=max(mhz), **state)
