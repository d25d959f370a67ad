"""The child of `verify_candidate`: a task as JSON on stdin, one JSON line for each family judged on stdout."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kda2
from kda2.contract import KernelConfig
from kda2.testing import FAMILIES, Comparison, Problem, Verdict, checked, verify, verify_call
from kda2.testing.oracle import Outputs
from kda2.workbench.capture import Capture
from kda2.workbench.verifier.numerics import CAPTURE


def runner(impl: str, configs: dict[str, dict[str, int]] | None) -> Callable[..., Outputs]:
    """The candidate as a function of `kda2.kda`'s arguments."""
    if configs is None:
        return partial(kda2.kda, impl=impl)
    from kda2.ops.kda import triton

    chosen = {stage: KernelConfig.from_dict(config) for stage, config in configs.items()}
    return lambda **kwargs: triton.kda(checked(kwargs), chosen)


def plain(verdict: Verdict) -> dict[str, Any]:
    """A verdict as evidence: per quantity the error, its limit and the worst element; JSON without infinities."""
    return {
        "ok": verdict.ok,
        "margin": _finite(verdict.margin),
        "quantities": {c.quantity: _comparison(c) for c in verdict.comparisons},
    }


def _comparison(c: Comparison) -> dict[str, Any]:
    return {
        "ok": c.ok,
        "relative_l2": _finite(c.relative_l2),
        "limit": c.limit,
        "worst": str(c.worst) if c.worst is not None else None,
        "worst_rms_off": _finite(c.worst.rms_off) if c.worst is not None else None,
        "element_limit": c.element_limit,
        "says": c.explain(),
    }


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def main() -> None:
    task = json.load(sys.stdin)
    # what kernels or libraries print must not mix with the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = runner(task["impl"], task["configs"])

    def answer(name: str, verdict: Verdict) -> None:
        print(json.dumps({"name": name, "result": plain(verdict)}), file=answers, flush=True)

    with torch.no_grad():
        capture = Capture.load(Path(task["capture"])).to(task["device"])
        if task["tokens"] is not None:
            capture = capture.first(task["tokens"])
        answer(CAPTURE, verify_call(run, CAPTURE, capture.kwargs))
        problem = Problem(**task["sizes"], device=task["device"], seed=task["seed"])
        for name in task["families"]:
            answer(name, verify(run, FAMILIES[name], problem))


if __name__ == "__main__":
    main()
