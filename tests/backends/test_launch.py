"""Launching: empty grids, the device guard, several threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget

from kda2.backends.triton import Launch
from kda2.contract import KernelConfig


@triton.jit
def _program_ids(p_o, offset, N: tl.constexpr):
    i = tl.program_id(0)
    o_i = i * N + tl.arange(0, N)
    tl.store(p_o + o_i, o_i + offset)


def ids_launch(o: torch.Tensor, offset: int, n: int = 4) -> Launch:
    return Launch("ids", _program_ids, o.numel() // n, {"p_o": o, "offset": offset, "N": n}, KernelConfig(1, 1))


def test_an_empty_grid_launches_nothing() -> None:
    ids_launch(torch.empty(0, dtype=torch.int32), 0).run()


@pytest.mark.interpreter
def test_tensors_on_the_cpu_ask_nothing_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("no CUDA call is needed")

    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    monkeypatch.setattr(torch.cuda, "device", refuse)
    o = torch.empty(8, dtype=torch.int32)
    ids_launch(o, 100).run()
    assert o.tolist() == list(range(100, 108))


@pytest.mark.parametrize(("current", "entered"), [(0, [torch.device("cuda:1")]), (1, [])])
def test_the_tensors_device_is_made_current(
    current: int, entered: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors stand for those of a second GPU; the launch must happen inside its guard, which is left again."""
    events: list[object] = []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            events.append(self.device)

        def __exit__(self, *raised: object) -> None:
            events.append("left")

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda **kwargs: events.append(grid)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    with FakeTensorMode():
        o = torch.empty(8, dtype=torch.int32, device="cuda:1")
    Launch("ids", Kernel(), 2, {"p_o": o}, KernelConfig(1, 1)).run()
    assert events == [*entered, (2,), *(["left"] if entered else [])]


@pytest.mark.interpreter
def test_threads_share_the_interpreter() -> None:
    outputs = [torch.zeros(256, dtype=torch.int32) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: ids_launch(outputs[i], 1000 * i).run(), range(4)))
    for i, o in enumerate(outputs):
        assert o.tolist() == list(range(1000 * i, 1000 * i + 256))


class _SlowDriver:
    """A Hopper GPU that takes its time to load a kernel, and writes down the handle that each launch is given."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.loads = 0
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda device: {"max_shared_mem": 227 * 1024}
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda x, y, z, stream, function, *rest: self.launched.append(function)

    def _load(self, *args: Any) -> tuple[str, str, int, int, int]:
        self.loads += 1
        time.sleep(0.2)
        return "module", "function", 32, 0, 1024


def test_no_thread_launches_what_another_is_still_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _SlowDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    ready = threading.Barrier(4)

    def launch(_: int) -> None:
        ready.wait()
        ids_launch(torch.empty(8, dtype=torch.int32), 3).run()

    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(launch, range(4)))
    finally:
        _program_ids.device_caches.clear()  # the next test may run on a real GPU
    assert driver.launched == ["function"] * 4
    assert driver.loads == 1


@pytest.mark.gpu
def test_threads_and_streams() -> None:
    outputs = [torch.zeros(4096, dtype=torch.int32, device="cuda") for _ in range(4)]

    def launch(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                ids_launch(outputs[i], 1000 * i).run()

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(launch, range(4)))
    torch.cuda.synchronize()
    for i, o in enumerate(outputs):
        assert o.tolist() == list(range(1000 * i, 1000 * i + 4096))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_a_device_that_is_not_current() -> None:
    o = torch.zeros(64, dtype=torch.int32, device="cuda:1")
    ids_launch(o, 7).run()
    assert torch.cuda.current_device() == 0
    assert o.tolist() == list(range(7, 71))
