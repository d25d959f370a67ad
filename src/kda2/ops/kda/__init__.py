"""Kimi Delta Attention: formula, gates, stages and implementations are described in README.md beside this file."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from kda2.contract import Capability, Implementation
from kda2.dispatch import register
from kda2.ops.kda.api import kda, kda_step
from kda2.ops.kda.check import debug
from kda2.ops.kda.gate import Gate

__all__ = ["Gate", "debug", "kda", "kda_step"]

_FLOATS = frozenset({"bf16", "fp16", "fp32"})
_TORCH = Capability(frozenset({"cpu", "cuda"}), _FLOATS | {"fp64"}, backward=True)
_TRITON = Capability(frozenset({"cuda", "interpreter"}), _FLOATS, backward=False, min_arch=80, max_K=256, max_V=512)


def _load(module: str, function: str) -> Callable[[Any], Any]:
    loaded: Callable[[Any], Any] = getattr(import_module(f"{__name__}.{module}"), function)
    return loaded


for _op, _function in (("kda", "kda"), ("kda_step", "step")):
    register(
        _op,
        [
            Implementation("triton", _TRITON, partial(_load, "triton", _function)),
            Implementation("torch", _TORCH, partial(_load, "torch", _function)),
            Implementation("reference", _TORCH, partial(_load, "reference", _function)),
        ],
    )
