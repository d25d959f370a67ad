"""Many builds at once: order, progress, and failures as values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kda2.backends.triton import Launch
from kda2.backends.triton.build import Build
from kda2.contract import KernelConfig
from kda2.errors import UnsupportedTarget
from kda2.workbench.builder import BuildFailure, build_all


@triton.jit
def _fill(p_x, value, N: tl.constexpr):
    tl.static_assert(N <= 128, "N is too large")
    tl.store(p_x + tl.arange(0, N), tl.zeros([N], tl.float32) + value)


def fill(stage: str, n: int) -> Launch:
    return Launch(stage, _fill, 1, {"p_x": torch.empty(n, device="meta"), "value": 1.5, "N": n}, KernelConfig(1, 1))


def test_a_failure_does_not_stop_the_others() -> None:
    seen: list[tuple[int, int, str]] = []

    def progress(done: int, total: int, newest: Any) -> None:
        seen.append((done, total, newest.stage))

    outcomes = build_all([fill("a", 64), fill("b", 256), fill("c", 128)], 90, progress)
    assert [type(outcome) for outcome in outcomes] == [Build, BuildFailure, Build]
    assert seen == [(1, 3, "a"), (2, 3, "b"), (3, 3, "c")]
    failure = outcomes[1]
    assert isinstance(failure, BuildFailure)
    assert (failure.stage, failure.arch) == ("b", 90)
    assert "N is too large" in failure.words


def test_a_full_disk_is_no_failure_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(triton, "compile", full)
    with pytest.raises(OSError, match="No space left"):
        build_all([fill("a", 64)], 90)


def test_nothing_to_build() -> None:
    assert build_all([], 90) == []


@pytest.mark.interpreter
def test_under_the_interpreter_it_says_so() -> None:
    with pytest.raises(UnsupportedTarget, match="TRITON_INTERPRET"):
        build_all([fill("a", 64)], 90)
