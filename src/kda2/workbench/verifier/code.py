"""The stages of the ladder that look at a subject's code: L0, L1 and L2.

Runs in a process without Triton's interpreter, which would replace the kernels that are to be built.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kda2 import device
from kda2.contract import Check, KernelConfig
from kda2.dispatch import capability
from kda2.ops.kda.check import Call
from kda2.testing import checked
from kda2.workbench.capture import Capture
from kda2.workbench.profiler.environment import source_hash
from kda2.workbench.records import Verdict
from kda2.workbench.verifier import policy
from kda2.workbench.verifier.foreign import Changed, Kernel, needs_gpu, raised, source_of
from kda2.workbench.verifier.process import elapsed
from kda2.workbench.verifier.subject import FILE, Subject, kernel_of
from kda2.workbench.verifier.wire import Wire

if TYPE_CHECKING:
    from kda2.backends.triton import Launch

# Share of a device's shared memory that a kernel may take.
SHARED_SHARE = 0.95
# Implementations of the library that launch kernels of their own.
WITH_KERNELS = ("hopper", "triton")
Inputs = Callable[[], dict[str, Any]]
# What a process may not come back from, in the order in which a file meets it.
IMPORTED, RECORDED, COMPILED = "it was imported", "its launches were recorded", "its kernels were compiled"


# Keeps what it has built for as long as the process lives.
_builders: list[Builder] = []


def judge_code(task: Mapping[str, Any], wire: Wire) -> Iterator[dict[str, Any]]:
    """L0 to L2 of a subject: an answer {"verdict"} for each, {"phase"} before what may not come back."""
    builder = _builders[0] if _builders else Builder()
    _builders[:] = [builder]
    subject, arguments = Subject.from_plain(task["subject"]), tuple(task["arguments"])
    capture = Capture.load(Path(task["capture"])) if task["capture"] is not None else None

    def inputs() -> dict[str, Any]:
        given = wire.get(torch.device(task["device"]))
        return {name: given[name] for name in arguments}

    for found in builder.judge(subject, task["arch"], capture, inputs, arguments):
        yield {"phase": found} if isinstance(found, str) else {"verdict": found.model_dump(mode="json")}


class Builder:
    """L0 to L2 of one subject after another, for sm_<arch>. A stage that two of them share is built once."""

    def __init__(self) -> None:
        self._built: dict[str, dict[str, Any]] = {}

    def judge(
        self, subject: Subject, arch: int, capture: Capture | None, inputs: Inputs, arguments: tuple[str, ...] = ()
    ) -> Iterator[Verdict | str]:
        """The verdicts in order, and before what may not come back the name of it: `IMPORTED`, `RECORDED`, `COMPILED`.
        `inputs` makes what a file's `run` is called with, `arguments` names it."""
        if subject.impl == FILE:
            yield from self._file(subject, arch, arguments, inputs)
            return
        parsed = _parse(subject)
        yield parsed
        if parsed.refuted:
            yield from not_run(("L1", "L2"), "refuted before")
        elif subject.impl not in WITH_KERNELS:
            yield from not_run(("L1", "L2"), "plain torch: it has no kernels of its own")
        elif capture is None:
            yield from not_run(("L1", "L2"), "no captured call to build for: pass --inputs")
        elif not (served := served_on(subject.impl, capture, "cuda", arch)).ok:
            yield from not_run(("L1", "L2"), f"it does not serve this call on sm_{arch}: {served}")
        else:
            yield from self._library(subject, arch, capture)

    def _library(self, subject: Subject, arch: int, capture: Capture) -> Iterator[Verdict]:
        kernels = import_module(f"kda2.ops.kda.{subject.impl}")
        start, call = time.perf_counter(), meta_call(capture)
        configs = {s: KernelConfig.from_dict(c) for s, c in (subject.configs or {}).items()}
        launches: list[Launch] = kernels.launches(call, configs or None)
        stages = {launch.stage: self._stage(launch, arch) for launch in launches}
        for launch in launches:
            stages[launch.stage]["trips"] = _chunk_trips(call, launch.args["BT"]) if launch.stage == "state" else 1
        yield from _verdicts(stages, arch, start, all_on_tensor_cores=True)

    def _file(self, subject: Subject, arch: int, arguments: tuple[str, ...], inputs: Inputs) -> Iterator[Verdict | str]:
        parsed = _read(subject, arguments)
        yield parsed
        if parsed.refuted:
            yield from not_run(("L1", "L2"), "refuted before")
            return
        yield IMPORTED
        start = time.perf_counter()
        try:
            kernel = kernel_of(subject)
        except (Exception, SystemExit) as e:
            yield from _not_imported(e, subject, start)
            return
        yield RECORDED
        launches = _launches(kernel, inputs, arch, subject)
        if isinstance(launches, str):
            yield from not_run(("L1", "L2"), launches)
            return
        yield COMPILED
        stages = {launch.stage: self._stage(launch, arch) | {"trips": 1} for launch in launches}
        yield from _verdicts(stages, arch, start, all_on_tensor_cores=False)

    def _stage(self, launch: Launch, arch: int) -> dict[str, Any]:
        """What is known of one stage's machine code, or {"failure": what the compiler said}."""
        from kda2.backends.triton.build import Build, code_key
        from kda2.workbench.builder import build_all
        from kda2.workbench.inspector import inspect

        key = code_key(launch, arch)
        if key not in self._built:
            (outcome,) = build_all([launch], arch)
            if isinstance(outcome, Build):
                code = inspect(outcome).as_dict()
                self._built[key] = {**code, "artifacts": outcome.artifacts, "versions": outcome.versions}
            else:
                self._built[key] = {"failure": outcome.words}
        return {**self._built[key], "ctas": launch.grid, "bytes": moved_bytes(launch.args)}


