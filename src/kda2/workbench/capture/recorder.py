"""Recording: what stands between a program and the functions whose calls are captured."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

import kda2
from kda2.ops.kda.gate import Gate
from kda2.workbench.capture.call import Capture
from kda2.workbench.capture.store import LIMIT, Claims, Folder, Memory, Sink, teller, warn
from kda2.workbench.capture.translate import READERS, NotCaptured
from kda2.workbench.profiler.environment import package_version

# Which modules define what, and the function's name there.
SOURCES = {
    "kda2.kda": ("kda2.ops.kda", "kda"),
    "kda2.kda_step": ("kda2.ops.kda", "kda_step"),
    "fla.ops.kda.chunk_kda": ("fla.ops.kda.chunk", "chunk_kda"),
    "fla.ops.kda.fused_recurrent_kda": ("fla.ops.kda.fused_recurrent", "fused_recurrent_kda"),
}
# What calls kda2 to judge or to time it is no model.
_NO_MODELS = ("kda2.testing", "kda2.workbench", "kda2.ops")

Call = Callable[..., Any]
T = TypeVar("T")


@dataclass(frozen=True)
class _Pending:
    """A call under way: copies of its tensors in the words of `kda2.kda`, or why there are none."""

    key: str
    name: str
    origin: dict[str, Any]
    kwargs: dict[str, Any] | None
    reason: str


class Recorder:
    """Makes calls and keeps them. Tensors are copied before the call, since it may write over them; the capture goes
    to the sink after it returned. Whatever fails here is told to the sink, and never to the caller."""

    def __init__(self, sink: Sink, device: str | None = None) -> None:
        self.sink, self.device = sink, device
        self._count: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._local = threading.local()

    def call(self, function: str, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`original(*args, **kwargs)`, recorded as a call of `function` unless it is part of a recorded one."""
        if not self.sink.open or getattr(self._local, "inside", False):
            return original(*args, **kwargs)
        self._local.inside = True
        try:
            pending = self._before(function, original, args, kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                if pending is not None:
                    self.sink.drop(pending.key)
                raise
            if pending is not None:
                self._after(function, pending)
            return result
        finally:
            self._local.inside = False

    def _before(self, function: str, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pending | None:
        try:
            given = _arguments(original, args, kwargs)
        except TypeError:  # which the call will say
            return None
        if _traced(given):
            return None
        index, key = next(self._count[function]), _signature(function, given)
        if not self.sink.admits(key):
            return None
        origin, name = _origin(function, given, index), f"{function.rpartition('.')[2]}-{os.getpid()}"
        try:
            with torch.no_grad():
                copied = {name: self._copied(x) for name, x in READERS[function](given).items()}
        except NotCaptured as e:
            return _Pending(key, name, origin, None, str(e))
        except Exception as e:
            return _Pending(key, name, origin, None, f"{type(e).__name__}: {_first_line(e)}")
        return _Pending(key, name, origin, copied, "")

    def _after(self, function: str, pending: _Pending) -> None:
        if pending.kwargs is None:
            self.sink.tell("skipped", f"{function}: {pending.reason}")
            return
        try:
            with torch.no_grad():
                self.sink.put(Capture(pending.kwargs, pending.origin), pending.name)
        except Exception as e:  # what kda2 refuses, and what nobody thought of
            self.sink.tell("skipped", f"{function}: {_first_line(e)}")

    def _copied(self, x: Any) -> Any:
        """A tensor, or a gate with its tensors, that nothing writes to any more; anything else as it is."""
        if isinstance(x, Tensor):
            return x.detach().clone() if self.device is None else x.detach().to(self.device, copy=True)
        if isinstance(x, Gate):
            return replace(x, A_log=self._copied(x.A_log), dt_bias=self._copied(x.dt_bias))
        return x


def _arguments(original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name. Raises `TypeError` for those that the function does not take."""
    given: dict[str, Any] = {}
    signature = _signature_of(original)
    for name, x in signature.bind(*args, **kwargs).arguments.items():
        given |= x if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: x}
    return given


_signature_of = functools.lru_cache(maxsize=16)(inspect.signature)


def _traced(given: dict[str, Any]) -> bool:
    """Whether this is not a call on numbers: it is being compiled, captured in a CUDA graph, or transformed."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return True
    q = given.get("q")
    return isinstance(q, Tensor) and q.is_cuda and torch.cuda.is_current_stream_capturing()


def _signature(function: str, given: dict[str, Any]) -> str:
    """Equal for calls that differ in the contents of tensors alone."""
    told = sorted((name, _outline(x)) for name, x in given.items() if x is not None)
    return hashlib.sha256(repr((function, told)).encode()).hexdigest()[:16]


def _outline(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{x.dtype} {list(x.shape)}"
    if isinstance(x, Gate):
        return f"{x.kind} {x.lower_bound} {_outline(x.dt_bias)}"
    return repr(x) if isinstance(x, bool | int | float | str | None) else type(x).__name__


def _origin(function: str, given: dict[str, Any], index: int) -> dict[str, Any]:
    fla = function.startswith("fla.")
    version = package_version("fla-core") or package_version("flash-linear-attention") if fla else kda2.__version__
    return {
        "function": function,
        "package": f"{'fla-core' if fla else 'kda2'} {version or 'of unknown version'}",
        "argv": list(getattr(sys, "argv", [])),
        "pid": os.getpid(),
        "call": index,
        "shapes": {name: list(x.shape) for name, x in given.items() if isinstance(x, Tensor)},
        **{name: given[name] for name in ("impl", "deterministic") if isinstance(given.get(name), bool | str)},
    }


def _first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:300]


def of_process(control: str) -> Recorder:
    """The recorder of a process that runs under `kda2 capture`, which left its settings in the folder `control`."""
    where = Path(control)
    settings = json.loads((where / "settings.json").read_text(encoding="utf-8"))
    tell = teller(where / "told.jsonl")
    sink = Folder(Path(settings["folder"]), settings["limit"], settings["every"], Claims(where), tell)
    return Recorder(sink, "cpu")


@overload
def recording() -> contextlib.AbstractContextManager[list[Capture]]: ...


@overload
def recording(
    *, folder: Path, limit: int = LIMIT, every: bool = False
) -> contextlib.AbstractContextManager[list[Path]]: ...


def recording(
    *, folder: Path | None = None, limit: int = LIMIT, every: bool = False
) -> contextlib.AbstractContextManager[list[Capture]] | contextlib.AbstractContextManager[list[Path]]:
    """Inside, calls of `kda2.kda` and `kda2.kda_step`, and of FLA's KDA where it is imported, are also kept once they
    have returned, whichever module makes them. Tensors are copied before the call: a model may write its next inputs
    over them.

    Without a folder every call is kept, as a `Capture` in the list that this gives. With one, the list holds the paths
    of files: the first call of each signature (shapes, dtypes and options), or with `every` all of them, `limit` at
    most. A call that is not kept is a warning, never an error.
    """
    if folder is None:
        memory = Memory()
        return _patched(Recorder(memory), memory.calls)
    sink = Folder(Path(folder).absolute(), limit, every, Claims(), warn)
    return _patched(Recorder(sink, "cpu"), sink.paths)


@contextlib.contextmanager
def _patched(recorder: Recorder, kept: list[T]) -> Iterator[list[T]]:
    originals = {f: getattr(sys.modules.get(module), name, None) for f, (module, name) in SOURCES.items()}
    wrapped = {f: (original, _wrapper(recorder, f, original)) for f, original in originals.items() if original}
    for original, wrapper in wrapped.values():
        _swap(original, wrapper)
    try:
        yield kept
    finally:
        for original, wrapper in wrapped.values():
            _swap(wrapper, original)
        recorder.sink.open = False  # for who kept a wrapper


def _wrapper(recorder: Recorder, function: str, original: Call) -> Call:
    @functools.wraps(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return recorder.call(function, original, args, kwargs)

    # torch.compile leaves such a function alone, so the call that it makes is one on numbers
    disabled = getattr(original, "_torchdynamo_disable", False)
    return torch.compiler.disable(recorded) if disabled else recorded


def _swap(old: Call, new: Call) -> None:
    """Put `new` wherever a module holds `old` by a name of its own."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_NO_MODELS) and name != "kda2.ops.kda":
            continue
        for attribute, x in list(getattr(module, "__dict__", {}).items()):
            if x is old:
                setattr(module, attribute, new)
