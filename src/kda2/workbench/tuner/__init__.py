"""The tuner: searches a kernel's design space for the fastest configuration, and promotes what was measured."""

from kda2.workbench.tuner.promote import promote
from kda2.workbench.tuner.search import Search

__all__ = ["Search", "promote"]
