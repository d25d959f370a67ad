"""The tuning answer of stage `fused`: its key, its configuration from the shipped table, and the space around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kda2.contract import KernelConfig
from kda2.dispatch import lookup

Configs = Mapping[str, KernelConfig]


def tuning_key(K: int, V: int, terms: int, g_bits: int, halves_fit: bool) -> dict[str, Any]:
    """What changes the generated code, and whether the device has a multiprocessor for every half of a head's V: T is
    not in it."""
    return {"K": K, "V": V, "terms": terms, "g_bits": g_bits, "halves_fit": halves_fit}


def default_configs(key: Mapping[str, Any]) -> dict[str, KernelConfig]:
    """The shipped configuration."""
    return {"fused": lookup("kda", "hopper", "fused", key)}


def space(key: Mapping[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    """What the stage may be built with, by field. `num_warps` are state's, one for 16 of BV channels."""
    return {
        "fused": {
            "BV": tuple(n for n in (64, 128) if n <= key["V"]),
            "SLOTS": (3, 4, 5), "AHEAD": (2, 3, 4), "SCORES": (1, 2),
            "FACTOR_REGS": (88, 96, 104, 112, 120, 128, 136), "SCORE_REGS": (72, 80, 88, 96, 104),
        }
    }  # fmt: skip
