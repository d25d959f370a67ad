"""Checks of one argument, whatever the operator: each raises an error that names the argument, what was wanted and what
came."""

from __future__ import annotations

from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from kda2.errors import InvalidType, InvalidValue


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise InvalidType(name, "a torch.Tensor", type(x).__name__)
    if x.layout != torch.strided:
        raise InvalidValue(name, "a strided tensor", str(x.layout), f"pass {name}.to_dense()")
    if x.is_nested:
        raise InvalidValue(name, "one tensor", "a nested one", "pack the sequences into one row, with cu_seqlens")
    if x.is_neg():  # a kernel would read the memory, whose sign is pending
        raise InvalidValue(name, "a tensor whose memory is its value", "a negative view", f"pass {name}.resolve_neg()")


def check_shape(name: str, x: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(x.shape) != wanted:
        raise InvalidValue(name, shape_text(wanted), str(tuple(x.shape)))


def check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise InvalidValue(name, f"on q's device {q.device}", f"on {x.device}", f"move it: {name}.to(q.device)")


def check_writable(name: str, x: Tensor) -> None:
    """Refuse tensors whose elements share memory (an expanded one, sliding windows): what they would hold depends on
    who writes last."""
    if x.is_contiguous():
        return
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise InvalidValue(
                name, "without elements that share memory", f"strides {x.stride()}", f"pass {name}.clone()"
            )
        reach += stride * (size - 1)


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether the spans of memory that two tensors reach over meet."""
    (x0, x1), (y0, y1) = _span(x), _span(y)
    return x0 < y1 and y0 < x1


def _span(x: Tensor) -> tuple[int, int]:
    """(first byte, one past the last) of a tensor; empty where it has no data."""
    if not x.numel() or x.is_meta:
        return 0, 0
    last = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def flag(name: str, x: object) -> bool:
    """A flag as a bool. Truthiness would take "False" for true, and would wait for the device of a tensor."""
    if not isinstance(x, bool | np.bool_):
        raise InvalidType(name, "True or False", type(x).__name__)
    return bool(x)


def int64(name: str, x: object) -> int:
    if isinstance(x, bool) or not isinstance(x, Integral):
        raise InvalidType(name, "an int", type(x).__name__)
    slot = int(x)
    if not -(2**63) <= slot < 2**63:
        raise InvalidValue(name, "an int of 64 bits", repr(slot))
    return slot


def real_number(name: str, x: object) -> float:
    """`x` as a float, NumPy's scalars included. Raises `InvalidType` for anything else: flags, strings, and tensors,
    whose value may be on a GPU."""
    if isinstance(x, bool | np.bool_) or not isinstance(x, Real):
        raise InvalidType(name, "a number", type(x).__name__)
    try:
        return float(x)
    except OverflowError as e:
        raise InvalidValue(name, "a number that a float holds", "a larger one") from e


def shape_text(shape: tuple[int | str, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
