"""KDA in Triton, portable from sm_80 on: stages `prepare`, `state`, `output`, and `step`."""

from kda2.ops.kda.triton.launches import kda, key_of, launches, step, step_launches
from kda2.ops.kda.triton.tuning import default_configs, space

__all__ = ["default_configs", "kda", "key_of", "launches", "space", "step", "step_launches"]
