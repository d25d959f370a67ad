"""Reading machine code: opcode counts, resources and occupancy of a build."""

from kda2.workbench.inspector.inspection import Inspection, inspect
from kda2.workbench.inspector.occupancy import Occupancy, occupancy

__all__ = ["Inspection", "Occupancy", "inspect", "occupancy"]
