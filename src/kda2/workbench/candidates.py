"""The candidates of a run: every implementation as shipped, and configurations of the Triton kernels around the shipped
one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from kda2.contract import KernelConfig
from kda2.dispatch import registered
from kda2.ops.kda.check import Call
from kda2.testing import checked
from kda2.workbench.capture import Capture

TRITON = "triton"


@dataclass(frozen=True)
class Proposal:
    """A candidate before it is judged. `configs` is None for an implementation as it is shipped without any."""

    name: str
    impl: str
    configs: Mapping[str, KernelConfig] | None
    parent: str | None
    hypothesis: str

    @property
    def shipped(self) -> bool:
        """Whether users get this one."""
        return self.parent is None

    def parameters(self) -> dict[str, dict[str, int]] | None:
        """The configurations as plain data."""
        return None if self.configs is None else {stage: c.as_dict() for stage, c in self.configs.items()}


def propose(capture: Capture) -> list[Proposal]:
    """Every registered implementation of `kda`, and the Triton variants for the captured call."""
    found = []
    for implementation in registered("kda"):
        if implementation.name != TRITON:
            found.append(Proposal(implementation.name, implementation.name, None, None, ""))
        elif find_spec("triton") is not None:
            found += _triton(meta_call(capture))
    return found


def meta_call(capture: Capture) -> Call:
    """The captured call on the meta device: shapes and dtypes without data, enough to plan and build launches."""
    return checked(capture.to("meta").kwargs)


def _triton(call: Call) -> list[Proposal]:
    from kda2.ops.kda import triton

    base, *variants = triton.candidates(call)
    proposals = [Proposal(TRITON, TRITON, base, None, "")]
    for configs in variants:
        change = ", ".join(_changes(base, configs))
        proposals.append(Proposal(f"{TRITON} {change}", TRITON, configs, TRITON, f"{change} is faster"))
    return proposals


def _changes(base: Mapping[str, KernelConfig], configs: Mapping[str, KernelConfig]) -> list[str]:
    """What differs, e.g. "state BV=32"."""
    return [
        f"{stage} {name}={value}"
        for stage, config in configs.items()
        for name, value in config.as_dict().items()
        if base[stage].as_dict().get(name) != value
    ]


def moved_bytes(args: Mapping[str, Any]) -> int:
    """Bytes of all tensors that a launch takes: each read or written once."""
    return sum(x.nbytes for x in args.values() if isinstance(x, Tensor))
