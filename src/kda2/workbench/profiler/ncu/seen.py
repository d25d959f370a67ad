"""A launch as rules see it: its figures, and what they say about the time that is left to win."""

from __future__ import annotations

from kda2.workbench.profiler.ncu.figures import values
from kda2.workbench.profiler.ncu.model import KernelProfile

# Schedulers that issue in most cycles hide whatever their warps wait for.
ISSUES = 60.0


class Seen:
    """The figures of one launch by name; None where n/a."""

    def __init__(self, kernel: KernelProfile) -> None:
        self.kernel = kernel
        self._values = values(kernel.metrics)

    def __getitem__(self, figure: str) -> float | None:
        return self._values[figure]

    def known(self, figure: str, otherwise: float = 0.0) -> float:
        """A figure, or what to reckon with where it is n/a."""
        value = self._values[figure]
        return otherwise if value is None else value

    def share(self, figure: str) -> float:
        """A percentage as a share of 1; 1 where it is n/a, so that what is unknown makes nothing smaller."""
        return self.known(figure, 100.0) / 100

    @property
    def slack(self) -> float:
        """The share of time in which the busiest resource is idle: what less waiting could win at most."""
        busiest = max(self.known("compute"), self.known("memory"))
        return 1 - min(busiest, 100.0) / 100

    @property
    def idles(self) -> bool:
        """Whether schedulers have slots to fill, as far as is known."""
        return self.known("issue") < ISSUES

    @property
    def limiter(self) -> str:
        """What keeps further blocks off a multiprocessor, as a sentence; empty where n/a."""
        names = {"registers": "registers", "shared_mem": "shared memory", "warps": "warps", "blocks": "blocks",
                 "barriers": "barriers"}  # fmt: skip
        limits = {
            word: limit
            for name, word in names.items()
            if (limit := self.kernel.metrics.get(f"launch__occupancy_limit_{name}")) is not None
        }
        if not limits:
            return ""
        fewest = min(limits.values())
        which = " and ".join(word for word, limit in limits.items() if limit == fewest)
        return f" The limit is {which}: {fewest:.0f} blocks on a multiprocessor."
