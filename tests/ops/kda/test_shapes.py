"""Shapes that nobody listed: drawn at random, the same ones every time."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import served

import kda2
from kda2.testing import Problem, judge, judge_step, make, make_step
from kda2.testing.inputs import RESTRIDE
from kda2.testing.verify import expected

DTYPES = st.sampled_from((torch.bfloat16, torch.float16, torch.float32))
EXAMPLES = 8 if os.environ.get("TRITON_INTERPRET") == "1" else 40
# The least rows of o, by repeating sequences: one or two may be small by chance, and their relative error then large.
ROWS = 64
few = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
TORCH, INTERPRETED = ("torch", "cpu"), pytest.param("triton", "cpu", marks=pytest.mark.interpreter)
TRITON = pytest.param("triton", "cuda", marks=pytest.mark.gpu)
HOPPER = pytest.param("hopper", "cuda", marks=[pytest.mark.gpu, pytest.mark.hopper])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any call within the contract whose conditioning is ordinary: `ROWS` or none to compare, and at least 8 channels
    (16 where operands have 16 bits), so that a chunk's keys are not nearly parallel."""
    H = draw(st.integers(1, 2))
    packed = draw(st.booleans())
    sigmoid = draw(st.booleans())
    HV = H * draw(st.integers(1, 2))
    lengths = tuple(draw(st.lists(st.integers(0, 70), max_size=3))) if packed else None
    B, T = 1 if packed else draw(st.integers(0, 2)), draw(st.integers(0, 90))
    rows = HV * (B * T if lengths is None else sum(lengths))
    times = -(-ROWS // rows) if rows else 1
    dtype = draw(DTYPES)
    return Problem(
        lengths=None if lengths is None else lengths * times,
        tail=draw(st.integers(0, 5)) if packed else 0,
        B=1 if packed else B * times,
        T=T,
        H=H,
        HV=HV,
        K=draw(st.integers(8 if dtype == torch.float32 else 16, 80)),
        V=draw(st.integers(1, 80)),
        dtype=dtype,
        g_dtype=draw(st.sampled_from((None, torch.float32))),
        gate=draw(st.sampled_from(("log", "log_bounded", "softplus", "bounded"))),
        regime=draw(st.sampled_from(("strong", "weak", "mixed", "none"))),
        dt_bias=draw(st.booleans()),
        qk_l2norm=draw(st.booleans()),
        beta_sigmoid=sigmoid,
        neg_eigval=sigmoid and draw(st.booleans()),
        state=draw(st.sampled_from((None, torch.float32, torch.bfloat16))),
        final_state=draw(st.booleans()),
        layout=draw(st.sampled_from(("kv", "vk"))),
        strides=draw(st.sampled_from(tuple(RESTRIDE))),
        seed=draw(st.integers(0, 1000)),
    )


def on(device: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments on `device`, strides kept."""
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
    gate = kwargs["gate"]
    if gate.A_log is not None:
        bias = None if gate.dt_bias is None else gate.dt_bias.to(device)
        moved["gate"] = kda2.Gate(gate.kind, gate.A_log.to(device), bias, gate.lower_bound)
    return moved


@pytest.mark.parametrize(("impl", "device"), [TORCH, INTERPRETED, TRITON, HOPPER])
@few
@given(problem=problems())
def test_prefill(impl: str, device: str, problem: Problem) -> None:
    kwargs = make(served(impl, problem))
    got = kda2.kda(**on(device, kwargs), impl=impl)
    comparisons = judge((got[0].cpu(), None if got[1] is None else got[1].cpu()), expected(kwargs), kwargs)
    assert all(c.ok for c in comparisons), "\n".join(map(str, comparisons))


@pytest.mark.parametrize(("impl", "device"), [TORCH, INTERPRETED, TRITON])
@few
@given(problem=problems(), rows=st.integers(0, 4), data=st.data())
def test_step(impl: str, device: str, problem: Problem, rows: int, data: st.DataObject) -> None:
    slots = rows + 2
    indices = data.draw(st.permutations(range(slots)))[:rows]
    pad = data.draw(st.sampled_from((-1, 0)))
    kwargs = make_step(replace(problem, B=rows), slots=slots, indices=indices, pad_slot=pad)
    o, state = kda2.kda_step(**on(device, kwargs), inplace=False, impl=impl)
    comparisons = judge_step((o.cpu(), state.cpu()), kwargs)
    assert all(c.ok for c in comparisons), "\n".join(map(str, comparisons))
