"""The `triton` implementation: the conformance suites, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest

from kda2.testing import KdaConformance, KdaStepConformance
from kda2.testing.conformance import FULL


@pytest.mark.interpreter
class TestKdaInterpreted(KdaConformance):
    impl = "triton"


@pytest.mark.interpreter
class TestStepInterpreted(KdaStepConformance):
    impl = "triton"


@pytest.mark.gpu
class TestKdaOnGpu(KdaConformance):
    impl = "triton"
    device = "cuda"
    sizes = FULL


@pytest.mark.gpu
class TestStepOnGpu(KdaStepConformance):
    impl = "triton"
    device = "cuda"
    sizes = FULL
