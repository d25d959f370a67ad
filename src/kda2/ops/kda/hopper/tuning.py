"""The tuning answer of stage `fused`: its key, and its configuration from the shipped table."""

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
