"""The figures that say how a kernel runs, each from one counter or a few; None where one that it needs is n/a.

A share of nothing is n/a too: Nsight Compute prints a hit rate of 0 for a cache that was never asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kda2.workbench.profiler.ncu.metrics import PARTED
from kda2.workbench.profiler.ncu.model import DURATION, REGISTERS, SHARED

Metrics = Mapping[str, float]
Value = Callable[[Metrics], float | None]

_GLOBAL = "l1tex__t_{}_pipe_lsu_mem_global_op_{}.sum"
_LOCAL = "l1tex__t_sectors_pipe_lsu_mem_local_op_{}.sum"
_L1_SECTORS = (
    _GLOBAL.format("sectors", "ld"),
    _GLOBAL.format("sectors", "st"),
    _LOCAL.format("ld"),
    _LOCAL.format("st"),
)
_L2_SECTORS = "lts__t_sectors.sum"
_UNIFORM = "smsp__sass_average_branch_targets_threads_uniform.pct"
_WAVES = "launch__waves_per_multiprocessor"


@dataclass(frozen=True)
class Figure:
    """A figure: `what` it is in words, its unit, how it is made of counters, and its value for a launch's metrics."""

    what: str
    unit: str
    formula: str
    value: Value


def _of(metric: str, what: str, unit: str) -> Figure:
    return Figure(what, unit, metric, lambda m: m.get(metric))


def _rate(metric: str, of: tuple[str, ...], what: str) -> Figure:
    """A percentage that means something only if there were any of its base."""

    def value(m: Metrics) -> float | None:
        base = [m[name] for name in of if name in m]
        return m.get(metric) if any(base) or not base else None

    return Figure(what, "%", metric, value)


def _ratio(part: str, whole: str, what: str, unit: str, factor: float = 1.0) -> Figure:
    def value(m: Metrics) -> float | None:
        over = m.get(whole)
        return None if part not in m or not over else factor * m[part] / over

    return Figure(what, unit, f"{part} / {whole}", value)


def _sum(parts: tuple[str, ...], what: str, unit: str, whole: str = "") -> Figure:
    """A sum of counters, or its share of `whole` in percent."""

    def value(m: Metrics) -> float | None:
        if any(part not in m for part in parts):
            return None
        total = sum(m[part] for part in parts)
        return total if not whole else 100 * total / m[whole] if m.get(whole) else None

    formula = " + ".join(parts)
    return Figure(what, unit, f"({formula}) / {whole}" if whole else formula, value)


def _excess(actual: str, ideal: str, what: str) -> Figure:
    """The percentage of `actual` that is not in `ideal`."""

    def value(m: Metrics) -> float | None:
        over = m.get(actual)
        return None if ideal not in m or not over else 100 * (1 - m[ideal] / over)

    return Figure(what, "%", f"1 - {ideal} / {actual}", value)


def _shared(m: Metrics) -> float | None:
    parts = [m.get(f"launch__shared_mem_per_block_{part}") for part in ("static", "dynamic")]
    limit = m.get("device__attribute_max_shared_memory_per_block_optin")
    known = [part for part in parts if part is not None]
    return 100 * sum(known) / limit if len(known) == 2 and limit else None


def _full(m: Metrics) -> float | None:
    waves = m.get(_WAVES)
    return None if not waves else 100 * waves / math.ceil(waves)


def _uniform(m: Metrics) -> float | None:
    """Where no branch could part a warp, Nsight Compute says 0 % as well."""
    value = m.get(_UNIFORM)
    return value if value or m.get(PARTED) else None


def _working(m: Metrics) -> float | None:
    grid, sms = m.get("launch__grid_size"), m.get("device__attribute_multiprocessor_count")
    return None if grid is None or not sms else 100 * min(1.0, grid / sms)


