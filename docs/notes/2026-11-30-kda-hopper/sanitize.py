"""Small calls of `hopper`, each held to the fp64 oracle, to be run under compute-sanitizer on an H100 or H200:

    compute-sanitizer --tool memcheck python sanitize.py
    compute-sanitizer --tool racecheck python sanitize.py

`python sanitize.py NAME ...` runs the calls named. Inputs and the oracle stay on the CPU, where the tools cost nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

# a caching allocator's blocks are larger than tensors: what is read past a tensor would be nobody's fault
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
from torch import Tensor

import kda2
from kda2.testing import FAMILIES, Problem, make, verify, verify_call

LENGTHS = (0, 37, 1, 0, 70, 32, 0)
DENSE = Problem(T=130, K=128, V=128)
PACKED = replace(DENSE, lengths=LENGTHS, tail=3)
WIDE = replace(DENSE, T=70, H=70, HV=70)  # so many heads that a CTA takes all of V

CALLS = {
    "strong": replace(DENSE, B=2, regime="strong"),
    "weak": replace(DENSE, regime="weak"),
    "packed": replace(PACKED, regime="strong"),
    "packed, bare": replace(PACKED, state=None, regime="weak"),
    "no final state": replace(DENSE, final_state=False),
    "grouped heads": replace(DENSE, HV=4),
    "log gate": replace(DENSE, gate="log", g_dtype=torch.float32),
    "softplus": replace(PACKED, gate="softplus"),
    "fp16": replace(DENSE, dtype=torch.float16),
    "K = 64": replace(PACKED, K=64),
    "V = 64": replace(DENSE, V=64, layout="vk"),
    "vk states in bf16": replace(PACKED, layout="vk", state=torch.bfloat16),
    "negative eigenvalues": replace(PACKED, neg_eigval=True, regime="weak"),
    "strided rows": replace(DENSE, strides="fused"),
    "many heads": WIDE,
    "many heads, log gate": replace(WIDE, gate="log", g_dtype=torch.float32),
}
# Windows of 16 tokens down to one, and the inverse that needs two bf16 terms.
PROBES = (
    "saturated_gate",
    "deep_gate",
    "reset_log",
    "reset_softplus",
    "ragged",
    "all_empty",
    "repeated_keys_neg_eigval",
)


def on_gpu(value: Any) -> Any:
    if isinstance(value, kda2.Gate):
        return replace(value, A_log=on_gpu(value.A_log), dt_bias=on_gpu(value.dt_bias))
    return value.cuda() if isinstance(value, Tensor) else value


def hopper(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
    o, state = kda2.kda(**{name: on_gpu(x) for name, x in kwargs.items()}, impl="hopper")
    return o.cpu(), None if state is None else state.cpu()


def steep() -> dict[str, Any]:
    """Softplus gates at rates up to exp(4): every chunk goes through in windows."""
    kwargs = make(replace(PACKED, gate="softplus", regime="strong"))
    return {**kwargs, "gate": replace(kwargs["gate"], A_log=kwargs["gate"].A_log + 3.0)}


def verdicts(wanted: list[str]) -> Iterator[Any]:
    for name, problem in CALLS.items():
        if not wanted or name in wanted:
            yield verify_call(hopper, name, make(problem))
    if not wanted or "steep softplus" in wanted:
        yield verify_call(hopper, "steep softplus", steep())
    for name in PROBES:
        if not wanted or name in wanted:
            yield verify(hopper, FAMILIES[name], replace(DENSE, T=100))


def main() -> None:
    wrong = 0
    for verdict in verdicts(sys.argv[1:]):
        wrong += not verdict.ok
        print(f"{verdict.family}: error at {verdict.margin:.2f} of its limit" if verdict else verdict, flush=True)
    sys.exit(f"{wrong} calls are wrong" if wrong else 0)


if __name__ == "__main__":
    main()
