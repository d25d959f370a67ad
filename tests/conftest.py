"""What every test shares: tests that this machine or process cannot run are skipped with the reason."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kda2 import device

INTERPRETED = device.interpreted()


def _reason_to_skip(item: pytest.Item) -> str | None:
    if item.get_closest_marker("interpreter") and not INTERPRETED:
        return "needs TRITON_INTERPRET=1"
    if item.get_closest_marker("gpu") and INTERPRETED:
        return "TRITON_INTERPRET=1 is set: kernels would not run on the GPU"
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return "no CUDA device"
    if item.get_closest_marker("hopper") and device.gpu(0).arch != 90:
        return "no GPU of compute capability 9.0"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := _reason_to_skip(item):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason to skip, however many tests share it."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} not run: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
