"""The stages of the ladder that look at a candidate's code: L0, L1 and L2. Numerics are the verifier's, times the
profiler's."""

from __future__ import annotations

import ast
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kda2 import device
from kda2.contract import Check
from kda2.ops.kda.check import Call
from kda2.workbench.candidates import TRITON, Proposal, moved_bytes
from kda2.workbench.profiler.environment import source_hash
from kda2.workbench.records import Verdict

if TYPE_CHECKING:
    from kda2.backends.triton import Launch

# Share of a device's shared memory that a kernel may take.
SHARED_SHARE = 0.95


def parse(proposal: Proposal) -> Verdict:
    """L0: the sources parse, and every configuration is one that a kernel can have."""
    start = time.perf_counter()
    home = resources.files("kda2") / "ops" / "kda" / proposal.impl
    files = [x for x in home.iterdir() if x.name.endswith(".py")] if home.is_dir() else []
    files = files or [resources.files("kda2") / "ops" / "kda" / f"{proposal.impl}.py"]
    for file in files:
        ast.parse(file.read_text(encoding="utf-8"))
    odd = [
        f"{stage} {name}={value}"
        for stage, config in (proposal.parameters() or {}).items()
        for name, value in config.items()
        if name != "num_stages" and (value < 1 or value & (value - 1))
    ]
    evidence = {"files": sorted(x.name for x in files), "source": source_hash("kda")}
    if odd:
        evidence["not_powers_of_two"] = odd
    return _verdict("L0", not odd, evidence, start)


class Builder:
    """L1 and L2: compiles stages for sm_<arch>, reads their machine code, and holds it to limits and expectations.

    A stage that two candidates share is built once. Needs a process without Triton's interpreter.
    """

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self._built: dict[tuple[Any, ...], dict[str, Any]] = {}

    def judge(self, proposal: Proposal, call: Call) -> list[Verdict]:
        """The verdicts of L1 and L2 for a candidate on `call`, whose tensors are on the meta device."""
        if proposal.impl != TRITON:
            return not_run(("L1", "L2"), "plain torch: it has no kernels of its own")
        from kda2.ops.kda import triton

        start = time.perf_counter()
        launches = triton.launches(call, proposal.configs)
        stages = {launch.stage: self._stage(launch, call) for launch in launches}
        failures = {name: stage["failure"] for name, stage in stages.items() if "failure" in stage}
        if failures:
            failed = _verdict("L1", False, {"arch": self.arch, "failures": failures}, start)
            return [failed, *not_run(("L2",), "it does not build")]
        checks = {name: _shared(stage["shared"], self.arch) for name, stage in stages.items()}
        evidence = {"arch": self.arch, "stages": stages, "checks": _plain(checks)}
        fits = _verdict("L1", all(c.ok for c in checks.values()), evidence, start)
        return [fits, _machine_code(stages)]

    def _stage(self, launch: Launch, call: Call) -> dict[str, Any]:
        """What is known of one stage's machine code, or {"failure": what the compiler said}."""
        from kda2.backends.triton.build import Build
        from kda2.workbench.builder import build_all
        from kda2.workbench.inspector import inspect

        values = ((name, x.dtype if isinstance(x, Tensor) else x) for name, x in launch.args.items())
        key = (launch.stage, launch.config, *values)
        if key not in self._built:
            (outcome,) = build_all([launch], self.arch)
            if isinstance(outcome, Build):
                code = inspect(outcome).as_dict()
                self._built[key] = {**code, "artifacts": outcome.artifacts, "versions": outcome.versions}
            else:
                self._built[key] = {"failure": outcome.words}
        trips = _chunk_trips(call, launch.args["BT"]) if launch.stage == "state" else 1
        return {**self._built[key], "ctas": launch.grid, "trips": trips, "bytes": moved_bytes(launch.args)}


def _chunk_trips(call: Call, chunk: int) -> int:
    """Chunks of the longest sequence, as far as shapes tell: a packed batch may be one sequence of all its tokens."""
    return -(-call.q.shape[1] // chunk)


def _shared(used: int, arch: int) -> Check:
    limit = device.SHARED_MEMORY_LIMIT.get(arch)
    if limit is None:
        return Check(True, f"{used} bytes of shared memory, limit of sm_{arch} unknown")
    allowed = int(SHARED_SHARE * limit)
    return Check(used <= allowed, f"{used} bytes of shared memory", f"at most {allowed}", "use smaller tiles")


def _machine_code(stages: Mapping[str, Mapping[str, Any]]) -> Verdict:
    """L2: matrix products run on tensor cores, and the assembler left no register unset."""
    start = time.perf_counter()
    checks = {}
    for name, stage in stages.items():
        checks[name] = _tensor_cores(stage["groups"])
        checks[f"{name}: registers"] = _registers_are_set(stage)
    return _verdict("L2", all(c.ok for c in checks.values()), {"checks": _plain(checks)}, start)


def _tensor_cores(groups: Mapping[str, int]) -> Check:
    products = {kind: groups[kind] for kind in ("HGMMA", "HMMA", "tcgen05.mma")}
    observed = ", ".join(f"{count} {kind}" for kind, count in products.items())
    return Check(sum(products.values()) > 0, observed, "tensor-core instructions", "widen the tiles to 16")


def _registers_are_set(stage: Mapping[str, Any]) -> Check:
    faults = [*stage["undefined_reads"], *stage["garbled_descriptors"]]
    if not faults:
        return Check(True, "every uniform register is set before it is used")
    return Check(
        False,
        f"ptxas {stage['versions']['ptxas']} has miscompiled it: {len(faults)} instructions use a uniform register "
        f"that was not set for them, the first is {faults[0]}",
        "every uniform register set before it is used",
        "do not run it, it would read memory at random: take smaller chunks or tiles, which need fewer wgmma "
        "instructions, or a newer ptxas (TRITON_PTXAS_PATH)",
    )


def _plain(checks: Mapping[str, Check]) -> dict[str, Any]:
    return {
        name: {"ok": c.ok, "observed": c.observed, "expected": c.expected, "hint": "" if c.ok else c.hint}
        for name, c in checks.items()
    }


def _verdict(stage: str, ok: bool, evidence: Mapping[str, Any], start: float) -> Verdict:
    outcome = "pass" if ok else "fail"
    seconds = round(time.perf_counter() - start, 3)
    return Verdict.model_validate({"stage": stage, "outcome": outcome, "evidence": dict(evidence), "seconds": seconds})


def not_run(stages: Sequence[str], reason: str) -> list[Verdict]:
    """The same reason for several stages."""
    return [Verdict.model_validate({"stage": stage, "outcome": f"not_run({reason})"}) for stage in stages]
