"""GPUs as their datasheets have them, and the rates that have been measured where somebody has measured them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kda2 import device
from kda2.errors import InvalidValue, UnsupportedTarget
from kda2.workbench.inspector.occupancy import MULTIPROCESSORS

# The same on every architecture here: operations of the special-function units and warp instructions that a
# multiprocessor starts a clock.
SPECIAL_PER_CLOCK = 16
SCHEDULERS = 4


@dataclass(frozen=True)
class Rate:
    """A rate per second and where it comes from: "measured" or "datasheet"."""

    per_second: float
    source: str


@dataclass(frozen=True)
class Part:
    """A GPU: multiprocessors, boost clock in Hz, memory bytes/s, dense bf16 tensor flop/s (fp32 accumulation) and fp32
    flop/s. `device` is the name under which its measured ceilings are known. `note` says what was scaled."""

    name: str
    sms: int
    clock: float
    memory: float
    arch: int
    tensor: float
    fp32: float
    device: str = ""
    scaled: float = 1.0
    note: str = ""

    @property
    def memory_rate(self) -> Rate:
        """Bytes/s of a large copy where measured, else the datasheet's."""
        ceilings = device.MEASURED_CEILINGS.get(self.device)
        return Rate(self.memory, "datasheet") if ceilings is None else Rate(ceilings.copy_bytes_per_s, "measured")

    @property
    def tensor_rate(self) -> Rate:
        """bf16 flop/s of a large product where measured, else the datasheet's."""
        ceilings = device.MEASURED_CEILINGS.get(self.device)
        if ceilings is None:
            return Rate(self.tensor, "datasheet")
        return Rate(ceilings.bf16_flops * self.scaled, "measured, scaled" if self.scaled != 1.0 else "measured")

    @property
    def fp32_rate(self) -> Rate:
        return Rate(self.fp32, "datasheet")

    @property
    def special_rate(self) -> Rate:
        """Special-function operations per second."""
        return Rate(self.sms * SPECIAL_PER_CLOCK * self.clock, "datasheet")

    @property
    def issue_rate(self) -> Rate:
        """Warp instructions per second."""
        return Rate(self.sms * SCHEDULERS * self.clock, "datasheet")

    @property
    def shared_per_sm(self) -> int:
        return MULTIPROCESSORS[self.arch].shared

    @property
    def shared_per_cta(self) -> int:
        return device.SHARED_MEMORY_LIMIT[self.arch]


# One well-known part for each architecture that has one here.
PARTS: dict[int, Part] = {
    80: Part("A100 80GB SXM", 108, 1.41e9, 2.04e12, 80, 312e12, 19.5e12),
    86: Part("RTX 3090", 82, 1.70e9, 0.936e12, 86, 71e12, 35.6e12),
    89: Part("RTX 4090", 128, 2.52e9, 1.008e12, 89, 165.2e12, 82.6e12),
    90: Part("H200 SXM", 132, 1.98e9, 4.8e12, 90, 989e12, 67e12, "NVIDIA H200"),
    120: Part("RTX 5090", 170, 2.41e9, 1.79e12, 120, 209.5e12, 104.8e12),
}
KNOWN: tuple[Part, ...] = (
    *PARTS.values(),
    Part("H100 SXM", 132, 1.98e9, 3.35e12, 90, 989e12, 67e12),
    Part("H20", 78, 1.98e9, 4.0e12, 90, 148e12, 44e12),
)


def arch_of(target: str) -> int:
    """90 of "sm_90" or "sm_90a". Raises `InvalidValue` for an architecture that kda2 does not know."""
    found = re.fullmatch(r"sm_(\d+)a?", target)
    if found is None or int(found[1]) not in device.SHARED_MEMORY_LIMIT:
        known = ", ".join(f"sm_{arch}" for arch in sorted(device.SHARED_MEMORY_LIMIT))
        raise InvalidValue("--target", f"one of {known}", repr(target))
    return int(found[1])


def part_for(target: str, sms: int | None = None, name: str | None = None) -> Part:
    """The part to plan for: the one named, else the one of this architecture with `sms` multiprocessors, else the
    architecture's usual one, scaled to `sms`.

    Scaling keeps what one multiprocessor does and the memory's rate; the part's `note` says so. Raises `InvalidValue`
    for an unknown name or count, `UnsupportedTarget` for an architecture without a part.
    """
    arch = arch_of(target)
    if sms is not None and sms < 1:
        raise InvalidValue("sms", "at least 1", repr(sms))
    part = _usual(arch) if name is None else _named(name, arch)
    if sms is None or sms == part.sms:
        return part
    if name is None and (same := next((p for p in _of(arch) if p.sms == sms), None)):
        return same
    share = sms / part.sms
    return replace(
        part,
        name=f"{part.name} with {sms} SMs",
        sms=sms,
        tensor=part.tensor * share,
        fp32=part.fp32 * share,
        scaled=share,
        note=f"no known part: compute rates of the {part.name} times {sms}/{part.sms}, its memory rate kept",
    )


def _of(arch: int) -> Iterator[Part]:
    return (p for p in KNOWN if p.arch == arch)


def _usual(arch: int) -> Part:
    if arch not in PARTS:
        known = ", ".join(f"sm_{a}" for a in sorted(PARTS))
        raise UnsupportedTarget(f"no part of sm_{arch} is known to plan for; known: {known}")
    return PARTS[arch]


def _named(name: str, arch: int) -> Part:
    """The part whose name starts like `name`, in any case: "h20" is the H20 and "h200" the H200."""
    plain = name.strip().lower().removeprefix("nvidia ")
    exact = [p for p in KNOWN if plain in (p.name.lower(), p.name.lower().split(" ")[0])]
    found = exact or [p for p in KNOWN if plain and p.name.lower().startswith(plain + " ")]
    if not found:
        raise InvalidValue("gpu", f"one of {', '.join(p.name for p in KNOWN)}", repr(name))
    part = found[0]
    if part.arch != arch:
        raise InvalidValue("gpu", f"a part of sm_{arch}", repr(name), f"the {part.name} is sm_{part.arch}")
    return part
