"""Judging candidates: each in a process of its own, on the captured call and on every probe family."""

from kda2.workbench.verifier.numerics import Task, verify_candidate

__all__ = ["Task", "verify_candidate"]