_PEAK = ".avg.pct_of_peak_sustained_elapsed"
FIGURES: dict[str, Figure] = {
    "duration": _of(DURATION, "the duration", "us"),
    "instructions": _of("smsp__inst_executed.sum", "the number of warp instructions", ""),
    "registers": _of(REGISTERS, "the number of registers of a thread", ""),
    "shared": _of(SHARED, "the shared memory of a block", "byte"),
    "shared_share": Figure(
        "the shared memory of a block, of what one may have", "%",
        "(launch__shared_mem_per_block_static + launch__shared_mem_per_block_dynamic) / "
        "device__attribute_max_shared_memory_per_block_optin", _shared,
    ),
    "compute": _of(f"sm__throughput{_PEAK}", "compute throughput", "%"),
    "memory": _of(f"gpu__compute_memory_throughput{_PEAK}", "memory throughput", "%"),
    "dram": _of(f"gpu__dram_throughput{_PEAK}", "DRAM throughput", "%"),
    "l2": _of(f"lts__throughput{_PEAK}", "L2 throughput", "%"),
    "l1": _of(f"l1tex__throughput{_PEAK}", "L1 and shared memory throughput", "%"),
    "dram_bytes": _sum(("dram__bytes_read.sum", "dram__bytes_write.sum"), "DRAM traffic", "byte"),
    "l2_hits": _rate("lts__t_sector_hit_rate.pct", (_L2_SECTORS,), "the L2 hit rate"),
    "l1_hits": _rate("l1tex__t_sector_hit_rate.pct", _L1_SECTORS, "the L1 hit rate"),
    "sectors_per_load": _ratio(
        _GLOBAL.format("sectors", "ld"), _GLOBAL.format("requests", "ld"), "the number of sectors of a warp's load", ""
    ),
    "sectors_per_store": _ratio(
        _GLOBAL.format("sectors", "st"), _GLOBAL.format("requests", "st"), "the number of sectors of a warp's store", ""
    ),
    "excess_sectors": _excess(
        "memory_l2_theoretical_sectors_global", "memory_l2_theoretical_sectors_global_ideal",
        "the share of needless sectors in accesses to global memory",
    ),
    "conflicts": _excess(
        "memory_l1_wavefronts_shared", "memory_l1_wavefronts_shared_ideal",
        "the share of passes through shared memory that bank conflicts make",
    ),
    "counted_conflicts": _ratio(
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
        "the share of bank conflicts that the hardware counts", "%", 100,
    ),
    "spills": _of("derived__local_spilling_requests", "the number of requests of spilled registers", ""),
    "local": _sum(
        ("smsp__sass_inst_executed_op_local_ld.sum", "smsp__sass_inst_executed_op_local_st.sum"),
        "the number of accesses to local memory", "",
    ),
    "local_share": _sum(
        ("smsp__sass_inst_executed_op_local_ld.sum", "smsp__sass_inst_executed_op_local_st.sum"),
        "the share of accesses to local memory in all instructions", "%", "smsp__inst_executed.sum",
    ),
    "atomics": _sum(
        ("lts__t_sectors_srcunit_tex_op_atom.sum", "lts__t_sectors_srcunit_tex_op_red.sum"),
        "the share of atomics in the sectors of L2", "%", _L2_SECTORS,
    ),
    "shared_atomics": _ratio(
        "smsp__inst_executed_op_shared_atom.sum", "smsp__inst_executed.sum",
        "the share of atomics on shared memory in all instructions", "%", 100,
    ),
    "occupancy": _of("sm__warps_active.avg.pct_of_peak_sustained_active", "occupancy", "%"),
    "occupancy_limit": _of("sm__maximum_warps_per_active_cycle_pct", "the occupancy that resources allow", "%"),
    "occupancy_reached": _ratio(
        "sm__warps_active.avg.pct_of_peak_sustained_active", "sm__maximum_warps_per_active_cycle_pct",
        "the occupancy reached, of what resources allow", "%", 100,
    ),
    "waves": _of(_WAVES, "the number of waves of blocks", ""),
    "full": Figure("the share of its waves that the grid fills", "%",
                   f"{_WAVES} / ceil({_WAVES})", _full),
    "working": Figure("the share of multiprocessors with a block", "%",
                      "launch__grid_size / device__attribute_multiprocessor_count", _working),
    "issue": _of("smsp__issue_active.avg.pct_of_peak_sustained_active", "issue active", "%"),
    "ipc": _of("sm__inst_executed.avg.per_cycle_active", "IPC", ""),
    "eligible": _of("smsp__warps_eligible.avg.per_cycle_active", "the number of warps that could issue", ""),
    "threads": _of("smsp__thread_inst_executed_per_inst_executed.ratio", "the number of threads at work in a warp", ""),
    "uniform": Figure("the share of branches that a warp takes as one", "%", _UNIFORM, _uniform),
    "branches": _ratio("smsp__inst_executed_op_branch.sum", "smsp__inst_executed.sum",
                       "the share of branches in all instructions", "%", 100),
    "tensor": _of(f"sm__pipe_tensor_cycles_active{_PEAK}", "tensor pipe active", "%"),
    "mma": _of("sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active",
               "tensor instructions of warps", "%"),
    "wgmma": _of("sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
                 "tensor instructions of warpgroups", "%"),
}  # fmt: skip


def values(metrics: Metrics) -> dict[str, float | None]:
    """Every figure of a launch."""
    return {name: figure.value(metrics) for name, figure in FIGURES.items()}