def meta_call(capture: Capture) -> Call:
    """The captured call on the meta device: shapes and dtypes without data, enough to plan and build launches."""
    return checked(capture.to("meta").kwargs)


def served_on(impl: str, capture: Capture, where: str, arch: int) -> Check:
    """Whether an implementation takes the captured call on a device of that type and architecture; on a CPU as if in
    Triton's interpreter."""
    limits, query = capability("kda", impl), meta_call(capture).query()
    assert limits is not None
    return limits.check(replace(query, device=where, arch=arch, interpreted=where == "cpu"))


def moved_bytes(args: Mapping[str, Any]) -> int:
    """Bytes of all tensors that a launch takes, by themselves or in a TMA descriptor: each read or written once."""
    tensors = (getattr(x, "base", x) for x in args.values())
    return sum(x.nbytes for x in {id(x): x for x in tensors if isinstance(x, Tensor)}.values())


def _read(subject: Subject, arguments: tuple[str, ...]) -> Verdict:
    """L0 of a file."""
    start = time.perf_counter()
    assert subject.file is not None and subject.sha256 is not None
    path = Path(subject.file)
    try:
        source = source_of(path, subject.sha256)
    except Changed as e:
        return _changed("L0", e, start)
    found = policy.checks(source, arguments)
    parsed = verdict("L0", found, {"files": [path.name], "source": subject.sha256}, start)
    cheats = not found.get("policy", Check(True)).ok
    return parsed.model_copy(update={"outcome": "invalid"}) if cheats else parsed


def _not_imported(e: BaseException, subject: Subject, start: float) -> Iterator[Verdict]:
    says = f"importing it raised {raised(e, subject.file)}"
    if isinstance(e, Changed):
        yield _changed("L1", e, start)
    elif needs_gpu(e, subject.file):
        yield from not_run(("L1",), f"it needs a GPU: {says}")
    else:
        fix = "install what it needs, or mend the import" if isinstance(e, ImportError) else "mend what runs on import"
        yield verdict("L1", {"import": Check(False, says, "a file that can be imported", fix)}, {}, start)
    yield from not_run(("L2",), "it cannot be imported here")


def _changed(stage: str, e: Changed, start: float) -> Verdict:
    fields = {"stage": stage, "outcome": "invalid", "evidence": {"ended": str(e)}, "seconds": elapsed(start)}
    return Verdict.model_validate(fields)


def _launches(kernel: Kernel, inputs: Inputs, arch: int, subject: Subject) -> list[Launch] | str:
    """What there is to build, or why there is nothing."""
    if find_spec("triton") is None:
        return "Triton is not installed here"
    from kda2.workbench.verifier.recorder import launches_of

    try:
        launches = launches_of(kernel, inputs(), arch)
    except NotImplementedError as e:
        return f"it refuses the call that its launches are recorded on: {raised(e, subject.file)}"
    except (Exception, SystemExit) as e:
        if needs_gpu(e, subject.file):
            return f"it needs a GPU: it raised {raised(e, subject.file)}"
        return f"its launches could not be recorded without making them: it raised {raised(e, subject.file)}"
    return launches or "it launches no Triton kernel"


