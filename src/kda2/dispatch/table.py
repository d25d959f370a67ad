"""Tuned configurations: data files under `kda2/tables/<op>/<impl>.json`.

A file holds rows {stage, when, config, provenance}; the first row of a stage whose `when` agrees with the key wins.
A `when` value is a literal to equal, or {"max": n}. The key holds what changes the generated code (padded K and V,
dtype, flags), never T.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from kda2.contract import KernelConfig


@functools.cache
def rows(op: str, impl: str) -> tuple[dict[str, Any], ...]:
    """Every row of a table, in order."""
    text = resources.files("kda2.tables").joinpath(op, f"{impl}.json").read_text()
    return tuple(json.loads(text)["rows"])


def _agrees(when: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    return all(key[k] <= v["max"] if isinstance(v, dict) else key[k] == v for k, v in when.items())


def lookup(op: str, impl: str, stage: str, key: Mapping[str, Any]) -> KernelConfig:
    """The configuration of `stage` for `key`."""
    return _lookup(op, impl, stage, tuple(key.items()))


@functools.cache
def _lookup(op: str, impl: str, stage: str, items: tuple[tuple[str, Any], ...]) -> KernelConfig:
    key = dict(items)
    for row in rows(op, impl):
        if row["stage"] == stage and _agrees(row["when"], key):
            return KernelConfig.from_dict(row["config"])
    raise LookupError(f"table {op}/{impl}.json has no row of stage {stage!r} for {key}")
