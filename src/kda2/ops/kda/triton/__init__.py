"""KDA in Triton, portable from sm_80 on: stages `prepare`, `state`, `output`, and `step`."""

from kda2.ops.kda.triton.launches import candidates, kda, launches, step, step_launches

__all__ = ["candidates", "kda", "launches", "step", "step_launches"]
