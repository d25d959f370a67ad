"""Sizes of a problem as a user writes them."""

from __future__ import annotations

from typing import Any

from kda2.errors import InvalidValue
from kda2.workbench.planner.problem import assignments
from kda2.workbench.profiler.problems import DTYPES


def sizes_of(text: str | None, group: int = 1) -> dict[str, Any]:
    """The sizes that `--problem` names, such as "T=4096,H=16,dtype=bf16". HV is `group` times H unless given. Raises
    `InvalidValue`."""
    found: dict[str, Any] = {}
    for name, value in assignments(text or "").items():
        if name == "dtype" and value in DTYPES:
            found["dtype"] = DTYPES[value]
        elif name in ("T", "B", "H", "HV", "K", "V") and value.isdecimal() and int(value) > 0:
            found[name] = int(value)
        else:
            wanted = f"T, B, H, HV, K or V with a number above 0, or dtype with one of {', '.join(DTYPES)}"
            raise InvalidValue("--problem", wanted, f"{name}={value}")
    if "H" in found:
        found.setdefault("HV", group * found["H"])
    if found.get("HV", 1) % found.get("H", 1):
        raise InvalidValue("--problem", "HV a multiple of H", text or "")
    return found
