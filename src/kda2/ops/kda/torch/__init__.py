"""KDA in plain torch: whole chunks at once, CPU and GPU, differentiable."""

from kda2.ops.kda.torch.chunk import kda
from kda2.ops.kda.transforms import step

__all__ = ["kda", "step"]
