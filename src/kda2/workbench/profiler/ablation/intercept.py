"""The Triton and Gluon launches of a call: recorded while they run, left out, or doubled.

A stage is a kernel, known by its function's name, with all the launches that a call makes of it. Kernels under
`triton.autotune` must have been called before, so that they launch what they have chosen.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from kda2.errors import UnsupportedTarget
from kda2.workbench.inspector import occupancy

# Launches one kernel: what JITFunction.run takes.
_Launcher = Callable[..., Any]
_Around = Callable[[_Launcher, Any, tuple[Any, ...], Any, dict[str, Any]], Any]


@triton.jit
def _nothing(p_any):  # type: ignore[no-untyped-def]
    pass


@dataclass(frozen=True)
class Launched:
    """One launch: its kernel's name, its grid and warps, how many CTAs fit on a multiprocessor at once (None: not
    known), the bytes of the tensors that it was given, and what makes it again over a grid."""

    stage: str
    grid: tuple[int, ...]
    warps: int
    resident: int | None
    nbytes: int
    over: Callable[[tuple[int, ...]], Any]

    @property
    def programs(self) -> int:
        return math.prod(self.grid)

    def again(self) -> None:
        self.over(self.grid)

    def cut(self, most: int) -> tuple[int, ...]:
        """The beginning of its grid, of at most so many programs."""
        left, shape = most, []
        for extent in self.grid:
            shape.append(max(1, min(extent, left)))
            left //= shape[-1]
        return tuple(shape)


def record(call: Callable[[], Any], arch: int) -> list[Launched]:
    """Run `call` and return its launches, in order. They keep the tensors that they were given."""
    found: list[Launched] = []

    def around(launch: _Launcher, kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Any:
        shape, given = _shape(kernel, args, grid, kwargs), (*args, *kwargs.values())

        def over(cut: tuple[int, ...]) -> Any:
            return launch(kernel, *args, grid=cut, warmup=False, **kwargs)

        compiled = over(shape)
        warps = kwargs.get("num_warps", 4)
        found.append(Launched(_name(kernel), shape, warps, _resident(compiled, arch), _nbytes(given), over))
        return compiled

    with _intercepted(around):
        call()
    return found


def altered(call: Callable[[], Any], without: str | None = None, twice: str | None = None) -> Callable[[], Any]:
    """`call` with one stage left out or doubled. What it computes is wrong on purpose."""

    def around(launch: _Launcher, kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Any:
        if _name(kernel) == without:
            return None
        if _name(kernel) == twice:
            launch(kernel, *args, grid=grid, warmup=False, **kwargs)
        return launch(kernel, *args, grid=grid, warmup=False, **kwargs)

    def run() -> Any:
        with _intercepted(around):
            return call()

    return run


def emptied(launched: Sequence[Launched], p_any: Tensor) -> Callable[[], None]:
    """As many launches over the same grids of a kernel that does nothing. `p_any` is a tensor on their device."""

    def run() -> None:
        for x in launched:
            _nothing[x.grid](p_any, num_warps=x.warps)

    return run


@contextlib.contextmanager
def _intercepted(around: _Around) -> Iterator[None]:
    """Inside, every launch goes through `around`."""
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:
            return launch(self, *args, grid=grid, warmup=True, **kwargs)
        return around(launch, self, args, grid, kwargs)

    with mock.patch.object(JITFunction, "run", run):
        yield


def _name(kernel: Any) -> str:
    return str(kernel.fn.__name__)


def _shape(kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
    if not callable(grid):
        return tuple(grid)
    defaults = {p.name: p.default for p in kernel.params if p.has_default}
    return tuple(grid(defaults | dict(zip(kernel.arg_names, args, strict=False)) | kwargs))


def _resident(compiled: Any, arch: int) -> int | None:
    registers, facts = getattr(compiled, "n_regs", None), getattr(compiled, "metadata", None)
    if not registers or facts is None:
        return None
    try:
        return occupancy(arch, registers, facts.num_warps, facts.shared).ctas or None
    except UnsupportedTarget:
        return None


def _nbytes(given: tuple[Any, ...]) -> int:
    """Bytes of the tensors among the arguments, behind TMA descriptors too, each once."""
    tensors = (x if isinstance(x, torch.Tensor) else getattr(x, "base", None) for x in given)
    return sum({x.data_ptr(): x.nbytes for x in tensors if isinstance(x, torch.Tensor)}.values())
