from __future__ import annotations

from collections.abc import Callable

import pytest

from kda2.errors import InvalidValue
from kda2.workbench.profiler.ncu import PRESETS, Gate, KernelProfile, Preset, Report, check


def outcomes(preset: str, report: Report) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for result in check(preset, report):
        found.setdefault(result.kernel, []).append(f"{result.figure} {result.outcome}")
    return found


def test_the_published_gates_on_the_measured_kernels(measured: Report) -> None:
    """Neither passes, and the second could not: nothing of it goes through L1, and a recurrence has few warps."""
    assert outcomes("source-notes", measured) == {
        "_flash_kda_fwd_prepare": ["l1_hits ok", "occupancy ok", "tensor not ok", "shared_share ok"],
        "_flash_kda_fwd_recurrence": ["l1_hits n/a", "occupancy not ok", "tensor not ok", "shared_share ok"],
    }
    values = [r.value for r in check("source-notes", measured)[:4]]
    assert values == [pytest.approx(x) for x in (96.777344, 95.568266, 1.932025, 100 * 21248 / 232448)]


def test_the_default_gates_on_the_measured_kernels(measured: Report) -> None:
    assert outcomes("default", measured) == {
        "_flash_kda_fwd_prepare": ["spills ok", "shared_share ok", "excess_sectors ok", "conflicts not ok"],
        "_flash_kda_fwd_recurrence": ["spills ok", "shared_share ok", "excess_sectors n/a", "conflicts ok"],
    }


def test_what_counters_cannot_say_is_given_to_the_caller() -> None:
    notes, default = PRESETS["source-notes"], PRESETS["default"]
    assert (notes.max_error, notes.p95_gain) == (1e-3, 30)
    assert (default.max_error, default.p95_gain) == (None, None)


def test_the_limit_itself(kernel: Callable[..., KernelProfile]) -> None:
    shared = {
        "launch__shared_mem_per_block_static": 0.0, "launch__shared_mem_per_block_dynamic": 95.0,
        "device__attribute_max_shared_memory_per_block_optin": 100.0,
    }  # fmt: skip
    report = Report(source="x", kernels=(kernel(shared),))
    (below,) = [r for r in check("source-notes", report) if r.figure == "shared_share"]
    (most,) = [r for r in check("default", report) if r.figure == "shared_share"]
    assert (below.outcome, most.outcome) == ("not ok", "ok")  # < 95 and <= 95


def test_gates_of_ones_own(measured: Report) -> None:
    mine = Preset(name="mine", gates=(Gate(figure="issue", comparison=">=", threshold=36, why="measured before"),))
    assert [(r.outcome, r.value) for r in check(mine, measured)] == [
        ("ok", pytest.approx(37.137538)), ("not ok", pytest.approx(35.335794)),
    ]  # fmt: skip


def test_an_unknown_preset(measured: Report) -> None:
    with pytest.raises(InvalidValue, match="one of default, source-notes, got 'mine'"):
        check("mine", measured)
