"""What a pair of measurements allows to say: faster, slower, inconclusive; or incorrect or invalid, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kda2.workbench.profiler.timing import Ratio, Timing, compare

# A run in which the SMs' clock moves by more than this has no one clock that its medians belong to.
MOST_DRIFT = 0.10
# Calls back to back take as long as the longer of device and host says. A call that takes half as much again has set
# work going that its events do not see; the microseconds are for launching and waiting.
_HIDDEN, _HIDDEN_US = 1.5, 10.0


@dataclass(frozen=True)
class Measured:
    """One implementation in one run: its samples, the least microseconds that the device's datasheet allows, and what
    `burst` says of a call; None where nobody knows."""

    timing: Timing
    impossible_us: float | None = None
    burst_us: float | None = None


@dataclass(frozen=True)
class Finding:
    """`verdict` is "faster", "slower", "inconclusive", "incorrect(reason)" or "invalid(reason)"; `speed` is there only
    for the first three."""

    verdict: str
    speed: Ratio | None = None


def above(rel_err: Mapping[str, float], limit: float) -> str:
    """The relative errors that exceed `limit` or are no numbers, in words; "" if none does."""
    return ", ".join(f"{name} {error:.1e}" for name, error in rel_err.items() if not error <= limit)


def invalid(measured: Measured) -> str:
    """Why a time is no measurement of the device, "" if nothing says so."""
    timing = measured.timing
    if measured.impossible_us is not None and timing.median_us < measured.impossible_us:
        return f"{timing.median_us:.1f} us is below the datasheet's {measured.impossible_us:.1f} us"
    if timing.host_paced:
        return "more launches than the device's queue holds: the time contains waits for the host"
    if timing.wall_us is not None and sum(timing.device_us) > timing.wall_us:
        return f"its samples add up to more than the {timing.wall_us / 1e6:.2f} s that the run took"
    if timing.sm_mhz and max(timing.sm_mhz) > (1.0 + MOST_DRIFT) * min(timing.sm_mhz):
        return f"the SMs' clock moved between {min(timing.sm_mhz):.0f} and {max(timing.sm_mhz):.0f} MHz"
    most = _HIDDEN * max(timing.median_us, timing.median_call_us) + _HIDDEN_US
    if measured.burst_us is not None and measured.burst_us > most:
        return f"{measured.burst_us:.1f} us a call back to back, where its events see {timing.median_us:.1f} us"
    return ""


def judge(own: Measured, base: Measured | None, base_name: str = "the baseline") -> Finding | None:
    """The verdict of two correct implementations timed in the same run; None if there is nothing to compare a valid
    time with."""
    if why := invalid(own):
        return Finding(f"invalid({why})")
    if base is None:
        return None
    if why := invalid(base):
        return Finding(f"invalid({base_name}: {why})")
    speed = compare(base.timing, own.timing)
    return Finding(speed.verdict, speed)
