"""L6 on the CPU's clock: verdicts with intervals, and a choice that needs more than noise."""

from __future__ import annotations

import math

import pytest
import torch

from kda2.testing import Problem, make
from kda2.workbench import latency
from kda2.workbench.candidates import Proposal
from kda2.workbench.capture import Capture
from kda2.workbench.profiler.timing import Timing


def timing(us: float, spread: float = 0.1) -> Timing:
    samples = tuple(us * (1 + spread * math.sin(i * i)) for i in range(200))
    return Timing(samples, samples)


def test_candidates_are_timed_on_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "SAMPLES", 10)
    capture = Capture(make(Problem(T=6, H=1, HV=1, K=16, V=16)))
    proposals = [Proposal(name, name, None, None, "") for name in ("torch", "reference")]
    timings = latency.measure(proposals, capture, torch.device("cpu"))
    found = latency.verdicts(timings, "torch")
    assert set(found) == {"torch", "reference"}
    assert found["reference"].evidence["against"] == "torch"
    assert found["reference"].evidence["samples"] == 10
    assert "against" not in found["torch"].evidence


def test_the_baseline_stays_where_the_fastest_is_within_noise() -> None:
    assert latency.fastest({"triton": timing(10.0), "variant": timing(9.99)}, "triton") == "triton"
    assert latency.fastest({"triton": timing(10.0), "variant": timing(7.0)}, "triton") == "variant"
    assert latency.fastest({"a": timing(10.0), "b": timing(7.0)}, "triton") == "b"
