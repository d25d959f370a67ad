"""Problems for an implementation that serves only some of what the operator does."""

from __future__ import annotations

from dataclasses import replace

import torch

from kda2.dispatch import capability
from kda2.testing import Problem
from kda2.testing.verify import NAMES


def served(impl: str, problem: Problem) -> Problem:
    """The problem, its channels and its dtype replaced by such as `impl` takes."""
    limits = capability("kda", impl)
    assert limits is not None
    K, V = limits.channels(problem.K, problem.V)
    dtype = problem.dtype if NAMES[problem.dtype] in limits.dtypes else torch.bfloat16
    return replace(problem, K=K, V=V, dtype=dtype)
