"""Triton's interpreter: each expected value is a literal that it gets wrong by itself under a supported Triton."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kda2.backends.triton import Launch
from kda2.backends.triton import interpreter as shim
from kda2.contract import KernelConfig

BF16 = torch.bfloat16


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_rounding_agrees_with_torch_on_any_fp32_pattern(pattern: int) -> None:
    value = np.array([pattern], dtype=np.uint32).view(np.float32)
    got = torch.from_numpy(shim.round_to_bf16(value).view(np.int16)).view(BF16)
    torch.testing.assert_close(got, torch.from_numpy(value).to(BF16), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        (1.0, 0x3F80),
        (1.00390625, 0x3F80),  # half way between two bf16, to the even one below
        (1.01171875, 0x3F82),  # half way, to the even one above
        (1.99999, 0x4000),  # the carry reaches the exponent
        (3.4e38, 0x7F80),  # past the largest bf16: infinite
        (-math.inf, 0xFF80),
        (-0.0, 0x8000),
        (1e-40, 0x0001),  # subnormal
    ],
)
def test_rounding_literals(value: float, pattern: int) -> None:
    assert shim.round_to_bf16(np.array([value])).tolist() == [pattern]


def test_a_nan_with_only_low_bits_stays_nan() -> None:
    signalling = np.frombuffer(struct.pack("<I", 0x7F800001), dtype=np.float32)
    assert np.isnan(shim.from_bf16(shim.round_to_bf16(signalling))).all()


def test_shape_is_kept() -> None:
    bits = shim.round_to_bf16(np.ones((2, 3)).T)
    assert bits.shape == (3, 2)
    assert shim.from_bf16(bits).tolist() == [[1.0, 1.0]] * 3


def test_nothing_is_patched_outside_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    before = InterpreterBuilder.create_dot
    monkeypatch.setattr(shim, "_installed", False)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    shim.install()
    assert InterpreterBuilder.create_dot is before


@triton.jit
def _dot(p_a, p_b, p_c, p_o, N: tl.constexpr, HAS_ACC: tl.constexpr):
    o_i = tl.arange(0, N)
    o_ij = o_i[:, None] * N + o_i[None, :]
    b_a = tl.load(p_a + o_ij)
    b_b = tl.load(p_b + o_ij)
    b_o = tl.dot(b_a, b_b, tl.load(p_c + o_ij)) if HAS_ACC else tl.dot(b_a, b_b, out_dtype=tl.float32)
    tl.store(p_o + o_ij, b_o)


@triton.jit
def _unary(p_x, p_o, N: tl.constexpr, OP: tl.constexpr):
    o_i = tl.arange(0, N)
    b_x = tl.load(p_x + o_i)
    if OP == "cast":
        b_o = b_x.to(p_o.dtype.element_ty)
    elif OP == "negate":
        b_o = -b_x
    elif OP == "abs":
        b_o = tl.abs(b_x)
    elif OP == "double":
        b_o = b_x * 2.0
    elif OP == "cumsum":
        b_o = tl.cumsum(b_x, 0)
    elif OP == "cumprod":
        b_o = tl.cumprod(b_x, 0)
    elif OP == "positive":
        b_o = tl.where(b_x > 0, b_x, tl.zeros_like(b_x))
    elif OP == "between":
        b_o = tl.where((b_x > -2.5) & (b_x < 2.5), b_x, tl.full([N], 7.0, tl.bfloat16))
    elif OP == "exp2":
        b_o = tl.exp2(b_x.to(tl.float32))
    tl.store(p_o + o_i, b_o.to(p_o.dtype.element_ty))


@triton.jit
def _binary(p_x, p_y, p_o, N: tl.constexpr, OP: tl.constexpr):
    o_i = tl.arange(0, N)
    b_x = tl.load(p_x + o_i)
    b_y = tl.load(p_y + o_i)
    if OP == "add":
        b_o = b_x + b_y
    elif OP == "subtract":
        b_o = b_x - b_y
    elif OP == "multiply":
        b_o = b_x * b_y
    elif OP == "divide":
        b_o = b_x / b_y
    elif OP == "fma":
        b_o = tl.fma(b_x, b_y, b_y)
    elif OP == "maximum":
        b_o = tl.maximum(b_x, b_y)
    elif OP == "clamp":
        b_o = tl.clamp(b_x, -b_y, b_y)
    elif OP == "less":
        b_o = b_x < b_y
    tl.store(p_o + o_i, b_o.to(p_o.dtype.element_ty))


@triton.jit
def _reduce(p_x, p_o, M: tl.constexpr, N: tl.constexpr, OP: tl.constexpr):
    o_i = tl.arange(0, M)
    b_x = tl.load(p_x + o_i[:, None] * N + tl.arange(0, N)[None, :])
    if OP == "sum":
        tl.store(p_o + o_i, tl.sum(b_x, 1))
    elif OP == "max":
        tl.store(p_o + o_i, tl.max(b_x, 1))
    elif OP == "total":
        tl.store(p_o, tl.sum(b_x).to(tl.bfloat16))


@triton.jit
def _masked_load(p_x, p_o, n, N: tl.constexpr):
    o_i = tl.arange(0, N)
    tl.store(p_o + o_i, tl.load(p_x + o_i, mask=o_i < n, other=-1.5))


@triton.jit
def _repeat(p_x, p_o, n, N: tl.constexpr):
    o_i = tl.arange(0, N)
    b_sum = tl.zeros([N], tl.float32)
    for _ in range(tl.load(p_x)):
        b_sum += 1.0
    for _ in range(n, n * 2, n):
        b_sum += 10.0
    for _ in range((n + N - 1) // N):
        b_sum += 100.0
    tl.store(p_o + o_i, b_sum)


def _run(kernel: object, **args: object) -> None:
    Launch("test", kernel, 1, args, KernelConfig(num_warps=1, num_stages=1)).run()


@pytest.mark.interpreter
@pytest.mark.parametrize("has_acc", [False, True])
def test_dot_takes_values_not_bit_patterns(has_acc: bool) -> None:
    a = torch.full((16, 16), 1.5, dtype=BF16)
    b = torch.full((16, 16), -0.25, dtype=BF16)
    c, o = torch.full((16, 16), 100.0), torch.empty(16, 16)
    _run(_dot, p_a=a, p_b=b, p_c=c, p_o=o, N=16, HAS_ACC=has_acc)
    assert o.unique().tolist() == [94.0 if has_acc else -6.0]


@pytest.mark.interpreter
def test_dot_of_fp16_and_fp32_is_left_alone() -> None:
    for dtype in (torch.float16, torch.float32):
        a = torch.full((16, 16), 0.5, dtype=dtype)
        o = torch.empty(16, 16)
        _run(_dot, p_a=a, p_b=a, p_c=o, p_o=o, N=16, HAS_ACC=False)
        assert o.unique().tolist() == [4.0]


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_casts_round_to_nearest_even(dtype: torch.dtype) -> None:
    x = torch.tensor([1.00390625, 1.01171875, 1.99999, -3.4e38, math.inf, math.nan, -0.0, 1e-40], dtype=dtype)
    o = torch.empty(8, dtype=BF16)
    _run(_unary, p_x=x, p_o=o, N=8, OP="cast")
    # 1e-40 is nearest to the smallest subnormal of bf16
    wanted = torch.tensor([1.0, 1.015625, 2.0, -math.inf, math.inf, math.nan, -0.0, 2.0**-133], dtype=BF16)
    torch.testing.assert_close(o, wanted, rtol=0, atol=0, equal_nan=True)
    assert o[6].signbit()


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16])
def test_casts_from_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, -2, 257], dtype=dtype)
    o = torch.empty(4, dtype=BF16)
    _run(_unary, p_x=x, p_o=o, N=4, OP="cast")
    assert o.tolist() == [0.0, 1.0, -2.0, 256.0]


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32])
def test_casts_to_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, -2.0, 96.0], dtype=BF16)
    o = torch.empty(4, dtype=dtype)
    _run(_unary, p_x=x, p_o=o, N=4, OP="cast")
    assert o.tolist() == [0, 1, -2, 96]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("negate", [-1.5, 3.0, -0.25, 100.0]),
        ("abs", [1.5, 3.0, 0.25, 100.0]),
        ("double", [3.0, -6.0, 0.5, -200.0]),
        ("cumsum", [1.5, -1.5, -1.25, -101.0]),
        ("cumprod", [1.5, -4.5, -1.125, 112.5]),
        ("positive", [1.5, 0.0, 0.25, 0.0]),
        ("between", [1.5, 7.0, 0.25, 7.0]),
        ("exp2", [2.828125, 0.125, 1.1875, 2.0**-100]),
    ],
)
def test_operations_on_one_tensor(op: str, wanted: list[float]) -> None:
    x = torch.tensor([1.5, -3.0, 0.25, -100.0], dtype=BF16)
    o = torch.empty(4, dtype=BF16)
    _run(_unary, p_x=x, p_o=o, N=4, OP=op)
    assert o.tolist() == wanted


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("add", [2.0, -2.5, 256.0, 0.25]),  # 257 lies half way between 256 and 258
        ("subtract", [1.0, -3.5, 255.0, -0.25]),
        ("multiply", [0.75, -1.5, 256.0, 0.0]),
        ("divide", [3.0, -6.0, 256.0, 0.0]),
        ("fma", [1.25, -1.0, 256.0, 0.25]),
        ("maximum", [1.5, 0.5, 256.0, 0.25]),
        ("clamp", [0.5, -0.5, 1.0, 0.0]),
        ("less", [0.0, 1.0, 0.0, 1.0]),
    ],
)
def test_operations_on_two_tensors(op: str, wanted: list[float]) -> None:
    x = torch.tensor([1.5, -3.0, 256.0, 0.0], dtype=BF16)
    y = torch.tensor([0.5, 0.5, 1.0, 0.25], dtype=BF16)
    o = torch.empty(4, dtype=BF16)
    _run(_binary, p_x=x, p_y=y, p_o=o, N=4, OP=op)
    assert o.tolist() == wanted


@pytest.mark.interpreter
@pytest.mark.parametrize(("op", "wanted"), [("sum", [3.0, -3.0]), ("max", [2.5, -0.5]), ("total", [0.0, 9.0])])
def test_reductions(op: str, wanted: list[float]) -> None:
    x = torch.tensor([[0.5, 2.5], [-2.5, -0.5]], dtype=BF16)
    o = torch.tensor([9.0, 9.0], dtype=BF16)
    _run(_reduce, p_x=x, p_o=o, M=2, N=2, OP=op)
    assert o.tolist() == wanted


@pytest.mark.interpreter
def test_masked_load_fills_with_the_value() -> None:
    x = torch.tensor([1.5, 2.5, 3.5, 4.5], dtype=BF16)
    o = torch.empty(4, dtype=BF16)
    _run(_masked_load, p_x=x, p_o=o, n=2, N=4)
    assert o.tolist() == [1.5, 2.5, -1.5, -1.5]


@pytest.mark.interpreter
def test_scalars_bound_loops() -> None:
    o = torch.empty(4)
    _run(_repeat, p_x=torch.tensor([3], dtype=torch.int32), p_o=o, n=5, N=4)
    assert o.tolist() == [3 * 1.0 + 10.0 + 2 * 100.0] * 4


@pytest.mark.interpreter
def test_installing_again_changes_nothing() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    before = InterpreterBuilder.create_dot
    shim.install()
    assert InterpreterBuilder.create_dot is before
