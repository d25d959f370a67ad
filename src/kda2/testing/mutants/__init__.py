"""Mutants: KDAs that are wrong in one named way, as kernels have been. They show what the probe families find, and put
a name to what a failed kernel computes (`kda2.testing.diagnose`).

Each is the token recurrence in fp64 with one change; outputs come in the dtypes of the public calls. The changes are
faults that users of such kernels reported in public, and slips that the formula invites. `table` says what a mutant is
and registers it; `tokens` holds changes of one token, which `kda` and `kda_step` share; `chunks`, `sequences` and
`steps` the others.
"""

from kda2.testing.mutants import chunks, sequences, steps, tokens  # noqa: F401 - they register what they hold
from kda2.testing.mutants.chunks import CHUNKS
from kda2.testing.mutants.table import MUTANTS, STEP_MUTANTS, Mutant, StepMutant

__all__ = ["CHUNKS", "MUTANTS", "STEP_MUTANTS", "Mutant", "StepMutant"]
