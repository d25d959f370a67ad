"""What is watched in the process that runs a kernel: functions that judge or measure, modules that know the answers,
memory that is not the kernel's to write or to return.

All of it is in the kernel's own process, where native code can undo it; the judge relies on none of it to be right. It
tells a person what a file does, and costs the cheap cheats their place to hide (DESIGN.md, "What can still be forged").
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import kda2
from kda2 import memory
from kda2.workbench.verifier.policy import JUDGES

# Whose functions a verdict rests on, beside the judge's own.
_OWNERS: tuple[Any, ...] = (
    builtins, hashlib, json, os, sys, time, importlib, memory, torch, torch.cuda, torch.cuda.Event, torch.cuda.Stream,
    torch.cuda.CUDAGraph, torch.linalg, Tensor,
)  # fmt: skip
_OWN = "kda2.workbench."
_HOME = str(Path(kda2.__file__).parent) + os.sep
# Where sources lie that know the answers. Those of the judge are read whenever a traceback is made.
_TESTING, _OPS = _HOME + "testing" + os.sep, _HOME + "ops" + os.sep
_ORACLE = "reference."
# What torch.compile wraps when it is first used.
_WRAPPED = ("torch.manual_seed", "torch.seed")
_STARTS = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system")


class Seal:
    """Remembers the functions, classes and settings that a verdict rests on; `broken` names those that are others."""

    __slots__ = ("_finders", "_kept", "_owners", "_settings")

    def __init__(self) -> None:
        own = [module for name, module in sorted(sys.modules.items()) if name.startswith(_OWN)]
        classes = [x for module in own for x in vars(module).values() if _is_defined_in(x, module)]
        self._owners = [(_name(owner), owner) for owner in (*_OWNERS, *own, *classes)]
        self._finders, self._settings = list(sys.meta_path), _settings()
        self._kept = dict(self._functions())

    def settle(self) -> None:
        """Take the settings of now for those that must stay: a file may choose its own when it is imported."""
        self._settings = _settings()

    def broken(self) -> list[str]:
        """The names whose value is another than at first, or gone. What was added is nobody's loss."""
        now = dict(self._functions())
        found = [name for name, value in self._kept.items() if now.get(name) is not value]
        if any(finder not in sys.meta_path for finder in self._finders):
            found.append("sys.meta_path")
        settings = _settings()
        return found + [name for name, value in self._settings.items() if settings[name] != value]

    def _functions(self) -> Iterator[tuple[str, Any]]:
        for name, owner in self._owners:
            for attribute, x in _members(owner).items():
                if f"{name}.{attribute}" in _WRAPPED:
                    continue
                if callable(x) or isinstance(x, (ModuleType, property, staticmethod, classmethod)):
                    yield f"{name}.{attribute}", x
                if isinstance(x, FunctionType):  # the same function may be given other code
                    yield f"{name}.{attribute}.__code__", x.__code__


def _members(owner: Any) -> dict[str, Any]:
    """What an owner has, of a class what it inherits too: an attribute of its own would hide that."""
    classes = reversed(owner.__mro__) if isinstance(owner, type) else (owner,)
    return {name: x for each in classes for name, x in vars(each).items()}


def _settings() -> dict[str, Any]:
    """What changes results or times of everything else in the process."""
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's matmul precision": torch.get_float32_matmul_precision(),
        "torch's determinism": torch.are_deterministic_algorithms_enabled(),
        "cuDNN's tf32": torch.backends.cudnn.allow_tf32,
        "cuBLAS's reductions in bf16": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cuBLAS's reductions in fp16": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "torch's function modes": len(_get_current_function_mode_stack()),
        "torch's dispatch modes": len(_get_current_dispatch_mode_stack()),
        "sys.setprofile": sys.getprofile(),
        "sys.settrace": sys.gettrace(),
    }


def _is_defined_in(x: Any, module: ModuleType) -> bool:
    return isinstance(x, type) and x.__module__ == module.__name__


def _name(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f"{owner.__module__}.{owner.__qualname__}"


def unhooked() -> bool:
    """Take whatever watches Python's calls off; whether there was something."""
    hooked = sys.getprofile() is not None or sys.gettrace() is not None
    if hooked:
        sys.setprofile(None)
        sys.settrace(None)
    return hooked


class Watch:
    """Notes which modules that know the answers are imported, or read as files, while it is on."""

    __slots__ = ("_seen", "on")

    def __init__(self) -> None:
        self.on, self._seen = False, dict[str, None]()
        sys.meta_path.insert(0, self)
        sys.addaudithook(self._audit)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """A finder that finds nothing, and is asked about every import there is."""
        if self.on and any(f"{name}.".startswith(f"{judge}.") for judge in JUDGES):
            self._seen[name] = None

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(args[0], (str, bytes)):
            path = os.path.abspath(os.fsdecode(args[0]))
            if _knows(path):
                self._seen[path.removeprefix(_HOME)] = None
        elif event in _STARTS:
            says = " ".join(map(repr, args))
            self._seen |= {f"{judge}, in a process of its own": None for judge in JUDGES if judge in says}

    @contextlib.contextmanager
    def turned(self, on: bool) -> Iterator[None]:
        """On inside, or off; off after it."""
        self.on = on
        try:
            yield
        finally:
            self.on = False

    def seen(self) -> list[str]:
        return list(self._seen)


def _knows(path: str) -> bool:
    """Whether a file's contents, or their bytecode, tell what is right."""
    return path.startswith(_TESTING) or (path.startswith(_OPS) and os.path.basename(path).startswith(_ORACLE))


def overlapping(outputs: Mapping[str, Tensor], others: Mapping[str, Any], may: Iterable[str] = ()) -> list[str]:
    """Which outputs lie in the memory of others, in words; `may` names those that are allowed to."""
    places = {name: _place(x) for name, x in others.items() if isinstance(x, Tensor) and x.numel()}
    found = []
    for name, x in outputs.items():
        if name in may or not x.numel():
            continue
        start, end = _place(x)
        if met := [other for other, (first, last) in places.items() if start < last and first < end]:
            found.append(f"{name} in that of {', '.join(met)}")
    return found


def _place(x: Tensor) -> tuple[int, int]:
    """The addresses that a tensor's elements span."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()


def fill_free_memory(poison: Callable[[Tensor], Tensor], where: torch.device) -> None:
    """Poison what torch's caching allocator has lying ready, which native code is handed without any filling."""
    if where.type != "cuda":
        return
    free = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
    blocks = list[Tensor]()
    for size in (2**26, 2**24, 2**22, 2**20, 2**16):
        while free >= size and len(blocks) < 64:
            blocks.append(poison(torch.empty(size // 4, dtype=torch.float32, device=where)))
            free -= size
