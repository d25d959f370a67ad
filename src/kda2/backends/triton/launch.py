"""One kernel launch as a value: it runs on a GPU (or under the interpreter), or is compiled offline for another."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kda2.backends.triton import cache
from kda2.contract import KernelConfig

# Triton publishes a freshly compiled kernel to other threads before it has loaded its code onto the device, and its
# interpreter keeps the grid position in one global: neither survives two launches at a time.
_one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class Launch:
    """`kernel`, Triton's or Gluon's, over `grid` with `args` by name: tensors, TMA descriptors, ints, floats, None and
    the constexprs. At least one is a plain tensor.

    The tensors may be on the meta device when the launch is only to be compiled. `maxnreg` is the most registers that a
    thread may start with; None leaves them to the compiler. `ptxas` are options for it.
    """

    stage: str
    kernel: Any
    grid: int
    args: Mapping[str, Any]
    config: KernelConfig
    maxnreg: int | None = None
    ptxas: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of Triton's compiler that the launch sets."""
        set_here = {"maxnreg": self.maxnreg, "ptx_options": self.ptxas}
        options = {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}
        return {**options, **{name: x for name, x in set_here.items() if x is not None}}

    def run(self) -> None:
        """Launch on the current stream of the tensors' device, current or not. An empty grid launches nothing.

        Safe to call from several threads: they take turns for the microseconds of a launch, and wait for a kernel's
        first compilation.
        """
        if self.grid == 0:
            return
        cache.ensure_writable()
        device = next(x.device for x in self.args.values() if isinstance(x, torch.Tensor))
        with _one_at_a_time:
            if device.type != "cuda" or device.index == torch.cuda.current_device():
                self._launch()
            else:
                with torch.cuda.device(device):
                    self._launch()

    def _launch(self) -> None:
        self.kernel[(self.grid,)](**self.args, **self.options)
