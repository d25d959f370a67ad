"""Catching wrong memory accesses: fresh memory that starts as NaN, fingerprints of inputs, guard bands."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

_ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)


def poison(x: Tensor) -> Tensor:
    """Fill `x` with what no kernel may let through: NaN, or the largest integer."""
    if x.is_floating_point() or x.is_complex():
        return x.fill_(torch.nan)
    return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)


@contextmanager
def _fresh_memory_through(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Pass what torch.empty and its relatives give through `change`. Patches torch for the whole process, so use it
    where one thread allocates."""

    def changing(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_and_change(*args: Any, **kwargs: Any) -> Tensor:
            with torch.no_grad():
                x = allocate(*args, **kwargs)
                return x if x.is_meta else change(x)

        return allocate_and_change

    saved = [(owner, name, getattr(owner, name)) for owner, name in _ALLOCATORS]
    try:
        for owner, name, allocate in saved:
            setattr(owner, name, changing(allocate))
        yield
    finally:
        for owner, name, allocate in saved:
            setattr(owner, name, allocate)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, fresh memory is filled by `poison`: elements never written show as NaN."""
    with _fresh_memory_through(poison):
        yield


@contextmanager
def fenced_memory(band: int = 4096) -> Iterator[list[Guarded]]:
    """Inside, fresh floating tensors lie between guard bands; gives the list of them, which grows."""
    fenced: list[Guarded] = []

    def fence(x: Tensor) -> Tensor:
        if not x.is_floating_point() or not x.is_contiguous():
            return poison(x)
        fenced.append(guarded(x, band))
        return poison(fenced[-1].inside)

    with _fresh_memory_through(fence):
        yield fenced


def fingerprint(kwargs: Mapping[str, Any]) -> dict[str, str]:
    """A hash of every tensor's whole storage, gaps between strided rows included, by argument name."""
    plain = dict(kwargs)
    for x in (x for x in kwargs.values() if is_dataclass(x)):  # a gate holds tensors of its own
        plain |= {f.name: getattr(x, f.name) for f in fields(x)}
    return {name: _hash(x) for name, x in plain.items() if isinstance(x, Tensor)}


def _hash(x: Tensor) -> str:
    raw = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
    return hashlib.sha256(raw.cpu().numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Guarded:
    """A tensor inside a larger buffer. `inside` is the tensor, `intact()` whether the bands around it still are."""

    inside: Tensor
    buffer: Tensor
    band: int

    def intact(self) -> bool:
        before, after = self.buffer[: self.band], self.buffer[self.band + self.inside.numel() :]
        return bool(before.isnan().all()) and bool(after.isnan().all())


def guarded(x: Tensor, band: int = 4096) -> Guarded:
    """A contiguous copy of the floating tensor `x` between two bands of `band` NaN."""
    buffer = torch.full((x.numel() + 2 * band,), torch.nan, dtype=x.dtype, device=x.device)
    inside = buffer[band : band + x.numel()].view(x.shape)
    inside.copy_(x)
    return Guarded(inside, buffer, band)
