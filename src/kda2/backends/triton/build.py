"""Compiling a launch offline, for any CUDA architecture, on a machine without a GPU."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from kda2.backends.triton import binary, cache
from kda2.backends.triton.launch import Launch
from kda2.errors import KDA2Error, UnsupportedTarget


class BuildError(KDA2Error, RuntimeError):
    """A kernel does not compile. `words` is what Triton's front end, MLIR or ptxas said."""

    def __init__(self, stage: str, arch: int, words: str) -> None:
        self.stage, self.arch, self.words = stage, arch, words
        super().__init__(f"stage {stage!r} does not compile for sm_{arch}: {words}")

    def __reduce__(self) -> tuple[type[BuildError], tuple[str, int, str]]:
        return type(self), (self.stage, self.arch, self.words)


@dataclass(frozen=True)
class Build:
    """One compiled kernel and what it costs.

    `name` is the kernel's entry point, `shared` the shared memory of one CTA in bytes, `registers` those of one
    thread, `spills` the bytes of local memory that one thread spills to (0: none). `seconds` is the time it took: near
    zero when Triton's cache had it. `versions` are those of triton and ptxas.
    """

    stage: str
    name: str
    arch: int
    num_warps: int
    registers: int
    spills: int
    shared: int
    seconds: float
    versions: dict[str, str]
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    ttgir: str = field(repr=False)

    @property
    def artifacts(self) -> dict[str, str]:
        """SHA-256 of what was produced, by kind. Line tables are part of it: the same source elsewhere on disk gives
        other hashes."""
        produced = {"cubin": self.cubin, "ptx": self.ptx.encode(), "ttgir": self.ttgir.encode()}
        return {kind: hashlib.sha256(content).hexdigest() for kind, content in produced.items() if content}


def build(launch: Launch, arch: int) -> Build:
    """Compile `launch` for `sm_<arch>` (90 for a Hopper GPU) as launching it there would.

    The arguments are specialised by Triton's own code - dtypes, ints equal to 1 or divisible by 16, aligned pointers,
    annotations, `do_not_specialize` - so the machine code is the launch's, and on a GPU machine the launch finds it in
    Triton's cache. Tensors may be on any device; on the meta device those without a storage offset count as aligned.

    Raises `BuildError` where the kernel does not compile, `UnsupportedTarget` under Triton's interpreter, where there
    is nothing to compile. An `OSError`, as of a full cache folder, passes.
    """
    cache.ensure_writable()
    start = time.perf_counter()
    try:
        source, options = _specialized(launch, arch)
        compiled = triton.compile(source, target=_target(arch), options=options.__dict__)
    except (UnsupportedTarget, OSError):  # a full disk is not the kernel's fault
        raise
    except Exception as e:  # Triton raises its own errors, RuntimeError from MLIR and AssertionError from checks
        raise BuildError(launch.stage, arch, f"{type(e).__name__}: {e}") from e
    seconds = time.perf_counter() - start
    cubin = compiled.asm["cubin"]
    usage = binary.resources(cubin, compiled.metadata.name)
    return Build(
        stage=launch.stage,
        name=compiled.metadata.name,
        arch=arch,
        num_warps=compiled.metadata.num_warps,
        registers=usage["REG"],
        spills=usage["STACK"] + usage["LOCAL"],
        shared=compiled.metadata.shared,
        seconds=seconds,
        versions={"triton": triton.__version__, "ptxas": get_ptxas(arch).version},
        cubin=cubin,
        ptx=compiled.asm.get("ptx", ""),
        ttgir=compiled.asm.get("ttgir", ""),
    )


def code_key(launch: Launch, arch: int) -> str:
    """Names the machine code that `launch` runs on sm_<arch>, without compiling it: launches with equal keys share one
    compiled kernel. Raises `UnsupportedTarget` as `build` does."""
    source, options = _specialized(launch, arch)
    return f"sm_{arch}-{source.hash()}-{options.hash()}"


def _target(arch: int) -> GPUTarget:
    return GPUTarget("cuda", arch, 32)


def _specialized(launch: Launch, arch: int) -> tuple[Any, Any]:
    """The kernel with its signature, constants and attributes, and the compiler's options: what `JITFunction.run` makes
    of the same arguments, for a target that need not be here."""
    kernel = launch.kernel
    if not isinstance(kernel, JITFunction):
        raise UnsupportedTarget(
            f"stage {launch.stage!r} cannot be compiled: its kernel is a {type(kernel).__name__}, not a JITFunction; "
            "Triton's interpreter replaces kernels as they are imported, so build in a process without TRITON_INTERPRET"
        )
    backend = make_backend(_target(arch))
    kwargs = {
        **launch.args,
        **launch.options,
        "debug": kernel.debug or triton.knobs.runtime.debug,
        "instrumentation_mode": triton.knobs.compilation.instrumentation_mode,
    }
    # Triton chooses between the two when it binds a kernel to the GPU that is there
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**kwargs)
    options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    return source(kernel, signature, constants, attributes), options
