"""Reading a .ncu-rep file with NVIDIA's `ncu-report`: the same numbers as in the CSV, and those of each instruction."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from kda2.errors import InvalidValue
from kda2.workbench import extras
from kda2.workbench.profiler.ncu import units
from kda2.workbench.profiler.ncu.metrics import per_instruction
from kda2.workbench.profiler.ncu.model import Dim3, Instruction, KernelProfile, Report

MAGIC = b"NVR\0"


def load_module() -> Any:
    """The module `ncu_report`. Raises `MissingExtra`."""
    return extras.load("ncu_report", "a .ncu-rep file")


def load(path: Path) -> Report:
    """The report in a .ncu-rep or .ncu-repz file. Raises `MissingExtra`, and `InvalidValue` for what is none."""
    module = load_module()
    try:
        # Both objects own what their parts point into, so they must live until all is read.
        context = module.load_report(str(path))
        actions = [action for part in context for action in part]
        named = [action for action in actions if action.name() is not None]
        kernels = tuple(_kernel(action, i) for i, action in enumerate(named))
    except RuntimeError as e:
        raise InvalidValue("FILE", "a report of Nsight Compute", f"one that ncu-report cannot read ({e})") from e
    if not kernels:
        fix = "the file is damaged, cut short, or of a newer version than the installed ncu-report"
        raise InvalidValue("FILE", "a report with at least one kernel", "one without", fix)
    cut = len(actions) - len(named)
    notes = (f"{cut} launches could not be read: the file is damaged or cut short",) if cut else ()
    return Report(source=str(path), kernels=kernels, notes=notes)


def _kernel(action: Any, launch: int) -> KernelProfile:
    found = [action.metric_by_name(name) for name in action.metric_names()]
    text = {metric.name(): metric.as_string() for metric in found if metric.kind() == metric.ValueKind_STRING}
    metrics, names = {}, {}
    for metric in found:
        if metric.has_value() and metric.kind() in _number_kinds(metric) and math.isfinite(metric.as_double()):
            metrics[metric.name()], names[metric.name()] = units.normal(metric.as_double(), metric.unit())
    major, minor = (metrics.get(f"device__attribute_compute_capability_{part}") for part in ("major", "minor"))
    return KernelProfile(
        launch=launch,
        name=action.name(action.NameBase_DEMANGLED) or action.name(),
        grid=_dim3(metrics, "launch__grid_dim"),
        block=_dim3(metrics, "launch__block_dim"),
        device=text.get("device__attribute_display_name"),
        cc=None if major is None or minor is None else f"{major:.0f}.{minor:.0f}",
        metrics=metrics,
        units=names,
        instructions=_instructions(action),
    )


def _number_kinds(metric: Any) -> tuple[int, ...]:
    return metric.ValueKind_FLOAT, metric.ValueKind_DOUBLE, metric.ValueKind_UINT32, metric.ValueKind_UINT64


def _dim3(metrics: dict[str, float], name: str) -> Dim3 | None:
    x, y, z = (metrics.get(f"{name}_{axis}") for axis in "xyz")
    return None if x is None or y is None or z is None else (int(x), int(y), int(z))


def _instructions(action: Any) -> tuple[Instruction, ...]:
    """What the counters with instances say of each address, in the order of addresses."""
    counts: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for name in per_instruction():
        metric = action.metric_by_name(name)
        if metric is None or not metric.has_correlation_ids():
            continue
        addresses = metric.correlation_ids()
        for i in range(metric.num_instances()):
            if value := metric.as_double(i):
                counts[addresses.as_uint64(i)][name] = value
    first = min(counts, default=0)
    return tuple(
        Instruction(
            offset=address - first,
            text=" ".join(action.sass_by_pc(address).split()),
            source=_source(action.source_info(address)),
            metrics=counts[address],
        )
        for address in sorted(counts)
    )


def _source(info: Any) -> str | None:
    return None if info is None or not info.file_name() else f"{info.file_name()}:{info.line()}"
