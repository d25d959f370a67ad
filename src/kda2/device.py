"""Facts about GPUs: what this machine has, and the limits of each architecture that kda2 compiles for."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch

# Shared memory that one CTA may use, in bytes, by compute capability (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability").
SHARED_MEMORY_LIMIT: dict[int, int] = {
    80: 163 * 1024,
    86: 99 * 1024,
    87: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    103: 227 * 1024,
    110: 227 * 1024,
    120: 99 * 1024,
    121: 99 * 1024,
}
# What a configuration must fit to run on every architecture above.
PORTABLE_SHARED_MEMORY = 99 * 1024


@dataclass(frozen=True)
class Ceilings:
    """Rates a device reaches in practice: bytes/s of a large copy (read + write), bf16 flop/s of a large product.

    `datasheet_*` are the vendor's; a time below what they imply is a measuring error.
    """

    copy_bytes_per_s: float
    bf16_flops: float
    datasheet_bytes_per_s: float
    datasheet_bf16_flops: float

    def floor_us(self, bytes_moved: int, flops: int, datasheet: bool = False) -> float:
        """The least microseconds that these rates (or the datasheet's) allow for so many bytes and operations."""
        if datasheet:
            return max(bytes_moved / self.datasheet_bytes_per_s, flops / self.datasheet_bf16_flops) * 1e6
        return max(bytes_moved / self.copy_bytes_per_s, flops / self.bf16_flops) * 1e6


# Measured on the device with torch 2.11: an 8 GB copy and an 8192^3 product on random data.
MEASURED_CEILINGS: dict[str, Ceilings] = {
    "NVIDIA H200": Ceilings(4.24e12, 708e12, 4.8e12, 989e12),
}


@dataclass(frozen=True)
class Gpu:
    """One CUDA device as torch reports it. `arch` is 90 for compute capability 9.0."""

    name: str
    arch: int
    sm_count: int
    memory_bytes: int
    l2_bytes: int

    @property
    def ceilings(self) -> Ceilings | None:
        """Measured rates of this device, or None where nobody has measured them."""
        return MEASURED_CEILINGS.get(self.name)


def interpreted() -> bool:
    """Whether Triton's interpreter is on; read as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def gpu(index: int) -> Gpu:
    """Facts of CUDA device `index`."""
    p = torch.cuda.get_device_properties(index)
    return Gpu(p.name, p.major * 10 + p.minor, p.multi_processor_count, p.total_memory, p.L2_cache_size)


def gpus() -> list[Gpu]:
    """Every CUDA device of this machine; empty without one (or with ROCm, which is not supported yet)."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return []
    return [gpu(i) for i in range(torch.cuda.device_count())]
