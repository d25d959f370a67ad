"""What is right: the fp64 oracle, and a reference that rounds where a kernel's matrix operands round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kda2.ops.kda.api import kda
from kda2.ops.kda.check import Call, Options, StepCall, check_call, check_options, check_step_call
from kda2.ops.kda.gate import Gate
from kda2.ops.kda.torch.chunk import kda as chunked

Outputs = tuple[Tensor, Tensor | None]

_OPTIONS: dict[str, Any] = {
    "gate": Gate.log(),
    "scale": None,
    "qk_l2norm": False,
    "beta_sigmoid": False,
    "allow_neg_eigval": False,
    "state_layout": "kv",
}
_CALL: dict[str, Any] = {
    "initial_state": None,
    "output_final_state": False,
    "cu_seqlens": None,
    "deterministic": False,
}
_STEP: dict[str, Any] = {"state_indices": None, "pad_slot": -1, "inplace": True, "out": None}


def upcast(value: Any) -> Any:
    """fp64 copies of the floating tensors in `value`: a tensor, a gate, a mapping of them, or anything else as is."""
    if isinstance(value, Tensor):
        return value.detach().double() if value.is_floating_point() else value
    if isinstance(value, Gate):
        return replace(value, A_log=upcast(value.A_log), dt_bias=upcast(value.dt_bias))
    if isinstance(value, Mapping):
        return {name: upcast(x) for name, x in value.items()}
    return value


def oracle(kwargs: Mapping[str, Any], impl: str = "reference") -> Outputs:
    """(o, final state) of `kda2.kda(**kwargs)` in fp64, from the stored inputs (the initial state as it was stored).

    `impl="torch"` gives the same to 1e-12 or so in far less time: for sequences of thousands of tokens.
    """
    return kda(**{**upcast(kwargs), "impl": impl})


def checked(kwargs: Mapping[str, Any]) -> Call:
    """The checked `Call` of `kda2.kda(**kwargs)`, as implementations take it."""
    rest = {name: kwargs.get(name, default) for name, default in _CALL.items()}
    return check_call(*_tokens_and_options(kwargs), **rest)


def checked_step(kwargs: Mapping[str, Any]) -> StepCall:
    """The checked `StepCall` of `kda2.kda_step(**kwargs)`."""
    rest = {name: kwargs.get(name, default) for name, default in _STEP.items()}
    q, k, v, g, beta, options = _tokens_and_options(kwargs)
    return check_step_call(q, k, v, g, beta, kwargs["state"], options, **rest)


def _tokens_and_options(kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Options]:
    options = {name: kwargs.get(name, default) for name, default in _OPTIONS.items()}
    q, k, v, g, beta = (kwargs[name] for name in ("q", "k", "v", "g", "beta"))
    return q, k, v, g, beta, check_options(q, **options)


def same_roundings(kwargs: Mapping[str, Any], chunk: int = 32, operand: torch.dtype | None = torch.bfloat16) -> Outputs:
    """(o, final state) as an honest kernel has them that multiplies operands of dtype `operand` in chunks of `chunk`
    tokens and accumulates in fp32. Its error against the oracle is what ill-conditioned inputs cost anybody."""
    return chunked(checked(kwargs), chunk, operand)
