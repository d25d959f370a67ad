"""What a report says, as plain data: for the ledger, for JSON, for other programs."""

from __future__ import annotations

from typing import Any

from kda2.workbench.profiler.ncu.figures import values
from kda2.workbench.profiler.ncu.findings import bound, findings
from kda2.workbench.profiler.ncu.metrics import not_collected
from kda2.workbench.profiler.ncu.model import KernelProfile, Report


def evidence(report: Report) -> dict[str, Any]:
    """JSON-plain: per kernel its figures, what bounds it, its findings, and which counters are n/a. A figure that is
    n/a is left out."""
    facts = {"device": report.device, "cc": report.cc, "ncu": report.ncu, "command_status": report.command_status}
    return {
        "source": report.source,
        **{name: fact for name, fact in facts.items() if fact is not None},
        "notes": list(report.notes),
        "kernels": [_kernel(kernel) for kernel in report.kernels],
    }


def _kernel(kernel: KernelProfile) -> dict[str, Any]:
    return {
        "launch": kernel.launch,
        "kernel": kernel.short_name,
        "name": kernel.name,
        "grid": kernel.grid and list(kernel.grid),
        "block": kernel.block and list(kernel.block),
        "bound": bound(kernel),
        "figures": {name: value for name, value in values(kernel.metrics).items() if value is not None},
        "findings": [finding.model_dump(mode="json", exclude_none=True) for finding in findings(kernel)],
        "not_collected": list(not_collected(kernel)),
    }
