"""What only a GPU can show: streams, threads, graphs, devices, synchronisation, compilation, memory, launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from serving import served
from torch import Tensor

import kda2
from kda2.testing import Problem, error, make, make_step, offsets, oracle
from kda2.testing.oracle import Outputs

pytestmark = pytest.mark.gpu

Kwargs = dict[str, Any]
TOKENS = ("q", "k", "v", "g", "beta")
PROBLEM = Problem(T=200, H=2, HV=4, K=64, V=64, device="cuda", regime="weak")
PACKED = Problem(lengths=(70, 0, 1, 129), H=2, HV=4, K=64, V=64, device="cuda", regime="weak")
Prefill = Callable[..., Outputs]


@pytest.fixture(params=["triton", pytest.param("hopper", marks=pytest.mark.hopper)])
def impl(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def prefill(impl: str) -> Prefill:
    return partial(kda2.kda, impl=impl)


def decode(**kwargs: Any) -> tuple[Tensor, Tensor]:
    return kda2.kda_step(**kwargs, impl="triton")


def same(got: tuple[Tensor | None, ...], want: tuple[Tensor | None, ...]) -> bool:
    return all(x is not None and y is not None and torch.equal(x, y) for x, y in zip(got, want, strict=True))


def make_large(problem: Problem, rows: int) -> Kwargs:
    """`make` on the device, for problems whose tensors are too large to draw on the CPU: dense, strong gate."""
    p, rng = problem, torch.Generator("cuda").manual_seed(0)
    kwargs = make(Problem(T=1, H=p.H, HV=p.HV, K=p.K, V=p.V, device="cuda", regime="strong"))
    for name in TOKENS:
        shape = (1, rows, *kwargs[name].shape[2:])
        kwargs[name] = torch.randn(shape, generator=rng, device="cuda", dtype=kwargs[name].dtype)
    return kwargs


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of kernels that Triton compiles (or loads from its cache folder) inside."""
    import triton

    compiled: list[str] = []

    def hook(*args: Any, **kwargs: Any) -> None:
        compiled.append(str(kwargs.get("repr", args)))

    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = hook
    try:
        yield compiled
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


# streams, threads, devices


