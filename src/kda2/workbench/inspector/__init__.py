"""Reading machine code: opcode counts, resources, occupancy and faults of a build."""

from kda2.workbench.inspector.inspection import Inspection, inspect
from kda2.workbench.inspector.occupancy import Occupancy, occupancy
from kda2.workbench.inspector.uniform import garbled_descriptors, undefined_uniform_registers

__all__ = [
    "Inspection",
    "Occupancy",
    "garbled_descriptors",
    "inspect",
    "occupancy",
    "undefined_uniform_registers",
]
