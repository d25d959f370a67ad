"""Comparing an output with its reference: how far off, where it is worst, and words that help to find out why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kda2.contract import Tolerance

TOKEN_AXES = ("batch", "token", "head", "channel")
ROW_AXES = ("row", "head", "channel")
STATE_AXES = {"kv": ("sequence", "head", "key", "value"), "vk": ("sequence", "head", "value", "key")}


def error(got: Tensor, ref: Tensor, floor: float = 0.0) -> float:
    """Relative L2 error ||got - ref|| / ||ref||, in fp64; inf if anything is not finite.

    `floor` is the RMS that the reference is at least taken to have: one that is zero by nature (the output at t = 0 of
    a dead head, say) or nearly zero by chance (the output of one token) then compares sanely. Shapes must agree.
    """
    if got.numel() == 0:
        return 0.0
    got, ref = got.detach().double(), ref.detach().double()
    off = torch.linalg.vector_norm(got - ref).item()
    size = max(torch.linalg.vector_norm(ref).item(), floor * ref.numel() ** 0.5)
    if not math.isfinite(off):
        return math.inf
    if off == 0.0:
        return 0.0
    return off / size if size else math.inf


def rms(x: Tensor) -> float:
    """Root mean square of all elements; 0 of an empty tensor."""
    return x.detach().double().square().mean().sqrt().item() if x.numel() else 0.0


@dataclass(frozen=True)
class Worst:
    """The element that is furthest off, `rms_off` times the unit of `compare`."""

    place: str
    got: float
    want: float
    rms_off: float

    def __str__(self) -> str:
        return f"{self.place}: got {self.got:.6g}, want {self.want:.6g}, {self.rms_off:.3g} RMS off"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. `mismatch` says why two tensors could not be compared at all, `provenance` where the limits
    come from."""

    quantity: str
    relative_l2: float
    limit: float
    element_limit: float
    worst: Worst | None
    non_finite: int
    non_finite_want: int
    first_non_finite: str = ""
    mismatch: str = ""
    provenance: str = ""

    @property
    def ok(self) -> bool:
        """Within both limits, everything finite, shape and dtype as wanted."""
        if self.mismatch or self.non_finite or self.non_finite_want:
            return False
        return self.relative_l2 <= self.limit and (self.worst is None or self.worst.rms_off <= self.element_limit)

    @property
    def margin(self) -> float:
        """The larger of both errors over its limit: at most 1 for a pass, inf where nothing could be compared."""
        if self.mismatch or self.non_finite or self.non_finite_want:
            return math.inf
        element = self.worst.rms_off if self.worst else 0.0
        return max(self.relative_l2 / self.limit, element / self.element_limit)

    def explain(self) -> str:
        """What is wrong, or how well it agrees, in sentences."""
        if self.mismatch:
            return f"{self.quantity}: {self.mismatch}"
        if self.non_finite_want:
            return f"{self.quantity}: the reference itself has {self.non_finite_want} NaN or inf; mend the inputs first"
        if self.non_finite:
            return (
                f"{self.quantity}: {self.non_finite} elements are NaN or inf, the first at {self.first_non_finite}; "
                "look for exponentials of positive numbers, inf - inf, and memory that was never written"
            )
        verdict = "agrees" if self.ok else "is off"
        text = f"{self.quantity} {verdict}: relative L2 {self.relative_l2:.2e} (limit {self.limit:.2e})"
        if self.worst is not None:
            text += f"; worst element at {self.worst} (limit {self.element_limit:.3g})"
        return text

    __str__ = explain


def compare(
    got: Tensor,
    want: Tensor,
    tolerance: Tolerance,
    *,
    quantity: str = "o",
    axes: Sequence[str] | None = None,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype | None = None,
    floor: float = 0.0,
) -> Comparison:
    """Hold `got` against `want` (any precision, usually fp64).

    Two tests: the relative L2 error over the whole tensor (see `error`), and per element the distance in units of the
    larger of the tensor's RMS and the RMS of the element's own last axis. `floor` is the RMS that the tensor is at
    least taken to have, in both.

    `dtype`: what `got` must have. `axes` names the axes of the worst element's index; with `cu_seqlens` a token is
    given as sequence and token within it. `got` may be on any device.
    """
    names = tuple(axes) if axes else tuple(f"axis{i}" for i in range(want.dim()))
    mismatch = _mismatch(got, want, dtype)
    if mismatch:
        limits = (tolerance.relative_l2, tolerance.element_rms)
        return Comparison(quantity, math.inf, *limits, None, 0, 0, mismatch=mismatch, provenance=tolerance.provenance)
    offsets = None if cu_seqlens is None else cu_seqlens.tolist()
    got, want = got.detach().double(), want.detach().to(got.device).double()
    bad = ~got.isfinite()
    return Comparison(
        quantity,
        relative_l2=error(got, want, floor),
        limit=tolerance.relative_l2,
        element_limit=tolerance.element_rms,
        worst=_worst(got, want, floor, names, offsets),
        non_finite=int(bad.sum()),
        non_finite_want=int((~want.isfinite()).sum()),
        first_non_finite=_place(bad.flatten().long().argmax().item(), want.shape, names, offsets) if bad.any() else "",
        provenance=tolerance.provenance,
    )


def _mismatch(got: object, want: Tensor, dtype: torch.dtype | None) -> str:
    if not isinstance(got, Tensor):
        return f"wanted a tensor, got {type(got).__name__}"
    if got.shape != want.shape:
        return f"wanted shape {tuple(want.shape)}, got {tuple(got.shape)}"
    if dtype is not None and got.dtype != dtype:
        return f"wanted dtype {dtype}, got {got.dtype}"
    return ""


def _worst(got: Tensor, want: Tensor, floor: float, names: tuple[str, ...], offsets: list[int] | None) -> Worst | None:
    if not want.numel():
        return None
    unit = want.square().mean(-1, keepdim=True).sqrt().clamp(min=max(rms(want), floor))
    off = (got - want).abs()
    off = torch.where(off == 0, 0.0, off / unit).nan_to_num(nan=math.inf)
    flat = int(off.argmax())
    return Worst(
        _place(flat, want.shape, names, offsets),
        got.flatten()[flat].item(),
        want.flatten()[flat].item(),
        off.flatten()[flat].item(),
    )


def _place(flat: int | float, shape: torch.Size, names: tuple[str, ...], offsets: list[int] | None) -> str:
    """The index of the element `flat`, spelt with the names of its axes."""
    rest, index = int(flat), []
    for size in reversed(shape):
        rest, i = divmod(rest, size)
        index.append(i)
    at = dict(zip(names, reversed(index), strict=True))
    if offsets is not None and "token" in at:
        at = _in_sequence(at, offsets)
    return ", ".join(f"{name} {i}" for name, i in at.items())


def _in_sequence(at: dict[str, int], offsets: list[int]) -> dict[str, int]:
    """Replace (batch 0, token) of a packed batch by (sequence, token within it)."""
    token = at["token"]
    rest = {name: i for name, i in at.items() if name not in ("batch", "token")}
    for n, (start, end) in enumerate(pairwise(offsets)):
        if start <= token < end:
            return {"sequence": n, "token": token - start, **rest}
    return {"token past the last sequence": token, **rest}