def test_two_streams_at_once(prefill: Prefill) -> None:
    calls = [make(PROBLEM), make(PACKED)]
    want = [prefill(**c) for c in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    got: list[list[Outputs]] = [[], []]
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(prefill(**calls[i]))
    torch.cuda.synchronize()
    assert all(same(g, want[i]) for i in (0, 1) for g in got[i])


def test_work_is_ordered_on_the_current_stream(prefill: Prefill) -> None:
    """A call on a side stream waits for what that stream was doing to its inputs."""
    kwargs = make(PROBLEM)
    want = prefill(**kwargs)
    v = kwargs["v"].clone()
    kwargs["v"].fill_(torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        kwargs["v"].copy_(v)
        got = prefill(**kwargs)
    torch.cuda.synchronize()
    assert same(got, want)


def test_threads_may_call_at_once(impl: str, prefill: Prefill) -> None:
    """Also the first call of a shape, which compiles."""
    base = Problem(T=100, V=80, device="cuda")
    calls = [make(served(impl, replace(base, K=K, seed=K))) for K in (20, 80, 80, 20)]
    together = threading.Barrier(len(calls))

    def run(kwargs: Kwargs) -> list[Outputs]:
        together.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            outputs = [prefill(**kwargs) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return outputs

    with ThreadPoolExecutor(len(calls)) as pool:
        got = list(pool.map(run, calls))
    for kwargs, outputs in zip(calls, got, strict=True):
        want = prefill(**kwargs)
        assert all(same(o, want) for o in outputs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_that_is_not_current(prefill: Prefill) -> None:
    want = prefill(**make(PACKED))
    other = replace(PACKED, device="cuda:1")
    assert torch.cuda.current_device() == 0
    o, state = prefill(**make(other))
    step = decode(**make_step(other, slots=4, indices=(2,)))
    assert torch.cuda.current_device() == 0 and o.device.index == 1 and step[0].device.index == 1
    assert state is not None and same((o.to("cuda:0"), state.to("cuda:0")), want)


# graphs and synchronisation


def replayed(function: Callable[..., Any], kwargs: Kwargs, refill: Callable[[Kwargs], None]) -> tuple[Any, Any]:
    """(outputs of a replay after `refill` changed the inputs in place, outputs of an eager call on the same)."""
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        function(**kwargs)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(**kwargs)
    refill(kwargs)
    copies = {name: x.clone() if isinstance(x, Tensor) else x for name, x in kwargs.items()}
    want = function(**copies)
    graph.replay()
    torch.cuda.synchronize()
    return captured, want


@pytest.mark.parametrize("problem", [PROBLEM, PACKED], ids=("dense", "packed"))
def test_graph_of_a_prefill(problem: Problem, prefill: Prefill) -> None:
    other = make(replace(problem, seed=7))

    def refill(kwargs: Kwargs) -> None:
        for name in (*TOKENS, "initial_state"):
            kwargs[name].copy_(other[name])
        if kwargs["cu_seqlens"] is not None:
            kwargs["cu_seqlens"].copy_(offsets((5, 100, 0, 95)))

    got, want = replayed(prefill, make(problem), refill)
    assert same(got, want) and not same(got, prefill(**make(problem)))


def test_graph_of_a_step() -> None:
    kwargs = make_step(Problem(B=6, H=2, HV=4, K=64, V=64, device="cuda"), slots=8, indices=(0, 1, 2, 3, 4, 5))

    def refill(kwargs: Kwargs) -> None:
        other = make_step(Problem(B=6, H=2, HV=4, K=64, V=64, device="cuda", seed=3))
        for name in TOKENS:
            kwargs[name].copy_(other[name])
        kwargs["state_indices"].copy_(torch.tensor([7, -1, 0, 3, -1, 2]))

    got, want = replayed(decode, kwargs, refill)
    assert same(got, want)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_call_waits_for_the_device(prefill: Prefill) -> None:
    packed, pool = make(PACKED), make_step(Problem(B=3, device="cuda"), slots=5, indices=(4, -1, 0))
    prefill(**packed)
    decode(**pool)
    with no_synchronisation():
        prefill(**packed)
        decode(**pool)
        decode(**pool, inplace=False)


def test_debug_reads_the_device_and_checks(prefill: Prefill) -> None:
    packed, pool = make(PACKED), make_step(Problem(B=3, device="cuda"), slots=5, indices=(4, 5, 0))
    packed["cu_seqlens"][1] = 10_000
    with kda2.debug():
        with pytest.raises(kda2.InvalidValue, match="cu_seqlens must be non-decreasing"):
            prefill(**packed)
        with pytest.raises(kda2.InvalidValue, match=r"state_indices\[1\] = 5"):
            decode(**pool)


# compilation and launches


def test_lengths_and_packing_compile_nothing_new(impl: str, prefill: Prefill) -> None:
    base = served(impl, replace(PROBLEM, K=32, V=48))
    dense = [replace(base, B=B, T=T) for B, T in ((1, 200), (1, 1), (2, 16), (3, 64), (1, 4097), (17, 5))]
    packs = ((64, 64), (1,), (0, 0), (5, 0, 77), (16,) * 40, (1000, 24))
    packed = [replace(base, lengths=lengths, tail=i % 2) for i, lengths in enumerate(packs)]
    for problems in (dense, packed):
        prefill(**make(problems[0]))
        with compilations() as compiled:
            for problem in problems:
                prefill(**make(problem))
        assert not compiled


def test_batch_and_pool_sizes_compile_nothing_new() -> None:
    base = replace(PROBLEM, K=32, V=48)
    decode(**make_step(replace(base, B=4), slots=16, indices=(3, 2, 1, 0)))
    with compilations() as compiled:
        for B, slots in ((1, 1), (1, 17), (16, 16), (33, 1000)):
            decode(**make_step(replace(base, B=B), slots=slots, indices=range(B)))
    assert not compiled


def test_a_new_size_does_compile() -> None:
    """So that the two tests above can fail."""
    with compilations() as compiled:
        kda2.kda(**make(Problem(T=20, K=24, V=56, device="cuda")), impl="triton")
    assert compiled


@pytest.mark.parametrize("indices", [None, (3, -1, 0, 5)])
def test_a_step_is_one_kernel(indices: tuple[int, ...] | None) -> None:
    problem = Problem(B=4, H=2, HV=4, device="cuda")
    kwargs = make_step(problem) if indices is None else make_step(problem, slots=6, indices=indices)
    out = torch.empty_like(kwargs["v"])
    decode(**kwargs, out=out)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decode(**kwargs, out=out)
        torch.cuda.synchronize()
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 1, on_device


# memory


@pytest.mark.parametrize("lengths", [(1,) * 70_000, (4_500_000,)], ids=("70000 sequences", "70313 chunks"))
def test_more_blocks_than_a_grid_axis_holds(lengths: tuple[int, ...], impl: str, prefill: Prefill) -> None:
    kwargs = make_large(served(impl, Problem(H=1, HV=1, K=16, V=16)), sum(lengths))
    kwargs |= {"initial_state": None, "cu_seqlens": offsets(lengths, device="cuda")}
    o, state = prefill(**kwargs)
    assert state is not None and o.isfinite().all() and state.isfinite().all()
    last = {**kwargs, **{name: kwargs[name][:, -400:] for name in TOKENS}}
    last["cu_seqlens"] = offsets((1,) * 400 if len(lengths) > 1 else (400,), device="cuda")
    want, want_state = oracle(last)
    assert want_state is not None
    assert error(o[:, -200:], want[:, -200:]) < 6e-3 and error(state[-1], want_state[-1]) < 6e-3


def test_more_rows_than_a_grid_axis_holds() -> None:
    kwargs = make_step(Problem(B=70_000, H=1, HV=1, K=16, V=16, device="cuda"))
    want = kda2.kda_step(**kwargs, inplace=False, impl="torch")
    got = decode(**kwargs, inplace=False)
    assert error(got[0], want[0]) < 6e-3 and error(got[1], want[1]) < 2e-5


@pytest.mark.slow
def test_offsets_past_two_to_the_31(impl: str, prefill: Prefill) -> None:
    """2.3e9 elements of v and o: the last tokens of the last head, whose state reaches back 20 tokens, are right."""
    T = 140_000
    kwargs = make_large(served(impl, Problem(H=1, HV=128, K=16, V=128)), T)
    kwargs["initial_state"] = None
    o, state = prefill(**kwargs)
    last = {**kwargs, **{name: kwargs[name][:, -300:] for name in TOKENS}}
    want, want_state = oracle(last)
    assert state is not None and want_state is not None
    assert error(o[:, -100:], want[:, -100:]) < 6e-3 and error(state, want_state) < 6e-3


@pytest.mark.slow
def test_pool_past_two_to_the_31() -> None:
    slots = 9000
    kwargs = make_step(Problem(B=2, H=16, HV=16, K=128, V=128, device="cuda"))
    pool = torch.zeros(slots, *kwargs["state"].shape[1:], device="cuda")
    pool[[slots - 1, 0]] = kwargs["state"]
    want = kda2.kda_step(**kwargs, inplace=False, impl="reference")
    indices = torch.tensor([slots - 1, 0], device="cuda")
    o, _ = decode(**{**kwargs, "state": pool, "state_indices": indices})
    assert error(o, want[0]) < 6e-3 and error(pool[[slots - 1, 0]], want[1]) < 2e-5
    assert (pool[1 : slots - 1].abs().amax() == 0).item()
