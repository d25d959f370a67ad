"""How a workload of `kda` or `kda_step` becomes a call that FlashInfer-Trace can describe: the sizes of its axes, its
dtypes, the inputs that are there, and those whose values matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kda2.contract import OpSpec, Workload
from kda2.errors import InvalidValue

# What the references compute, as tags and in words.
OPTIONS = {"gate": "bounded", "lower_bound": "-5", "qk_l2norm": "true", "beta_sigmoid": "true", "state_layout": "kv"}
# Without decay g + dt_bias is so low that the gate's sigmoid is 0.
SHIFTS = {"strong": 0.0, "weak": -8.0, "none": -1e4}


@dataclass(frozen=True)
class Call:
    """`axes` by the names that the spec's shapes use; `dtypes` of the inputs that are there, and of the outputs;
    `stored` the values of inputs that cannot be random; `scale` of the output."""

    axes: Mapping[str, int]
    dtypes: Mapping[str, str]
    stored: Mapping[str, Tensor]
    scale: float


def call_of(spec: OpSpec, workload: Workload) -> Call:
    """Raises `InvalidValue` for an op other than kda2's own, or a workload that is not a case of it."""
    if spec.name not in _CALLS:
        raise InvalidValue("spec", f"of {' or '.join(_CALLS)}", repr(spec.name))
    case = {**workload.axes, **workload.options}
    try:
        return _CALLS[spec.name](case)
    except KeyError as e:
        raise InvalidValue(f"workload {workload.name}", f"a case with {e.args[0]}", ", ".join(case)) from e


def _prefill(case: Mapping[str, Any]) -> Call:
    seqlens = tuple(case["seqlens"])
    dtype, (state, *ways) = case["dtype"], case.get("state", "none").split("-")
    axes = {"B": 1, "T": sum(seqlens), "N": len(seqlens), **_heads(case)}
    dtypes = {**_token_dtypes(case), "cu_seqlens": "int64"}
    if "in" in ways:
        dtypes["initial_state"] = state
    offsets = torch.tensor([0, *accumulate(seqlens)], dtype=torch.int64)
    outputs = {"o": dtype, "final_state": dtypes.get("initial_state", "fp32")}
    return Call(axes, {**dtypes, **outputs}, {"cu_seqlens": offsets, **_gate(case)}, axes["K"] ** -0.5)


def _decode(case: Mapping[str, Any]) -> Call:
    axes = {"B": int(case["batch"]), "slots": int(case["batch"]), **_heads(case)}
    state = case["state_dtype"]
    dtypes = {**_token_dtypes(case), "state": state, "o": case["dtype"], "new_state": state}
    return Call(axes, dtypes, _gate(case), axes["K"] ** -0.5)


_CALLS = {"kda": _prefill, "kda_step": _decode}


def _heads(case: Mapping[str, Any]) -> dict[str, int]:
    HV = int(case["heads"])
    return {"H": int(case.get("qk_heads", HV)), "HV": HV, "K": int(case["k"]), "V": int(case["v"])}


def _token_dtypes(case: Mapping[str, Any]) -> dict[str, str]:
    dtype = case["dtype"]
    return {
        "q": dtype, "k": dtype, "v": dtype, "g": case.get("g_dtype", dtype), "beta": dtype, "A_log": "fp32",
        "dt_bias": "fp32",
    }  # fmt: skip


def _gate(case: Mapping[str, Any]) -> dict[str, Tensor]:
    """A_log and dt_bias, uniform in [0, 1). The regime's shift goes into dt_bias, so that g can be random."""
    axes, rng, regime = _heads(case), torch.Generator().manual_seed(0), case.get("gate", "strong")
    A_log, dt_bias = torch.rand(axes["HV"], generator=rng), torch.rand(axes["HV"], axes["K"], generator=rng)
    if regime == "mixed":
        return {"A_log": A_log, "dt_bias": dt_bias - 8 * torch.rand(axes["HV"], 1, generator=rng)}
    if regime not in SHIFTS:
        raise InvalidValue("gate", f"one of {', '.join(SHIFTS)}, mixed", repr(regime))
    return {"A_log": A_log, "dt_bias": dt_bias + SHIFTS[regime]}
