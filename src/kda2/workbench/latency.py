"""L6: the latency of candidates on the captured call, turn by turn, and which of them is fastest beyond noise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import kda2
from kda2.testing import checked
from kda2.workbench.candidates import Proposal
from kda2.workbench.capture import Capture
from kda2.workbench.profiler.timing import Timing, compare, input_sets, interleave
from kda2.workbench.records import Verdict

SAMPLES = 200
# Seconds after which a slow candidate has samples enough.
LIMIT_S = 2.0


def measure(proposals: Sequence[Proposal], capture: Capture, where: torch.device) -> dict[str, Timing]:
    """Time each candidate on copies of the capture that have left the cache."""
    size = sum(x.nbytes for x in capture.kwargs.values() if isinstance(x, torch.Tensor))
    sets = [_copy(capture, where) for _ in range(input_sets(size, where))]
    calls = {p.name: [_bound(p, own) for own in sets] for p in proposals}
    with torch.no_grad():
        return interleave(calls, SAMPLES, where, limit_s=LIMIT_S)


def _copy(capture: Capture, where: torch.device) -> Capture:
    moved = capture.to(where)
    fresh = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in moved.kwargs.items()}
    return Capture(fresh, capture.origin)


def _bound(proposal: Proposal, capture: Capture) -> Callable[[], Any]:
    if proposal.configs is None:
        return partial(kda2.kda, **capture.kwargs, impl=proposal.impl)
    from kda2.ops.kda import triton

    configs = proposal.configs
    return lambda: triton.kda(checked(capture.kwargs), configs)


def verdicts(timings: Mapping[str, Timing], baseline: str) -> dict[str, Verdict]:
    """An L6 verdict for each candidate: its time, and its speed relative to the baseline's with the interval."""
    start = time.perf_counter()
    found = {}
    for name, timing in timings.items():
        evidence: dict[str, Any] = {
            "median_us": round(timing.median_us, 3),
            "p95_us": timing.p95_us,
            "max_us": round(max(timing.device_us), 3),
            "call_us": round(timing.median_call_us, 3),
            "samples": len(timing.device_us),
            "host_paced": timing.host_paced,
        }
        if baseline in timings and name != baseline:
            ratio = compare(timings[baseline], timing)
            evidence["against"] = baseline
            evidence["speed"] = {"low": ratio.low, "value": ratio.value, "high": ratio.high, "verdict": ratio.verdict}
        seconds = round(time.perf_counter() - start, 3)
        found[name] = Verdict(stage="L6", outcome="pass", evidence=evidence, seconds=seconds)
    return found


def fastest(timings: Mapping[str, Timing], baseline: str) -> str:
    """The fastest candidate; the baseline where the fastest is not faster than it beyond noise."""
    best = min(timings, key=lambda name: timings[name].median_us)
    if baseline in timings and compare(timings[baseline], timings[best]).verdict != "faster":
        return baseline
    return best
