"""The Triton launches that a file's `run` makes, recorded instead of made: enough to build them for a GPU that need not
be here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from kda2.backends.triton import Launch
from kda2.backends.triton.build import code_key
from kda2.contract import KernelConfig
from kda2.workbench.verifier.foreign import Kernel


def launches_of(kernel: Kernel, inputs: dict[str, Any], arch: int) -> list[Launch]:
    """Run the kernel's own host code with every launch recorded: the first of each machine code that they run on
    sm_<arch>, in Triton or in Gluon. What `run` computes is worthless and dropped. Raises what the host code raises.

    A kernel under `triton.autotune` is recorded in its first configuration. Codes of one kernel get names apart.
    """
    with recorded(arch) as launches:
        if kernel.prepare is not None:
            kernel.prepare(**inputs)
        launches.clear()  # prepare may warm up what run launches again
        kernel.run(**inputs)
    return _named_apart(list(launches.values()))


@contextlib.contextmanager
def recorded(arch: int) -> Iterator[dict[str, Launch]]:
    """Inside, launching a Triton kernel adds to the dict, by the code it runs, and does nothing else."""
    launches: dict[str, Launch] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = _launch(self, args, grid, kwargs)
        # a loop over tokens launches one code thousands of times: only the first keeps its tensors
        launches.setdefault(code_key(launch, arch), launch)

    with mock.patch.object(JITFunction, "run", run), untuned():
        yield launches


@contextlib.contextmanager
def untuned() -> Iterator[None]:
    """Inside, a kernel under `triton.autotune` takes its first configuration: there is no GPU to time others on."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.configs[0]
        chosen = kwargs | config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **chosen})
        return self.fn.run(*args, **chosen)

    with mock.patch.object(Autotuner, "run", run):
        yield


def _launch(kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Launch:
    named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    config = KernelConfig(named.pop("num_warps", 4), named.pop("num_stages", 3))
    defaults = {p.name: p.default for p in kernel.params if p.has_default}
    shape = grid(defaults | named) if callable(grid) else grid
    return Launch(kernel.fn.__name__, kernel, int(math.prod(shape)), named, config)


def _named_apart(launches: list[Launch]) -> list[Launch]:
    seen: dict[str, int] = {}
    apart = []
    for launch in launches:
        seen[launch.stage] = seen.get(launch.stage, 0) + 1
        name = launch.stage if seen[launch.stage] == 1 else f"{launch.stage} {seen[launch.stage]}"
        apart.append(replace(launch, stage=name))
    return apart
