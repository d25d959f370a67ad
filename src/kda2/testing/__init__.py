"""Testing KDA implementations, yours or ours: input makers, probe families, an oracle, comparators, test suites.

    from functools import partial
    from kda2.testing import FAMILIES, Problem, verify
    for name in FAMILIES:
        print(verify(partial(kda2.kda, impl="torch"), name, Problem(T=200)))

One family finds one kind of mistake: a kernel that passes some has passed those.

The conformance suites need pytest and are imported when first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kda2.memory import Guarded, fenced_memory, fingerprint, guarded, poison, poisoned_memory
from kda2.testing.compare import Comparison, compare, error, rms
from kda2.testing.diagnosis import diagnose
from kda2.testing.families import FAMILIES, Family, family
from kda2.testing.inputs import Problem, as_step, make, make_step, offsets
from kda2.testing.mutants import MUTANTS, STEP_MUTANTS, Mutant, StepMutant
from kda2.testing.oracle import checked, checked_step, oracle, same_roundings, upcast
from kda2.testing.stage_verify import verify_stage
from kda2.testing.stages import STAGES, Stage, replaced, stage_inputs
from kda2.testing.verify import Verdict, judge, judge_step, verify, verify_call

if TYPE_CHECKING:
    from kda2.testing.conformance import FULL, QUICK, KdaConformance, Sizes
    from kda2.testing.step_conformance import KdaStepConformance

_SUITES = {
    "FULL": "kda2.testing.conformance",
    "QUICK": "kda2.testing.conformance",
    "Sizes": "kda2.testing.conformance",
    "KdaConformance": "kda2.testing.conformance",
    "KdaStepConformance": "kda2.testing.step_conformance",
}

__all__ = [
    "FAMILIES", "FULL", "MUTANTS", "QUICK", "STAGES", "STEP_MUTANTS", "Comparison", "Family", "Guarded",
    "KdaConformance", "KdaStepConformance", "Mutant", "Problem", "Sizes", "Stage", "StepMutant", "Verdict",
    "as_step", "checked", "checked_step", "compare", "diagnose", "error", "family", "fenced_memory", "fingerprint",
    "guarded", "judge", "judge_step", "make", "make_step", "offsets", "oracle", "poison", "poisoned_memory", "replaced",
    "rms", "same_roundings", "stage_inputs", "upcast", "verify", "verify_call", "verify_stage",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _SUITES:
        raise AttributeError(f"module 'kda2.testing' has no attribute {name!r}")
    return getattr(import_module(_SUITES[name]), name)
