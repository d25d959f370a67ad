"""How the error of an implementation grows with the length of a sequence."""

from kda2.workbench.growth.curve import GATES, TAIL, Curve, Growth, Plan, Point, doublings, measure, number
from kda2.workbench.growth.fit import Fit, fit

__all__ = ["GATES", "TAIL", "Curve", "Fit", "Growth", "Plan", "Point", "doublings", "fit", "measure", "number"]
