"""How many CTAs of a kernel one multiprocessor holds, from its registers, warps and shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from kda2.errors import UnsupportedTarget


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor: resident warps, resident CTAs, and bytes of shared memory."""

    warps: int
    ctas: int
    shared: int


# By compute capability (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
MULTIPROCESSORS: dict[int, Multiprocessor] = {
    80: Multiprocessor(64, 32, 164 * 1024),
    86: Multiprocessor(48, 16, 100 * 1024),
    87: Multiprocessor(48, 16, 164 * 1024),
    89: Multiprocessor(48, 24, 100 * 1024),
    90: Multiprocessor(64, 32, 228 * 1024),
    100: Multiprocessor(64, 32, 228 * 1024),
    103: Multiprocessor(64, 32, 228 * 1024),
    110: Multiprocessor(48, 24, 228 * 1024),
    120: Multiprocessor(48, 24, 100 * 1024),
    121: Multiprocessor(48, 24, 100 * 1024),
}
# The same on all of them: 64 K registers, given to warps in units of 256 and split over four schedulers; shared memory
# in units of 128 bytes, 1 KiB of it for each CTA taken by the system.
_REGISTERS = 64 * 1024
_REGISTER_UNIT = 256
_SCHEDULERS = 4
_SHARED_UNIT = 128
_SHARED_SYSTEM = 1024


@dataclass(frozen=True)
class Occupancy:
    """CTAs that fit on one multiprocessor, the share of its warps that they fill, and which limit binds ("warps",
    "ctas", "registers" or "shared")."""

    ctas: int
    warps: float
    limit: str


def occupancy(arch: int, registers: int, num_warps: int, shared: int) -> Occupancy:
    """Occupancy of a kernel with `registers` per thread, `num_warps` warps and `shared` bytes per CTA on sm_<arch>.

    An estimate from the launch's resources: whether the grid fills the GPU is another matter.
    Raises `UnsupportedTarget` for an architecture whose limits are not known.
    """
    if arch not in MULTIPROCESSORS:
        raise UnsupportedTarget(f"the occupancy limits of sm_{arch} are not known; known: {sorted(MULTIPROCESSORS)}")
    sm = MULTIPROCESSORS[arch]
    warp_registers = _round_up(registers * 32, _REGISTER_UNIT)
    resident_warps = _SCHEDULERS * (_REGISTERS // _SCHEDULERS // warp_registers)
    limits = {
        "ctas": sm.ctas,
        "warps": sm.warps // num_warps,
        "registers": resident_warps // num_warps,
        "shared": sm.shared // _round_up(shared + _SHARED_SYSTEM, _SHARED_UNIT),
    }
    limit = min(limits, key=lambda name: limits[name])
    ctas = limits[limit]
    return Occupancy(ctas, ctas * num_warps / sm.warps, limit)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
