"""The real ncu on a real kernel: what it writes is what is read here."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kda2.workbench.profiler.ncu import (
    KernelProfile,
    ProfilingFailed,
    Report,
    collected,
    evidence,
    findings,
    not_collected,
    profile,
    read_report,
)  # fmt: skip
from kda2.workbench.profiler.ncu.drive import find_ncu

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
PROGRAM = """
import torch, triton, triton.language as tl

@triton.jit
def _add(x, y, n, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i * STRIDE, mask=i < n)
    tl.store(y + i, a + 1.0, mask=i < n)

n = 1 << 20
x, y = torch.rand(n * 32, device="cuda"), torch.empty(n, device="cuda")
for stride in (1, 32):
    _add[(n // 1024,)](x, y, n, STRIDE=stride, BLOCK=1024)
torch.cuda.synchronize()
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "add.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="module")
def ncu() -> str:
    try:
        return find_ncu()
    except ProfilingFailed as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def report(ncu: str, program: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A launch that reads neighbours, and one in which every thread reads a sector of its own."""
    out = tmp_path_factory.mktemp("ncu") / "out"
    try:
        return profile([sys.executable, str(program)], out, kernels="^_add$", timeout_s=240)
    except ProfilingFailed as e:
        if "read the GPU's counters" in str(e):
            pytest.skip(str(e))
        raise


@pytest.fixture(scope="module")
def dense(report: Report) -> KernelProfile:
    return report.kernels[0]


@pytest.fixture(scope="module")
def strided(report: Report) -> KernelProfile:
    return report.kernels[1]


def test_the_launches(report: Report) -> None:
    assert [(k.short_name, k.grid) for k in report.kernels] == [("_add", (1024, 1, 1))] * 2
    assert (report.command_status, report.notes) == (0, ())
    assert report.device is not None and report.cc is not None and report.ncu is not None
    assert all(k.duration_us is not None and 0.5 < k.duration_us < 1e4 for k in report.kernels)


@pytest.mark.hopper
def test_every_counter_is_there(dense: KernelProfile) -> None:
    assert not_collected(dense) == ()
    assert set(collected()) <= set(dense.metrics)


def test_needless_sectors_are_found_at_the_load(dense: KernelProfile, strided: KernelProfile) -> None:
    name = "1 - memory_l2_theoretical_sectors_global_ideal / memory_l2_theoretical_sectors_global"
    assert name not in {f.metric for f in findings(dense)}
    (found,) = [f for f in findings(strided) if f.metric == name]
    assert found.value > 50
    assert found.instruction is not None and "LDG" in found.instruction
    assert found.source is not None and found.source.endswith(("add.py:7", "add.py:8"))


def test_the_same_numbers_through_csv(ncu: str, report: Report, tmp_path: Path) -> None:
    page = subprocess.run(
        [ncu, "--import", report.source, "--csv", "--page", "raw"], capture_output=True, check=True, timeout=120
    )
    (tmp_path / "raw.csv").write_bytes(page.stdout)
    for ours, theirs in zip(read_report(tmp_path / "raw.csv").kernels, report.kernels, strict=True):
        assert (ours.short_name, ours.grid, ours.block, ours.cc) == (
            theirs.short_name, theirs.grid, theirs.block, theirs.cc,
        )  # fmt: skip
        common = [name for name in collected() if name in ours.metrics and name in theirs.metrics]
        assert len(common) > 60 or ours.cc != "9.0"
        assert {n: ours.metrics[n] for n in common} == pytest.approx(
            {n: theirs.metrics[n] for n in common}, rel=1e-2, abs=6e-3
        )  # two decimals are printed of some
        scaled = ("gpu__time_duration.sum", "launch__shared_mem_per_block", "dram__bytes_read.sum")
        assert [ours.units[n] for n in scaled] == [theirs.units[n] for n in scaled] == ["us", "byte/block", "byte"]


def test_evidence(report: Report) -> None:
    first = evidence(report)["kernels"][0]
    assert first["figures"]["duration"] > 0 and first["findings"][0]["weight"] == 1.0


def test_a_command_without_a_kernel(ncu: str, tmp_path: Path) -> None:
    with pytest.raises(ProfilingFailed, match="launched no kernel"):
        profile([sys.executable, "-c", "print(1)"], tmp_path / "out", timeout_s=120)


def test_an_interrupt_leaves_the_report(report: Report, program: Path, tmp_path: Path) -> None:
    """As from `kda2 profile run`: Ctrl-C while the command sleeps, after its kernels."""
    waiting = tmp_path / "waiting.py"
    waiting.write_text(f"{PROGRAM}\nimport time; time.sleep(600)")
    code = "from kda2.cli.profile import app; app()"
    words = [sys.executable, "-c", code, "run", "--kernels", "^_add$", "--out", str(tmp_path / "out"), "--"]
    child = subprocess.Popen([*words, sys.executable, str(waiting)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert any(line == "done\n" for line in child.stdout)
    time.sleep(2)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=120)
    assert child.returncode == 130
    assert len(read_report(tmp_path / "out" / "profile.ncu-rep").kernels) == 2
