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
# its products are wgmma, which only this architecture has
_HOPPER = Capability(
    frozenset({"cuda"}), frozenset({"bf16", "fp16"}), backward=False, min_arch=90, max_arch=90,
    Ks=frozenset({64, 128}), Vs=frozenset({64, 128}),
)  # fmt: skip


def _load(module: str, function: str) -> Callable[[Any], Any]:
    loaded: Callable[[Any], Any] = getattr(import_module(f"{__name__}.{module}"), function)
    return loaded


def _implementations(function: str, **capabilities: Capability) -> list[Implementation]:
    return [Implementation(name, c, partial(_load, name, function)) for name, c in capabilities.items()]


_EVERYWHERE = {"triton": _TRITON, "torch": _TORCH, "reference": _TORCH}
register("kda", _implementations("kda", hopper=_HOPPER, **_EVERYWHERE))
register("kda_step", _implementations("step", **_EVERYWHERE))
