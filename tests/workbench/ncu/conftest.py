"""The measured report, launches made of a few metrics, and a stand-in for `ncu_report` that holds what tests put in."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kda2.workbench import extras
from kda2.workbench.profiler.ncu import KernelProfile, Report, read_report

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def measured() -> Report:
    """Two launches on an H200: a kernel bound by L2 with bank conflicts, and one bound by latency on a small grid."""
    return read_report(DATA / "h200_raw.csv")


@pytest.fixture
def rows() -> list[list[str]]:
    """The measured file as cells, to change."""
    return list(csv.reader(io.StringIO((DATA / "h200_raw.csv").read_text())))


@pytest.fixture
def kernel() -> Callable[..., KernelProfile]:
    """`kernel(metrics)`: a launch with these metrics alone."""

    def make(metrics: dict[str, float], **facts: Any) -> KernelProfile:
        return KernelProfile(launch=0, name="k", metrics=metrics, units={}, **facts)

    return make


class FakeMetric:
    """As `ncu_report.IMetric`: a value, a unit, and for instanced metrics the address and value of each instance."""

    ValueKind_STRING, ValueKind_FLOAT, ValueKind_DOUBLE, ValueKind_UINT32, ValueKind_UINT64 = 2, 3, 4, 5, 6

    def __init__(self, name: str, value: float | str | None, unit: str, instances: dict[int, float]) -> None:
        self._name, self._value, self._unit, self._instances = name, value, unit, instances

    def name(self) -> str:
        return self._name

    def unit(self) -> str:
        return self._unit

    def kind(self) -> int:
        return self.ValueKind_STRING if isinstance(self._value, str) else self.ValueKind_DOUBLE

    def has_value(self) -> bool:
        return self._value is not None

    def as_string(self) -> str | None:
        return self._value if isinstance(self._value, str) else None

    def as_double(self, i: int | None = None) -> float:
        value = self._value if i is None else list(self._instances.values())[i]
        return value if isinstance(value, float) else 0.0  # as the real one, for what is no number

    def as_uint64(self, i: int) -> int:
        return list(self._instances)[i]

    def num_instances(self) -> int:
        return len(self._instances)

    def has_correlation_ids(self) -> bool:
        return bool(self._instances)

    def correlation_ids(self) -> FakeMetric:
        return self


@dataclass
class FakeAction:
    """As `ncu_report.IAction`. `metrics`: name -> (value, unit) or (value, unit, instances)."""

    kernel: str | None
    metrics: dict[str, tuple[Any, ...]]
    sass: dict[int, str] = field(default_factory=dict)
    lines: dict[int, tuple[str, int]] = field(default_factory=dict)

    NameBase_DEMANGLED = 1

    def name(self, base: int = 0) -> str | None:
        return self.kernel

    def metric_names(self) -> tuple[str, ...]:
        return tuple(self.metrics)

    def metric_by_name(self, name: str) -> FakeMetric | None:
        if name not in self.metrics:
            return None
        value, unit, *instances = self.metrics[name]
        return FakeMetric(name, value, unit, instances[0] if instances else {})

    def sass_by_pc(self, address: int) -> str:
        return self.sass.get(address, "")

    def source_info(self, address: int) -> Any:
        if address not in self.lines:
            return None
        file, line = self.lines[address]
        return SimpleNamespace(file_name=lambda: file, line=lambda: line)


@pytest.fixture
def fake_ncu_report(monkeypatch: pytest.MonkeyPatch) -> list[FakeAction]:
    """A list: what is put into it is what every .ncu-rep holds."""
    actions: list[FakeAction] = []
    module = SimpleNamespace(load_report=lambda path: [list(actions)])
    load = extras.load
    monkeypatch.setattr(extras, "load", lambda name, why: module if name == "ncu_report" else load(name, why))
    return actions


@pytest.fixture
def action() -> type[FakeAction]:
    return FakeAction


@pytest.fixture
def fake_metric() -> type[FakeMetric]:
    return FakeMetric
