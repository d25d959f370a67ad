"""A kernel of one's own: a Python file with `run(**inputs) -> dict`.

`run` gets what the operator's contract names, tensors and plain options (`questions.py` says which), and returns its
outputs by name. A function `prepare(**inputs)` in the same file, if there is one, runs once for each set of shapes,
before `run` and off the clock.

What `run` cannot serve it refuses by raising NotImplementedError: a refusal is no mistake, and no pass either.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import linecache
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda2.errors import KDA2Error

Inputs = dict[str, Any]
_PLAIN = (Tensor, torch.nn.Parameter)
# How a call ended without an answer to compare. `BROKEN`: the judge itself failed.
REFUSED, RAISED, NEEDS_GPU, CHANGED, BROKEN = "refused", "raised", "needs a GPU", "changed", "broken"
# What torch, Triton and CUDA's own libraries say where there is no GPU.
_NO_GPU = (
    "Found no NVIDIA driver", "No CUDA GPUs are available", "no CUDA-capable device", "not compiled with CUDA",
    "0 active drivers", "libcuda.so", "Cannot access accelerator device",
)  # fmt: skip


class BadOutput(KDA2Error, RuntimeError):
    """`run` returned something that is not the outputs."""


class Changed(KDA2Error, RuntimeError):
    """The file is not what it was when it was handed in."""


@dataclass(frozen=True)
class Kernel:
    """An imported file."""

    path: Path
    run: Callable[..., Any]
    prepare: Callable[..., Any] | None

    @classmethod
    def load(cls, path: Path, sha256: str) -> Kernel:
        """Import the file, whatever that raises. Raises `Changed` if its contents have another hash."""
        source = source_of(path, sha256)
        with contextlib.suppress(ImportError):
            import triton  # noqa: F401 - before a file of that name beside the kernel is found for it
        _let_helpers_be_found(path.parent)
        sys.dont_write_bytecode = True  # its folder is not ours
        name = f"kda2_judged_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"  # may be random.py, or torch.py
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        # compiled from what was hashed: neither a later edit nor stale bytecode beside it is run
        dtype = torch.get_default_dtype()
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
        torch.set_default_dtype(dtype)  # the judge makes tensors too
        return cls(path, module.run, getattr(module, "prepare", None))


def source_of(path: Path, sha256: str) -> bytes:
    """What the file holds. Raises `Changed` if that is not what was handed in."""
    try:
        source = path.read_bytes()
    except OSError as e:
        raise Changed(f"{path.name} cannot be read any more: {e.strerror or e}") from e
    if hashlib.sha256(source).hexdigest() != sha256:
        raise Changed(f"{path.name} was changed while it was judged; judge it again")
    return source


def _let_helpers_be_found(folder: Path) -> None:
    """Its own helpers lie beside the file: found before what is installed, after what Python brings."""
    if str(folder) not in sys.path:
        installed = (i for i, p in enumerate(sys.path) if p.endswith(("site-packages", "dist-packages")))
        sys.path.insert(next(installed, len(sys.path)), str(folder))


def prepare_once(kernel: Kernel, inputs: Inputs, prepared: set[tuple[Any, ...]]) -> None:
    """Call the kernel's `prepare` unless it has seen these shapes, dtypes and options."""
    if kernel.prepare is None:
        return
    key = tuple((n, (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x) for n, x in inputs.items())
    if key not in prepared:
        prepared.add(key)
        kernel.prepare(**inputs)


def named_outputs(got: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Exactly the outputs `names`, all of them tensors with contents. Raises `BadOutput`."""
    wanted = "run must return a dict of " + ", ".join(names)
    if type(got) is not dict:  # one of a class of its own may compute when it is asked
        raise BadOutput(f"{wanted}; it returned {_kind(got)}")
    if missing := [name for name in names if got.get(name) is None]:
        raise BadOutput(f"{wanted}; {', '.join(missing)} is missing, it returned {', '.join(map(str, got)) or 'none'}")
    if unknown := [str(name) for name in got if name not in names]:
        raise BadOutput(f"{wanted}; it also returned {', '.join(unknown)}")
    if odd := [f"{name} is {_kind(got[name])}" for name in names if not isinstance(got[name], Tensor)]:
        raise BadOutput(f"{wanted} as tensors; {', '.join(odd)}")
    if lazy := [f"{name} is {_kind(got[name])}" for name in names if type(got[name]) not in _PLAIN]:
        raise BadOutput(f"{wanted} as plain tensors, not of a class of their own; {', '.join(lazy)}")
    if dressed := [f"{n}.{own}" for n in names for own in vars(got[n]) if hasattr(Tensor, own)]:
        raise BadOutput(f"{wanted} as plain tensors; {', '.join(dressed)} is not torch's own")
    if bare := [name for name in names if got[name].is_meta or got[name].layout != torch.strided]:
        raise BadOutput(f"{wanted} as ordinary tensors; {', '.join(bare)} is on the meta device, sparse or nested")
    return {name: got[name] for name in names}


def in_order(got: Any, names: tuple[str, ...]) -> Any:
    """The outputs by name, where `run` may also return them as a tuple or, if there is one, by itself."""
    if isinstance(got, Tensor) and len(names) == 1:
        return {names[0]: got}
    if isinstance(got, (tuple, list)) and len(got) == len(names):
        return dict(zip(names, got, strict=True))
    return got


def ended(e: BaseException, path: str | None, how: str) -> dict[str, Any]:
    """What an exception says of a call: {"ended", "says", "gate"}."""
    if isinstance(e, Changed):
        return {"ended": CHANGED, "says": str(e), "gate": "policy"}
    if isinstance(e, BadOutput):
        return {"ended": RAISED, "says": str(e), "gate": "outputs"}
    if isinstance(e, NotImplementedError):
        return {"ended": REFUSED, "says": f"it refuses this call: {raised(e, path)}", "gate": "process"}
    kind = NEEDS_GPU if needs_gpu(e, path) else RAISED
    return {"ended": kind, "says": f"{how} {raised(e, path)}", "gate": "process"}


def _kind(x: Any) -> str:
    return "None" if x is None else f"a {type(x).__name__}"


def raised(e: BaseException, path: str | None) -> str:
    """An exception in words, with the line of the file that it came through last."""
    frame = _own_frame(e, path)
    where = "" if frame is None else f" ({Path(frame.filename).name}, line {frame.lineno} in {frame.name})"
    text = " ".join(_words(e).split())
    return f"{type(e).__name__}: {text[:500]}{where}" if text else f"{type(e).__name__}{where}"


def _words(e: BaseException) -> str:
    """What an exception says, whatever its own __str__ does."""
    try:
        return str(e)
    except Exception:
        return "its message cannot be read"


def needs_gpu(e: BaseException, path: str | None) -> bool:
    """Whether an exception only says that there is no GPU here: in its words, or because the line of the file that
    raised it is about CUDA."""
    if torch.cuda.is_available():
        return False
    if any(words in _words(e) for words in _NO_GPU):
        return True
    frame = _own_frame(e, path)
    return frame is not None and "cuda" in linecache.getline(frame.filename, frame.lineno or 0).lower()


def _own_frame(e: BaseException, path: str | None) -> traceback.FrameSummary | None:
    """The innermost line of the file that led to an exception, or to its cause: Triton's interpreter wraps what happens
    inside a kernel."""
    frames: list[traceback.FrameSummary] = []
    at: BaseException | None = e
    while at is not None:
        frames += [f for f in traceback.extract_tb(at.__traceback__) if path is not None and f.filename == path]
        at = at.__cause__
    return frames[-1] if frames else None
