"""Contracts between the library's parts: frozen dataclasses on the standard library alone."""

from kda2.contract.capability import Capability, Check, Implementation, Query
from kda2.contract.config import KernelConfig
from kda2.contract.spec import OpSpec, TensorSpec, Tolerance, Workload

__all__ = [
    "Capability", "Check", "Implementation", "KernelConfig", "OpSpec", "Query", "TensorSpec", "Tolerance", "Workload",
]  # fmt: skip
