"""A .ncu-rep file. The stand-in's numbers are those of a real report, as `ncu_report` gives them: base units, and one
value for each address in the counters of instructions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kda2.errors import InvalidValue, MissingExtra
from kda2.workbench import extras
from kda2.workbench.profiler.ncu import findings, read_report
from kda2.workbench.profiler.ncu.report_file import MAGIC

START = 0x7F91B4FB2C00
LOAD, USE, STORE = START + 0xA0, START + 0xC0, START + 0xD0
METRICS = {
    "gpu__time_duration.sum": (249216.0, "ns"),
    "launch__registers_per_thread": (16.0, "register/thread"),
    "launch__shared_mem_per_block": (1024.0, "byte/block"),
    "launch__grid_dim_x": (16384.0, ""), "launch__grid_dim_y": (1.0, ""), "launch__grid_dim_z": (1.0, ""),
    "launch__block_dim_x": (256.0, "block"), "launch__block_dim_y": (1.0, "block"),
    "launch__block_dim_z": (1.0, "block"),
    "dram__cycles_elapsed.avg.per_second": (6903954802.0, "hz"),
    "device__attribute_display_name": ("NVIDIA GeForce RTX 3070", ""),
    "device__attribute_compute_capability_major": (8.0, ""),
    "device__attribute_compute_capability_minor": (6.0, ""),
    "nvlink__source_ports": (None, ""),
    "derived_tempMetric4": (float("nan"), ""),
    "smsp__pcsamp_sample_count": (16781.0, "", {LOAD: 7.0, USE: 15922.0, STORE: 198.0, START: 17.0}),
    "smsp__pcsamp_warps_issue_stalled_long_scoreboard": (15915.0, "warp", {USE: 15915.0, STORE: 0.0}),
    "memory_l2_theoretical_sectors_global": (3145728.0, "sectors", {LOAD: 2097152.0, STORE: 1048576.0}),
    "memory_l2_theoretical_sectors_global_ideal": (2097152.0, "sectors", {LOAD: 1048576.0, STORE: 1048576.0}),
}  # fmt: skip
SASS = {LOAD: "      LDG.E.64 R2, [R2.64]", USE: "      DFMA R6, R2, R4, R6", STORE: "      STG.E.64 [R4.64], R6"}
LINES = {LOAD: ("daxpy.cu", 69), USE: ("daxpy.cu", 69), STORE: ("", 0)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "report.ncu-rep"
    path.write_bytes(MAGIC + b"what NVIDIA's module reads")
    return path


def test_a_launch_and_its_instructions(file: Path, fake_ncu_report: list[Any], action: Any) -> None:
    fake_ncu_report.append(action("daxpy(int, double)", METRICS, SASS, LINES))
    report = read_report(file)
    (kernel,) = report.kernels
    assert (report.device, report.cc, report.notes) == ("NVIDIA GeForce RTX 3070", "8.6", ())
    assert (kernel.name, kernel.grid, kernel.block) == ("daxpy(int, double)", (16384, 1, 1), (256, 1, 1))
    assert (kernel.duration_us, kernel.registers, kernel.shared_bytes) == (249.216, 16, 1024)
    assert kernel.metrics["smsp__pcsamp_sample_count"] == 16781
    assert not {"nvlink__source_ports", "derived_tempMetric4", "device__attribute_display_name"} & set(kernel.metrics)
    load, use, store = kernel.instructions[1:]
    assert [i.offset for i in kernel.instructions] == [0, 0xA0, 0xC0, 0xD0]
    assert (load.text, load.source) == ("LDG.E.64 R2, [R2.64]", "daxpy.cu:69")
    assert use.metrics == {
        "smsp__pcsamp_sample_count": 15922.0, "smsp__pcsamp_warps_issue_stalled_long_scoreboard": 15915.0,
    }  # fmt: skip
    assert (store.source, "smsp__pcsamp_warps_issue_stalled_long_scoreboard" in store.metrics) == (None, False)


def test_findings_name_line_and_instruction(file: Path, fake_ncu_report: list[Any], action: Any) -> None:
    fake_ncu_report.append(action("daxpy", METRICS, SASS, LINES))
    found = {f.metric: f for f in findings(read_report(file).kernels[0])}
    hot = found["smsp__pcsamp_sample_count"]
    assert (hot.source, hot.instruction) == ("daxpy.cu:69", "DFMA R6, R2, R4, R6")
    assert hot.value == pytest.approx(100 * 15922 / 16144)
    assert "global or local memory" in hot.cause
    needless = found["1 - memory_l2_theoretical_sectors_global_ideal / memory_l2_theoretical_sectors_global"]
    assert (needless.source, needless.instruction) == ("daxpy.cu:69", "LDG.E.64 R2, [R2.64]")
    assert needless.value == pytest.approx(100 / 3)
    assert "; at daxpy.cu:69; at LDG.E.64" in needless.sentence


def test_a_launch_that_cannot_be_read_is_said(file: Path, fake_ncu_report: list[Any], action: Any) -> None:
    fake_ncu_report += [action("whole", METRICS), action(None, {})]
    report = read_report(file)
    assert [k.name for k in report.kernels] == ["whole"]
    assert report.notes == ("1 launches could not be read: the file is damaged or cut short",)


def test_a_report_without_a_launch(file: Path, fake_ncu_report: list[Any]) -> None:
    with pytest.raises(InvalidValue, match="a report with at least one kernel"):
        read_report(file)


@pytest.mark.parametrize("name", ["report.ncu-rep", "report.ncu-repz"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(InvalidValue, match="a report of Nsight Compute"):
        read_report(tmp_path / name)


def test_something_else_under_that_name_is_refused(file: Path) -> None:
    file.write_bytes(b"PK\3\4")
    with pytest.raises(InvalidValue, match="a report of Nsight Compute"):
        read_report(file)


def test_what_nvidias_module_makes_of_a_damaged_file(file: Path) -> None:
    pytest.importorskip("ncu_report")
    file.write_bytes(MAGIC + bytes(range(256)) * 8)
    with pytest.raises(InvalidValue, match="FILE must be a report"):
        read_report(file)


def test_without_the_package_the_extra_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name, name=name)

    monkeypatch.setattr(extras, "import_module", missing)
    with pytest.raises(MissingExtra, match=r"a \.ncu-rep file needs ncu_report; .*\[workbench\]"):
        read_report(file)


def test_the_stand_in_offers_nothing_that_the_module_lacks(action: Any, fake_metric: Any) -> None:
    module = pytest.importorskip("ncu_report")
    for ours, theirs in ((action, module.IAction), (fake_metric, module.IMetric)):
        names = [name for name in vars(ours) if not name.startswith("_")]
        own = {"kernel", "metrics", "sass", "lines"}  # what the stand-in is made of
        assert [name for name in names if name not in own and not hasattr(theirs, name)] == []
    kinds = [name for name in vars(fake_metric) if name.startswith("ValueKind")]
    assert {name: getattr(module.IMetric, name) for name in kinds} == {n: getattr(fake_metric, n) for n in kinds}
    assert all(hasattr(module.ISourceInfo, name) for name in ("file_name", "line"))
