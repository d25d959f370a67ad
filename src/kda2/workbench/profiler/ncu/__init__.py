"""Nsight Compute: running it, reading its reports, and what they say about a kernel."""

from kda2.workbench.profiler.ncu.drive import ProfilingFailed, profile
from kda2.workbench.profiler.ncu.evidence import evidence
from kda2.workbench.profiler.ncu.findings import bound, findings
from kda2.workbench.profiler.ncu.metrics import collected, not_collected
from kda2.workbench.profiler.ncu.model import Finding, Instruction, KernelProfile, Report
from kda2.workbench.profiler.ncu.presets import PRESETS, Gate, GateResult, Preset, check
from kda2.workbench.profiler.ncu.read import read_report

__all__ = [
    "PRESETS",
    "Finding",
    "Gate",
    "GateResult",
    "Instruction",
    "KernelProfile",
    "Preset",
    "ProfilingFailed",
    "Report",
    "bound",
    "check",
    "collected",
    "evidence",
    "findings",
    "not_collected",
    "profile",
    "read_report",
]
