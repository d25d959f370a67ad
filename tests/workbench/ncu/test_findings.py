"""What counters are taken to mean: on the measured launches, and one made-up launch for each rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kda2.workbench.profiler.ncu import Finding, Instruction, KernelProfile, Report, bound, evidence, findings
from kda2.workbench.profiler.ncu.figures import FIGURES
from kda2.workbench.profiler.ncu.metrics import STALLS
from kda2.workbench.profiler.ncu.rules import RULES

Make = Callable[..., KernelProfile]
PEAK = ".avg.pct_of_peak_sustained_elapsed"
COMPUTE, MEMORY, DRAM, L2, L1 = (
    f"{name}{PEAK}"
    for name in ("sm__throughput", "gpu__compute_memory_throughput", "gpu__dram_throughput", "lts__throughput",
                 "l1tex__throughput")
)  # fmt: skip
ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
TENSOR = f"sm__pipe_tensor_cycles_active{PEAK}"
INSTRUCTIONS = "smsp__inst_executed.sum"
LOADS = "l1tex__t_{}_pipe_lsu_mem_global_op_ld.sum"
STORES = "l1tex__t_{}_pipe_lsu_mem_global_op_st.sum"
LOCAL = "smsp__sass_inst_executed_op_local_{}.sum"


def by_metric(kernel: KernelProfile) -> dict[str, Finding]:
    return {finding.metric: finding for finding in findings(kernel)}


def figures_found(kernel: KernelProfile) -> list[str]:
    names = {figure.formula: name for name, figure in FIGURES.items()}
    return [names.get(finding.metric, finding.metric) for finding in findings(kernel)]


def test_the_measured_kernel_that_l2_holds_back(measured: Report) -> None:
    kernel = measured.kernels[0]
    assert bound(kernel) == "memory"
    assert figures_found(kernel) == [
        "memory", "l2", "conflicts", "issue",
        "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio / sum of all",
    ]  # fmt: skip
    found = findings(kernel)
    assert "most of all by L2" in found[0].cause
    conflicts, issue, barrier = found[2:]
    assert conflicts.value == pytest.approx(100 * 4718592 / 10088448)
    assert (conflicts.threshold, conflicts.comparison, conflicts.severity) == (10, "above", "high")
    assert issue.value == pytest.approx(37.137538)
    assert "0.87 on average" in issue.cause and "IPC is 1.50" in issue.cause
    assert barrier.value == pytest.approx(54.1, abs=0.1)
    assert "22.2 cycles an instruction" in barrier.cause
    assert {f.kernel for f in found} == {"_flash_kda_fwd_prepare"}
    assert barrier.source is None and barrier.instruction is None  # a CSV has none


def test_the_measured_kernel_that_waits(measured: Report) -> None:
    kernel = measured.kernels[1]
    assert bound(kernel) == "latency"
    assert figures_found(kernel) == [
        "memory", "occupancy_reached", "issue", "waves", "tensor", "occupancy_limit",
        "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio / sum of all",
    ]  # fmt: skip
    found = by_metric(kernel)
    assert found["launch__waves_per_multiprocessor"].value == 0.36
    assert "73 % of the multiprocessors" in found["launch__waves_per_multiprocessor"].cause
    limit = found["sm__maximum_warps_per_active_cycle_pct"]
    assert "The limit is shared memory: 2 blocks on a multiprocessor." in limit.cause
    assert "L1" not in " ".join(f.what for f in found.values())  # a hit rate of 0 where nothing asked says nothing


def test_heavier_findings_come_first_and_what_bounds_before_all(measured: Report) -> None:
    for kernel in measured.kernels:
        weights = [finding.weight for finding in findings(kernel)]
        assert weights == sorted(weights, reverse=True)
        assert all(0 <= weight <= 1 for weight in weights)


@pytest.mark.parametrize(
    ("compute", "memory", "expected"),
    [(85.0, 40.0, "compute"), (40.0, 85.0, "memory"), (59.9, 59.9, "latency"), (60.0, 10.0, "compute")],
)
def test_what_bounds(kernel: Make, compute: float, memory: float, expected: str) -> None:
    assert bound(kernel({COMPUTE: compute, MEMORY: memory})) == expected


def test_nothing_bounds_what_was_not_measured(kernel: Make) -> None:
    assert bound(kernel({COMPUTE: 85.0})) is None
    assert findings(kernel({})) == []


# One launch for each rule that it alone makes, by the figure.
CASES: list[tuple[str, dict[str, float]]] = [
    ("dram", {DRAM: 88.0}),
    ("l2", {L2: 75.0}),
    ("l1", {L1: 75.0}),
    ("l2_hits", {"lts__t_sector_hit_rate.pct": 20.0, "lts__t_sectors.sum": 9.0, DRAM: 45.0}),
    ("l1_hits", {"l1tex__t_sector_hit_rate.pct": 10.0, LOADS.format("sectors"): 9.0, L2: 61.0}),
    ("excess_sectors", {"memory_l2_theoretical_sectors_global": 8.0,
                        "memory_l2_theoretical_sectors_global_ideal": 1.0}),
    ("sectors_per_load", {LOADS.format("sectors"): 320.0, LOADS.format("requests"): 10.0}),
    ("sectors_per_store", {STORES.format("sectors"): 320.0, STORES.format("requests"): 10.0}),
    ("conflicts", {"memory_l1_wavefronts_shared": 2.0, "memory_l1_wavefronts_shared_ideal": 1.0}),
    ("counted_conflicts", {"l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 3.0,
                           "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": 10.0}),
    ("spills", {"derived__local_spilling_requests": 34.0}),
    ("local", {LOCAL.format("ld"): 3.0, LOCAL.format("st"): 1.0}),
    ("atomics", {"lts__t_sectors_srcunit_tex_op_atom.sum": 1.0, "lts__t_sectors_srcunit_tex_op_red.sum": 5.0,
                 "lts__t_sectors.sum": 100.0}),
    ("shared_atomics", {"smsp__inst_executed_op_shared_atom.sum": 6.0, INSTRUCTIONS: 100.0}),
    ("occupancy_limit", {"sm__maximum_warps_per_active_cycle_pct": 18.75}),
    ("occupancy_reached", {"sm__warps_active.avg.pct_of_peak_sustained_active": 30.0,
                           "sm__maximum_warps_per_active_cycle_pct": 75.0}),
    ("waves", {"launch__waves_per_multiprocessor": 0.36}),
    ("full", {"launch__waves_per_multiprocessor": 1.1}),
    ("issue", {ISSUE: 37.0}),
    ("threads", {"smsp__thread_inst_executed_per_inst_executed.ratio": 18.0}),
    ("uniform", {"smsp__sass_average_branch_targets_threads_uniform.pct": 58.0,
                 "smsp__branch_targets_threads_divergent": 42.0}),
    ("tensor", {TENSOR: 89.0}),
    ("tensor", {TENSOR: 20.0}),
]  # fmt: skip


@pytest.mark.parametrize(("figure", "metrics"), CASES)
def test_each_rule_finds_what_it_is_for(kernel: Make, figure: str, metrics: dict[str, float]) -> None:
    beside = {"l1_hits": ["l2"]}  # it matters only where L2 is busy, which is a finding too
    assert figures_found(kernel(metrics)) == [*beside.get(figure, []), figure]


@pytest.mark.parametrize(("figure", "metrics"), CASES)
def test_a_rule_finds_nothing_in_what_is_not_known(kernel: Make, figure: str, metrics: dict[str, float]) -> None:
    for name in metrics:
        rest = {other: value for other, value in metrics.items() if other != name}
        assert figure not in figures_found(kernel(rest)) or FIGURES[figure].value(rest) is not None


def test_every_rule_has_its_case() -> None:
    assert {rule.figure for rule in RULES} == {figure for figure, _ in CASES}


@pytest.mark.parametrize(
    "metrics",
    [
        {"lts__t_sector_hit_rate.pct": 0.0, "lts__t_sectors.sum": 0.0, DRAM: 45.0},  # nobody asked L2
        {"smsp__sass_average_branch_targets_threads_uniform.pct": 0.0, "smsp__branch_targets_threads_divergent": 0.0},
        {"memory_l1_wavefronts_shared": 0.0, "memory_l1_wavefronts_shared_ideal": 0.0},
        {"derived__local_spilling_requests": 0.0, LOCAL.format("ld"): 0.0, LOCAL.format("st"): 0.0},
        {ISSUE: 80.0, "sm__maximum_warps_per_active_cycle_pct": 18.75},  # few warps that keep the schedulers busy
        {"lts__t_sector_hit_rate.pct": 20.0, "lts__t_sectors.sum": 9.0, DRAM: 10.0},  # misses that cost nothing
        {TENSOR: 1.0},  # not a kernel of products
        {"launch__waves_per_multiprocessor": 12.2},
    ],
)
def test_what_is_no_fault(kernel: Make, metrics: dict[str, float]) -> None:
    assert findings(kernel(metrics)) == []


def test_mma_on_hopper_is_told_apart(kernel: Make) -> None:
    gmma, hmma = (f"sm__inst_executed_pipe_tensor_op_{x}.avg.pct_of_peak_sustained_active" for x in ("gmma", "hmma"))
    metrics = {TENSOR: 55.0, hmma: 40.0, gmma: 0.0}
    (found,) = findings(kernel(metrics, cc="9.0"))
    assert "Use wgmma" in found.suggestion
    assert findings(kernel(metrics, cc="8.0")) == []
    assert findings(kernel({TENSOR: 55.0, hmma: 40.0}, cc="9.0")) == []  # n/a is not zero


def stalled(**cycles: float) -> dict[str, float]:
    return {f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio": x for name, x in cycles.items()}


def test_stalls_are_shares_of_a_warps_time(kernel: Make) -> None:
    found = findings(kernel(stalled(selected=1.0, long_scoreboard=6.0, barrier=2.0, wait=1.0)))
    assert [(f.value, f.metric.split(".")[0]) for f in found] == [
        (60.0, "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active"),
        (20.0, "smsp__average_warps_issue_stalled_barrier_per_issue_active"),
    ]
    assert "TMA or cp.async" in found[0].suggestion


def test_stalls_do_not_matter_where_schedulers_always_issue(kernel: Make) -> None:
    assert findings(kernel({**stalled(selected=1.0, long_scoreboard=6.0), ISSUE: 95.0})) == []


@pytest.mark.parametrize("stall", STALLS)
def test_every_stall_is_explained(kernel: Make, stall: Any) -> None:
    (found,) = findings(kernel({stall.counter: 5.0, **stalled(selected=1.0)}))
    assert found.cause.startswith(stall.cause) and found.suggestion == stall.suggestion


def instruction(offset: int, text: str, **metrics: float) -> Instruction:
    return Instruction(offset=offset, text=text, source=f"kernel.py:{offset}", metrics=metrics)


def test_findings_point_at_the_instruction_with_most_of_it(kernel: Make) -> None:
    code = (
        instruction(16, "LDS.128 R4, [R2]", memory_l1_wavefronts_shared=80, memory_l1_wavefronts_shared_ideal=10),
        instruction(32, "LDS R4, [R3]", memory_l1_wavefronts_shared=200, memory_l1_wavefronts_shared_ideal=200),
        instruction(48, "@P0 STL.64 [R1], R6", inst_executed=20),
        instruction(64, "BAR.SYNC", smsp__pcsamp_sample_count=90, smsp__pcsamp_warps_issue_stalled_barrier=80),
        instruction(80, "FFMA R1, R2, R3, R4", smsp__pcsamp_sample_count=10, smsp__pcsamp_warps_issue_stalled_wait=5),
    )
    metrics = {
        "memory_l1_wavefronts_shared": 280.0, "memory_l1_wavefronts_shared_ideal": 210.0,
        "derived__local_spilling_requests": 20.0, **stalled(selected=1.0, barrier=3.0),
    }  # fmt: skip
    found = by_metric(kernel(metrics, instructions=code))
    places = {name.split(" / ")[0].split(".")[0]: (f.source, f.instruction) for name, f in found.items()}
    assert places == {
        "1 - memory_l1_wavefronts_shared_ideal": ("kernel.py:16", "LDS.128 R4, [R2]"),
        "derived__local_spilling_requests": ("kernel.py:48", "@P0 STL.64 [R1], R6"),
        "smsp__average_warps_issue_stalled_barrier_per_issue_active": ("kernel.py:64", "BAR.SYNC"),
        "smsp__pcsamp_sample_count": ("kernel.py:80", "FFMA R1, R2, R3, R4"),
    }
    assert [f.instruction for f in findings(kernel({}, instructions=code))] == ["BAR.SYNC", "FFMA R1, R2, R3, R4"]


def test_a_sentence_says_all(kernel: Make) -> None:
    code = (instruction(48, "STL [R1], R6", inst_executed=20),)
    (found,) = findings(kernel({"derived__local_spilling_requests": 34.0}, instructions=code))
    assert found.sentence == (
        "the number of requests of spilled registers is 34, above 0; at kernel.py:48; at STL [R1], R6. "
        "Registers do not suffice and go to local memory. Hold less at a time: smaller tiles, more warps, fewer "
        "stages; or allow more registers a thread."
    )


def test_evidence_is_plain(measured: Report) -> None:
    plain = evidence(measured)
    assert json.loads(json.dumps(plain)) == plain
    prepare, recurrence = plain["kernels"]
    assert (plain["device"], prepare["kernel"], prepare["bound"], recurrence["bound"]) == (
        "NVIDIA H200", "_flash_kda_fwd_prepare", "memory", "latency",
    )  # fmt: skip
    assert prepare["figures"]["registers"] == 32 and prepare["not_collected"] == []
    assert "l1_hits" in prepare["figures"] and "l1_hits" not in recurrence["figures"]
    assert prepare["findings"][2]["metric"] == "1 - memory_l1_wavefronts_shared_ideal / memory_l1_wavefronts_shared"


def test_evidence_names_what_was_not_collected(kernel: Make) -> None:
    report = Report(source="x.csv", kernels=(kernel({ISSUE: 37.0}),))
    (plain,) = evidence(report)["kernels"]
    assert (plain["bound"], plain["figures"]) == (None, {"issue": 37.0})
    assert ISSUE not in plain["not_collected"] and TENSOR in plain["not_collected"]
