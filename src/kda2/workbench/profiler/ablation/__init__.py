"""Ablation: a kernel timed with one of its stages left out or doubled, and what it is bound by.

The variants are wrong on purpose. What comes of them is an `Ablation`, no benchmark record, and enters no table.
"""

from kda2.workbench.profiler.ablation.bound import Bound, Floor, Measured, classify
from kda2.workbench.profiler.ablation.record import LABEL, Ablation, Stage, Variant

__all__ = ["LABEL", "Ablation", "Bound", "Floor", "Measured", "Stage", "Variant", "classify"]
