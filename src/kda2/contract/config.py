"""A kernel's tuning answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KernelConfig:
    """Compile-time parameters of one stage: its tile sizes (`BT`, `BK`, `BV`), warps and pipeline depth."""

    num_warps: int
    num_stages: int
    tiles: Mapping[str, int] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.num_warps, self.num_stages, tuple(sorted(self.tiles.items()))))

    def as_dict(self) -> dict[str, int]:
        return {**self.tiles, "num_warps": self.num_warps, "num_stages": self.num_stages}

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> KernelConfig:
        tiles = {k: v for k, v in values.items() if k not in ("num_warps", "num_stages")}
        return cls(values["num_warps"], values["num_stages"], tiles)
