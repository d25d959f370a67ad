"""Occupancy against figures that follow from the CUDA programming guide's tables by hand."""

from __future__ import annotations

import pytest

from kda2.device import SHARED_MEMORY_LIMIT
from kda2.errors import UnsupportedTarget
from kda2.workbench.inspector import Occupancy, occupancy
from kda2.workbench.inspector.occupancy import MULTIPROCESSORS


@pytest.mark.parametrize(
    ("arch", "registers", "num_warps", "shared", "expected"),
    [
        (90, 32, 4, 0, Occupancy(16, 1.0, "warps")),
        (90, 16, 1, 0, Occupancy(32, 0.5, "ctas")),
        (90, 255, 8, 0, Occupancy(1, 0.125, "registers")),
        (90, 168, 4, 0, Occupancy(3, 0.1875, "registers")),
        (90, 128, 4, 96 * 1024, Occupancy(2, 0.125, "shared")),
        (90, 64, 4, 227 * 1024, Occupancy(1, 0.0625, "shared")),
        (80, 64, 4, 163 * 1024, Occupancy(1, 0.0625, "shared")),
        (86, 40, 4, 0, Occupancy(12, 1.0, "warps")),
        (89, 64, 8, 48 * 1024, Occupancy(2, 1 / 3, "shared")),
        (120, 64, 4, 99 * 1024, Occupancy(1, 1 / 12, "shared")),
    ],
)
def test_occupancy(arch: int, registers: int, num_warps: int, shared: int, expected: Occupancy) -> None:
    assert occupancy(arch, registers, num_warps, shared) == expected


def test_what_cannot_run_has_none() -> None:
    assert occupancy(86, 64, 4, 100 * 1024).ctas == 0


@pytest.mark.parametrize("arch", sorted(MULTIPROCESSORS))
def test_the_largest_cta_fits_once(arch: int) -> None:
    assert occupancy(arch, 32, 4, SHARED_MEMORY_LIMIT[arch]).ctas == 1


def test_every_known_architecture_has_limits() -> None:
    assert MULTIPROCESSORS.keys() == SHARED_MEMORY_LIMIT.keys()


def test_an_unknown_architecture() -> None:
    with pytest.raises(UnsupportedTarget, match="sm_75"):
        occupancy(75, 32, 4, 0)