def _parse(subject: Subject) -> Verdict:
    """L0 of the library's own: the sources parse, and every configuration is one that a kernel can have."""
    start = time.perf_counter()
    home = resources.files("kda2") / "ops" / "kda" / subject.impl
    files = [x for x in home.iterdir() if x.name.endswith(".py")] if home.is_dir() else []
    files = files or [resources.files("kda2") / "ops" / "kda" / f"{subject.impl}.py"]
    for file in files:
        ast.parse(file.read_text(encoding="utf-8"))
    odd = [
        f"{stage} {name}={value}"
        for stage, config in (subject.configs or {}).items()
        for name, value in config.items()
        if name != "num_stages" and (value < 1 or value & (value - 1))
    ]
    powers = Check(not odd, ", ".join(odd) or "every size is a power of two", "powers of two")
    evidence = {"files": sorted(x.name for x in files), "source": source_hash("kda", subject.impl)}
    return verdict("L0", {"configurations": powers}, evidence, start)


def _verdicts(stages: dict[str, Any], arch: int, start: float, all_on_tensor_cores: bool) -> Iterator[Verdict]:
    """L1 and L2 of built stages."""
    failures = {name: stage["failure"] for name, stage in stages.items() if "failure" in stage}
    if failures:
        built = {name: Check(False, words, "a kernel that compiles") for name, words in failures.items()}
        yield verdict("L1", built, {"arch": arch}, start)
        yield from not_run(("L2",), "it does not build")
        return
    fits = {name: _shared(stage["shared"], arch) for name, stage in stages.items()}
    yield verdict("L1", fits, {"arch": arch, "stages": stages}, start)
    start = time.perf_counter()
    code = {f"{name}: registers": _registers_are_set(stage) for name, stage in stages.items()}
    if all_on_tensor_cores:
        code |= {name: _tensor_cores(stage["groups"]) for name, stage in stages.items()}
    yield verdict("L2", code, {}, start)


def _chunk_trips(call: Call, chunk: int) -> int:
    """Chunks of the longest sequence, as far as shapes tell: a packed batch may be one sequence of all its tokens."""
    return -(-call.q.shape[1] // chunk)


def _shared(used: int, arch: int) -> Check:
    limit = device.SHARED_MEMORY_LIMIT.get(arch)
    if limit is None:
        return Check(True, f"{used} bytes of shared memory, limit of sm_{arch} unknown")
    allowed = int(SHARED_SHARE * limit)
    return Check(used <= allowed, f"{used} bytes of shared memory", f"at most {allowed}", "use smaller tiles")


def _tensor_cores(groups: Mapping[str, int]) -> Check:
    products = {kind: groups[kind] for kind in ("HGMMA", "HMMA", "tcgen05.mma")}
    observed = ", ".join(f"{count} {kind}" for kind, count in products.items())
    return Check(sum(products.values()) > 0, observed, "tensor-core instructions", "widen the tiles to 16")


def _registers_are_set(stage: Mapping[str, Any]) -> Check:
    faults = [*stage["undefined_reads"], *stage["garbled_descriptors"]]
    if not faults:
        return Check(True, "every uniform register is set before it is used")
    return Check(
        False,
        f"ptxas {stage['versions']['ptxas']} has miscompiled it: {len(faults)} instructions use a uniform register "
        f"that was not set for them, the first is {faults[0]}",
        "every uniform register set before it is used",
        "do not run it, it would read memory at random: take smaller chunks or tiles, which need fewer wgmma "
        "instructions, or a newer ptxas (TRITON_PTXAS_PATH)",
    )


def verdict(stage: str, checks: Mapping[str, Check], evidence: Mapping[str, Any], start: float) -> Verdict:
    """Pass if every check holds."""
    plain = {
        name: {"ok": c.ok, "observed": c.observed, "expected": c.expected, "hint": "" if c.ok else c.hint}
        for name, c in checks.items()
    }
    outcome = "pass" if all(c.ok for c in checks.values()) else "fail"
    fields = {"stage": stage, "outcome": outcome, "evidence": {**evidence, "checks": plain}}
    return Verdict.model_validate(fields | {"seconds": elapsed(start)})


def not_run(stages: tuple[str, ...], reason: str) -> list[Verdict]:
    """The same reason for several stages."""
    return [Verdict.model_validate({"stage": stage, "outcome": f"not_run({reason})"}) for stage in stages]
