"""Captured calls: recorded from a running model, kept in a safetensors file, described in numbers."""

from kda2.workbench.capture.call import SCHEMA, TENSORS, Capture
from kda2.workbench.capture.example import from_example
from kda2.workbench.capture.recorder import recording

__all__ = ["SCHEMA", "TENSORS", "Capture", "from_example", "recording"]
