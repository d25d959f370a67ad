"""Triton's interpreter (TRITON_INTERPRET=1) mended, for Triton 3.6 and 3.7: bf16 arithmetic, and loop bounds.

The interpreter keeps a bf16 tensor as a numpy array of uint16 bit patterns, and most of its operations then take the
patterns for integers: `tl.dot`, +, -, *, comparisons, fma, clamp, sums, casts from integers and fp64. Its fp32 -> bf16
cast truncates, turns some NaNs into infinities and loses subnormals. Loads, stores, `where`, shape operations, abs and
bf16 -> fp32 are right as they come, and Triton itself promotes max, min, cumsum, cumprod, division and modulo to fp32.

The shim computes in fp32 and rounds each result to the nearest bf16, ties to even, as the hardware does; a `tl.sum` of
bf16 is rounded once, at its end. bf16 atomic adds stay as they are.

Scalars are arrays of one element there. Triton 3.6 hands them to `int` as they are when one bounds a `range`, which
numpy refuses since 2.4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

_installed = False


def round_to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """The bit patterns of `values` (any real dtype) rounded to the nearest bf16, ties to even. Same shape.

    NaN stays NaN, infinities stay, and what is past the largest bf16 becomes infinite.
    """
    with np.errstate(over="ignore"):
        fp32 = np.ascontiguousarray(values, dtype=np.float32).reshape(values.shape)
    bits = fp32.view(np.uint32)
    # The carry out of the mantissa moves the exponent, as it should; only a NaN must not be carried.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(fp32), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values of bf16 bit patterns, exact. Same shape."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _is_bf16(handle: Any) -> bool:
    # A comparison's result carries its operands' dtype over boolean data.
    return (
        getattr(handle, "dtype", None) is not None
        and handle.dtype.scalar == tl.bfloat16
        and handle.data.dtype == np.uint16
    )


def _widen(handle: Any) -> Any:
    """A bf16 handle as fp32; anything else as it is."""
    if not _is_bf16(handle):
        return handle
    return type(handle)(from_bf16(handle.data), tl.float32)


def _narrow(handle: Any) -> Any:
    """An fp32 result as bf16; a boolean one as it is."""
    if handle.data.dtype != np.float32:
        return handle
    return type(handle)(round_to_bf16(handle.data), tl.bfloat16)


def _elementwise(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`stock`, an operation whose operands share a dtype, computed in fp32 when that dtype is bf16."""

    @functools.wraps(stock)
    def method(self: Any, *args: Any) -> Any:
        if not any(map(_is_bf16, args)):
            return stock(self, *args)
        return _narrow(stock(self, *map(_widen, args)))

    return method


def _dot(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`tl.dot` with the values of bf16 operands; the accumulator, fp32 or fp16, already decides the result's dtype."""

    @functools.wraps(stock)
    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return stock(self, _widen(a), _widen(b), *rest)

    return create_dot


def _cast(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Any cast between dtypes, mended where it leads to bf16: from bf16, Triton only asks for the cast to fp32."""

    @functools.wraps(stock)
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar != tl.bfloat16 or src.dtype.scalar == tl.bfloat16:
            return stock(self, src, dst_type)
        return type(src)(round_to_bf16(src.data), tl.bfloat16)

    return cast_impl


def _reduction(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction of one bf16 tensor, in fp32. One over several tensors combines their elements by the operations
    mended above."""

    @functools.wraps(stock)
    def apply(self: Any, value: Any) -> Any:
        if isinstance(value, tuple) or not _is_bf16(value.handle):
            return stock(self, value)
        result = stock(self, tl.tensor(_widen(value.handle), tl.block_type(tl.float32, value.shape)))
        block = result.type.is_block()
        return tl.tensor(_narrow(result.handle), tl.block_type(tl.bfloat16, result.shape) if block else tl.bfloat16)

    return apply


def _loop_bounds(stock: Callable[..., Any]) -> Callable[..., Any]:
    """What the interpreter does to `tl.tensor` as a kernel starts, with an `__index__` that takes a scalar."""

    @functools.wraps(stock)
    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch_lang_tensor


def install() -> None:
    """Mend the interpreter in this process, once. Does nothing unless TRITON_INTERPRET=1."""
    global _installed
    if _installed or not triton.knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    for name in ("binary_op", "create_fma", "create_clampf"):
        setattr(builder, name, _elementwise(getattr(builder, name)))
    builder.create_dot = _dot(builder.create_dot)
    builder.cast_impl = _cast(builder.cast_impl)
    builder.get_bf16 = lambda _self, value: interpreter.TensorHandle(round_to_bf16(np.array([value])), tl.bfloat16)
    interpreter.ReduceOps.apply = _reduction(interpreter.ReduceOps.apply)
    interpreter._patch_lang_tensor = _loop_bounds(interpreter._patch_lang_tensor)
    _installed = True
