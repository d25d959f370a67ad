"""The `hopper` implementation: the conformance suite on a GPU of compute capability 9.0."""

from __future__ import annotations

import pytest

from kda2.testing import KdaConformance
from kda2.testing.conformance import FULL


@pytest.mark.gpu
@pytest.mark.hopper
class TestKdaOnGpu(KdaConformance):
    impl = "hopper"
    device = "cuda"
    sizes = FULL
    rounds_by_chunk = True
