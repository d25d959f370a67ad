"""Exchange of operators and workloads with FlashInfer-Trace, the format of flashinfer-bench's data sets."""

from kda2.workbench.interchange.export import export
from kda2.workbench.interchange.importing import load

__all__ = ["export", "load"]
