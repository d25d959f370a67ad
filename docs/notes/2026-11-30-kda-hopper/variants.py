"""Whether the kernel is right, and how long it takes, before anything is measured for the records.

`right [SHARD OF]`, or `time CASE...`: a case as in CASES, options after colons, `96x8192:gate=softplus:SLOTS=5`.

To choose between sources, run it with PYTHONPATH at each of them, one after the other.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kda2.contract import KernelConfig
from kda2.ops.kda.check import Call
from kda2.ops.kda.hopper.launches import kda, key_of
from kda2.ops.kda.hopper.tuning import default_configs
from kda2.testing import Problem, make, verify_call
from kda2.testing.oracle import Outputs, checked
from kda2.workbench.profiler.timing import interleave

PACKED = {"lengths": (33, 0, 1, 500, 64, 129), "layout": "vk", "tail": 40}
RIGHT: list[dict[str, Any]] = [
    {"B": 2, "regime": "strong"},
    {"B": 2, "regime": "weak"},
    {"B": 2, "gate": "softplus"},
    {"B": 2, "gate": "softplus", "regime": "strong"},
    {"B": 2, "gate": "log"},
    {**PACKED, "regime": "strong"},
    {**PACKED, "gate": "softplus"},
    {"K": 64, "V": 64, "dtype": torch.float16},
    {"K": 64},
    {"V": 64, "regime": "strong"},
    {"g_dtype": torch.float32, "regime": "strong"},
    {"neg_eigval": True},
    {"T": 1500, "H": 40, "HV": 40, "regime": "strong"},
    {"T": 700, "H": 96, "HV": 96, "regime": "strong"},
]
MIXED = (1300, 547, 2048, 963, 271, 3063)
CASES: dict[str, dict[str, Any]] = {f"{H}x{T}": {"H": H, "T": T} for H in (8, 64, 96) for T in (1024, 2048, 4096, 8192)}
CASES |= {f"{H}x8x1024": {"H": H, "B": 8, "T": 1024} for H in (64, 96)}
CASES |= {f"{H}mixed": {"H": H, "lengths": MIXED} for H in (64, 96)}


def config(call: Call, halves: bool | None = None, **tiles: int) -> dict[str, KernelConfig]:
    key = key_of(call) if halves is None else {**key_of(call), "halves_fit": halves}
    shipped = default_configs(key)["fused"]
    return {"fused": replace(shipped, tiles={**shipped.tiles, **tiles})}


def right(shard: int = 0, of: int = 1) -> bool:
    """Each problem in both configurations, against the fp64 oracle."""
    good = True
    for i, changes in list(enumerate(RIGHT))[shard::of]:
        kwargs = make(Problem(**{"T": 300, "H": 2, "HV": 4, "K": 128, "V": 128, "device": "cuda", **changes}))
        for halves in (False, True):
            verdict = verify_call(partial(run, halves), f"{i}, {'halves' if halves else 'whole'}", kwargs)
            good &= verdict.ok
            print(f"{verdict.family}: error at {verdict.margin:.2f} of its limit" if verdict else verdict, flush=True)
    return good


def run(halves: bool, **kwargs: Any) -> Outputs:
    call = checked(kwargs)
    return kda(call, config(call, halves))


def time(specification: str) -> None:
    name, *options = specification.split(":")
    changes: dict[str, Any] = dict(option.split("=") for option in options)
    inputs = {key: changes.pop(key) for key in ("gate", "regime") if key in changes}
    halves = changes.pop("halves", None)
    case = CASES[name]
    problem = Problem(**{"K": 128, "V": 128, "HV": case["H"], "regime": "strong", "device": "cuda", **case, **inputs})
    call = checked(make(problem))
    configs = config(call, None if halves is None else halves == "1", **{key: int(x) for key, x in changes.items()})
    timings = interleave({name: [lambda: kda(call, configs)]}, 40, call.q.device)
    print(specification, f"{timings[name].median_us:.1f} us", flush=True)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "right":
        sys.exit(not right(*map(int, arguments)))
    for argument in arguments:
        time(argument)
