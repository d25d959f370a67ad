"""Runs at the start of every Python under `kda2 capture`: has the calls of KDA recorded, then makes way for the
program's own sitecustomize.

This folder stands first in PYTHONPATH, so that whatever a command starts inherits it. Until one of the watched modules
is imported nothing but this file is loaded, and it needs the standard library alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

CONTROL = os.environ.get("KDA2_CAPTURE", "")
# Functions by the module that others import them from; each is recorded as the name beside it.
WATCHED = {
    "kda2.ops.kda": {"kda": "kda2.kda", "kda_step": "kda2.kda_step"},
    "fla.ops.kda.chunk": {"chunk_kda": "fla.ops.kda.chunk_kda"},
    "fla.ops.kda.fused_recurrent": {"fused_recurrent_kda": "fla.ops.kda.fused_recurrent_kda"},
}
# What calls kda2 to judge or to time it is no model.
_NO_MODELS = ("kda2.testing", "kda2.workbench")
_recorders: list[Any] = []


def note(name: str, text: str = "") -> None:
    """Leave a file for `kda2 capture` to find. Nothing that fails here may stop the program."""
    try:
        with open(os.path.join(CONTROL, f"{name}-{os.getpid()}"), "w", encoding="utf-8") as f:
            f.write(text)
    except OSError:
        pass


class Finder:
    """Finds nothing itself: it has watched modules changed right after they were executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in WATCHED:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            _extend(spec.loader)
        return spec


def _extend(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            _watch(module)
        except Exception as e:
            note("broken", f"{type(e).__name__}: {e}")

    loader.exec_module = exec_module


def _watch(module: ModuleType) -> None:
    note("imported")
    for name, function in WATCHED[module.__name__].items():
        setattr(module, name, _recorded(function, getattr(module, name)))


def _recorded(function: str, original: Callable[..., Any]) -> Callable[..., Any]:
    compiler = sys.modules["torch"].compiler
    is_compiling = compiler.is_compiling

    @wraps(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or str(sys._getframe(1).f_globals.get("__name__")).startswith(_NO_MODELS):
            return original(*args, **kwargs)
        recorder = _recorder()
        if recorder is None:
            return original(*args, **kwargs)
        return recorder.call(function, original, args, kwargs)

    # torch.compile leaves such a function alone, so the call that it makes is one on numbers
    disabled = getattr(original, "_torchdynamo_disable", False)
    return compiler.disable(recorded) if disabled else recorded


def _recorder() -> Any:
    """This process's recorder, made at the first call that is to be recorded; None where it cannot be made."""
    if not _recorders:
        _recorders.append(None)
        try:
            from kda2.workbench.capture.recorder import of_process

            _recorders[0] = of_process(CONTROL)
        except Exception as e:
            note("broken", f"{type(e).__name__}: {e}")
    return _recorders[0]


def _make_way() -> None:
    """Run the sitecustomize that would have run without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    theirs = module_from_spec(spec)
    sys.modules["sitecustomize"] = theirs
    spec.loader.exec_module(theirs)


if CONTROL:
    note("python")
    sys.meta_path.insert(0, Finder())
_make_way()
