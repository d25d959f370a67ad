"""Judging candidates: each in a process of its own, on the captured call and on every probe family."""

from kda2.workbench.verifier.conditions import Conditions
from kda2.workbench.verifier.process import Children, Limits
from kda2.workbench.verifier.subject import Subject

__all__ = ["Children", "Conditions", "Limits", "Subject"]
