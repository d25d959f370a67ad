"""Triton: launching, offline compilation, and the shims between versions."""

from kda2.backends.triton import interpreter
from kda2.backends.triton.launch import Launch

__all__ = ["Launch"]

# Before any kernel runs: a wrong product would pass for a kernel's fault.
interpreter.install()
