"""The first call of a new process: empty kernel caches, CUDA initialised, modules imported, inputs made.

`python -m kda2.workbench.profiler.cold` is the child; it reads {op, case, impl, device, capture} as JSON from stdin and
prints what it measured as its last line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kda2.workbench.profiler import bench, environment
from kda2.workbench.profiler.peers import find
from kda2.workbench.profiler.problems import oracle, relative_error
from kda2.workbench.records import BenchRecord

TIMEOUT_S = 570.0
# Where the libraries measured here keep compiled kernels between processes.
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "FLA_CACHE_DIR", "XDG_CACHE_HOME")


def run(plan: bench.Plan, say: Callable[[str], None]) -> Iterator[BenchRecord]:
    """One record for each case and implementation, `case` marked cold."""
    stamp = environment.machine(plan.where) | {"run": environment.new_run(), "suite": plan.suite.suite}
    peers = bench.available(plan.impls, say)
    for raw in plan.cases:
        case = bench.typed_case(plan.suite.op, raw)
        for peer in peers:
            task: dict[str, Any] = {"op": plan.suite.op, "case": raw, "impl": peer.name, "device": str(plan.where)}
            task["capture"] = None if plan.capture is None else str(plan.capture)
            result = _in_new_process(task)
            limit = plan.suite.max_rel_err
            status = result.get("status") or bench.status_of(result["rel_err"], limit)
            ok = status == "ok"
            yield BenchRecord(
                **stamp,
                utc=environment.utc_now(),
                case=case.model_dump(mode="json") | {"cold": True},
                impl=peer.name,
                median_us=round(result["first_call_us"], 1) if ok else None,
                samples=1 if ok else 0,
                rel_err={name: e for name, e in result.get("rel_err", {}).items() if e < float("inf")},
                status=status,
                version=peer.version,
                source=peer.source,
            )


def _in_new_process(task: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kda2-cold-") as empty:
        env = os.environ | {name: os.path.join(empty, name.lower()) for name in _CACHES}
        try:
            done = subprocess.run(
                [sys.executable, "-m", __spec__.name], input=json.dumps(task), env=env, text=True,
                capture_output=True, timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"status": f"unsupported(no answer within {TIMEOUT_S:.0f} s)"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"status": f"unsupported(the process ended with {done.returncode}: {last[:300]})"}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def _child(task: dict[str, Any]) -> dict[str, Any]:
    where = torch.device(task["device"])
    case, capture = bench.typed_case(task["op"], task["case"]), task["capture"]
    problem = bench.problem_of(case, where, bench.SEED, None if capture is None else Path(capture))
    want = oracle(problem)  # before the clock: it also initialises the device and its libraries
    bound = find(task["impl"]).bind(problem)
    with torch.no_grad():
        _synchronize(where)
        start = time.perf_counter()
        result = bound.call()
        _synchronize(where)
        seconds = time.perf_counter() - start
        got = problem.owned(bound.read(result))
    return {
        "first_call_us": seconds * 1e6,
        "rel_err": {name: float(f"{relative_error(x, want[name]):.4g}") for name, x in got.items()},
    }


def _synchronize(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


if __name__ == "__main__":
    print(json.dumps(_child(json.load(sys.stdin))))
