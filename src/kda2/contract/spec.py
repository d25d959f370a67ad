"""OpSpec: what an operator computes, on which tensors, how exactly, at what cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class TensorSpec:
    """A named tensor. `shape` is algebra over the op's axes, `dtypes` what is accepted."""

    name: str
    shape: tuple[str, ...]
    dtypes: tuple[str, ...]
    optional: bool = False
    meaning: str = ""


@dataclass(frozen=True)
class Workload:
    """One weighted shape of the op: axes by name, options by name."""

    name: str
    axes: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0


@dataclass(frozen=True)
class Tolerance:
    """Limits for one dtype: relative L2 per output, and for one element as a multiple of the tensor's RMS."""

    dtype: str
    relative_l2: float
    element_rms: float
    provenance: str = ""


@dataclass(frozen=True)
class OpSpec:
    """The contract of one operator. `oracle` and `flops`/`bytes` are dotted names of functions, so that the whole
    spec is data: it goes to JSON and is identified by `content_hash`."""

    name: str
    version: int
    source: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    options: Mapping[str, tuple[Any, ...]]
    oracle: str
    flops: str
    bytes: str
    families: tuple[str, ...]
    tolerances: tuple[Tolerance, ...]
    workloads: tuple[Workload, ...] = ()

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, sort_keys=True)

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def tolerance(self, dtype: str) -> Tolerance:
        """The limits for `dtype` ("bf16", "fp16", "fp32")."""
        for t in self.tolerances:
            if t.dtype == dtype:
                return t
        raise KeyError(f"{self.name} has no tolerance for {dtype}; it has {[t.dtype for t in self.tolerances]}")
