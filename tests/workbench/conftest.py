"""A ladder that is not there: code, numerics and latencies from formulas, so that what the loop makes of them can be
tested anywhere, and fast."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loop_events import FAMILIES, quiet

from kda2 import device
from kda2.testing import Problem, make
from kda2.workbench import judge, loop
from kda2.workbench.capture import Capture
from kda2.workbench.loop import Options, Outcome
from kda2.workbench.profiler.timing import Timing
from kda2.workbench.records import Verdict
from kda2.workbench.verifier import timed
from kda2.workbench.verifier.code import not_run
from kda2.workbench.verifier.subject import Subject

# Microseconds of a subject, by its impl and configurations.
Clock = Callable[[Subject], float]


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`simulated_gpu(clock, wrong)` makes the loop believe in one GPU whose kernels take what `clock` says; `wrong`
    subjects fail their numerics."""
    return partial(_install, monkeypatch)


def _install(monkeypatch: pytest.MonkeyPatch, clock: Clock, wrong: Callable[[Subject], bool] = lambda _: False) -> None:

    def numerics(children: Any, subject: Subject, on: Any, heard: Any, parts: int) -> Verdict:
        if not wrong(subject):
            return Verdict(stage="L4", outcome="pass", evidence={"families": {}, "on": "simulated"})
        quantity = {"ok": False, "says": "o is off", "relative_l2": 1.0, "limit": 0.1, "element_limit": 1.0}
        family = {"ok": False, "margin": 9.0, "quantities": {"o": quantity | {"worst": None, "worst_rms_off": None}}}
        return Verdict(stage="L4", outcome="fail", evidence={"families": {"random": family}, "on": "simulated"})

    def latency(children: Any, subjects: Mapping[str, Subject], baseline: str, on: Any, samples: int = 200) -> Any:
        timings = {name: timing(clock(subject)) for name, subject in subjects.items()}
        shares = {"prepare": 0.1, "state": 0.8, "output": 0.1}
        found = {}
        for name, measured in timings.items():
            parts = {stage: share * measured.median_us for stage, share in shares.items()}
            known = timed.Standing(name, subjects[name], list(measured.device_us), list(measured.call_us))
            known.evidence = {"stages_us": parts, timed.REFILLED: {"ok": True, "margin": 0.1, "quantities": {}}}
            found[name] = known.verdict((baseline, None if name == baseline else timings[baseline]), None, 0.0)
        return found, timings

    machine = {"device": "NVIDIA Simulated", "driver": "1", "torch": "2", "triton": "3", "commit": None}
    monkeypatch.setattr(loop.device, "gpus", lambda: [device.Gpu("NVIDIA Simulated", 90, 132, 0, 0)])
    monkeypatch.setattr(loop.environment, "machine", lambda where: machine)
    _install_code(monkeypatch)
    monkeypatch.setattr(judge.stages, "numerics", numerics)
    monkeypatch.setattr(judge.timed, "latency", latency)


def _install_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """L0 to L2 pass; no child is started. The smaller a stage's BV the fewer instructions it has, in more CTAs."""

    def code(child: Any, subject: Subject, on: Any) -> list[Verdict]:
        l0, l2 = Verdict(stage="L0", outcome="pass"), Verdict(stage="L2", outcome="pass")
        if subject.configs is None:
            return [l0, *not_run(("L1", "L2"), "plain torch")]
        stages = {stage: _machine_code(config) for stage, config in subject.configs.items()}
        return [l0, Verdict(stage="L1", outcome="pass", evidence={"arch": 90, "stages": stages}), l2]

    monkeypatch.setattr(judge.stages, "code", code)
    monkeypatch.setattr(judge.Judge, "_builder", lambda self: nullcontext())


def _machine_code(config: Mapping[str, int]) -> dict[str, Any]:
    groups = {"LDL": 0, "STL": 0, "HMMA": 8, "HGMMA": 0, "tcgen05.mma": 0}
    return {
        "ctas": 512 // config["BV"], "num_warps": config["num_warps"], "instructions": 10 * config["BV"], "trips": 1,
        "bytes": 1, "registers": 64, "shared": 1024, "spills": 0, "sass_hash": str(sorted(config.items())),
        "occupancy": {"ctas": 2, "warps": 0.25, "limit": "registers"}, "groups": groups, "arch": 90,
        "versions": {"triton": "3", "ptxas": "12.8"}, "artifacts": {"cubin": "0" * 64},
    }  # fmt: skip


@pytest.fixture
def simulated_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code and numerics that pass at once, without a GPU: for tests of what happens around them."""

    def numerics(children: Any, subject: Subject, on: Any, heard: Any, parts: int) -> Verdict:
        return Verdict(stage="L3", outcome="pass", evidence={"families": {}, "on": "simulated", "seed": on.seed})

    _install_code(monkeypatch)
    monkeypatch.setattr(judge.stages, "numerics", numerics)


def timing(us: float) -> Timing:
    """Two hundred samples around a median, with a per mille of noise."""
    rng = random.Random(round(us * 1000))
    return Timing(tuple(us * rng.gauss(1.0, 1e-3) for _ in range(200)), (us,) * 200)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capture") / "tiny.safetensors"
    Capture(make(Problem(T=20, H=1, HV=1, K=32, V=32)), {"layer": "none"}).save(path)
    return path


@pytest.fixture(scope="session")
def outcome(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("run")
    return loop.run(Options(folder, 90, inputs, families=FAMILIES, rounds=2, width=2, trials=1, seed=1), quiet)
