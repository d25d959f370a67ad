"""KDA for Hopper, sm_90a only: stage `fused`, one kernel in Gluon."""

from kda2.ops.kda.hopper.launches import kda, key_of, launches
from kda2.ops.kda.hopper.tuning import default_configs

__all__ = ["default_configs", "kda", "key_of", "launches"]
