"""The tuning answer of each stage: its key, its configuration from the shipped table, and the space around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kda2.contract import KernelConfig
from kda2.dispatch import lookup
from kda2.ops.kda.check import Options

Configs = Mapping[str, KernelConfig]
STAGES = ("prepare", "state", "output")


def padded(n: int) -> int:
    """The tile that holds n channels: a power of two, at least 16 (the smallest matrix operand)."""
    return max(16, 1 << (n - 1).bit_length())


def precision(dtype: torch.dtype, allow_neg_eigval: bool) -> str:
    """What matrix operands and the workspace are kept in. With negative eigenvalues a rounded Tm diverges for
    repeated keys, so that option, like fp32 inputs, takes fp32 operands in three tf32 terms."""
    return "fp32" if dtype == torch.float32 or allow_neg_eigval else "bf16"


def anchored_block(options: Options, tile_precision: str) -> int:
    """Tokens of a diagonal block whose factors may be anchored at its middle (1: none). A gate bounded by -5 keeps
    them within exp(+-80) at 32 tokens, which bf16 and fp32 hold for unit rows; at 16, exp(+-40), for any row."""
    if options.gate.lower_bound is None or tile_precision != "bf16":
        return 1
    return 32 if options.qk_l2norm else 16


def tuning_key(K: int, V: int, tile_precision: str, block: int) -> dict[str, Any]:
    """What changes the generated code. T, batch and packing are not in it."""
    return {"K": padded(K), "V": padded(V), "precision": tile_precision, "anchored": block > 1}


def default_configs(key: Mapping[str, Any]) -> dict[str, KernelConfig]:
    """The shipped configuration of each prefill stage."""
    return {stage: lookup("kda", "triton", stage, key) for stage in STAGES}


def space(key: Mapping[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    """What each stage may be built with, by field; the chunk length BT of `prepare` holds for all three.

    Chunks have at most 32 tokens: longer ones take wgmma, which ptxas 12.8 miscompiles (see CONTRIBUTING.md).
    """
    K, V = (tuple(n for n in (16, 32, 64, 128, 256) if n <= key[axis]) for axis in "KV")
    warps, depths = (1, 2, 4, 8), (1, 2, 3, 4)
    return {
        "prepare": {"BT": (16, 32), "BK": K, "BV": V, "num_warps": warps, "num_stages": depths},
        "state": {"BV": V, "num_warps": warps, "num_stages": depths},
        "output": {"BK": K, "BS": K, "BV": V, "num_warps": warps, "num_stages": depths},
    }
