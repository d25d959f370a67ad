"""Building candidates: every launch compiled offline, with failures as values."""

from kda2.workbench.builder.builds import BuildFailure, Progress, build_all

__all__ = ["BuildFailure", "Progress", "build_all"]
