"""L3 and L4 in the child: a subject on the captured call and on every probe family, each held to the fp64 oracle.

Fresh memory is NaN while the subject runs, and its inputs are hashed before and after.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda2.testing import (
    FAMILIES,
    STAGES,
    Comparison,
    Problem,
    Verdict,
    diagnose,
    fingerprint,
    poisoned_memory,
    verify,
    verify_call,
    verify_stage,
)
from kda2.testing.oracle import Outputs
from kda2.testing.verify import expected
from kda2.workbench.capture import Capture
from kda2.workbench.profiler.problems import DTYPES
from kda2.workbench.verifier.foreign import BadOutput, Changed, named_outputs, needs_gpu, prepare_once, raised
from kda2.workbench.verifier.subject import Subject, kernel_of, runner

CAPTURE = "captured call"
# How a probe ended without numbers to compare. `BROKEN`: the judge itself failed.
REFUSED, RAISED, NEEDS_GPU, CHANGED, BROKEN = "refused", "raised", "needs a GPU", "changed", "broken"
# Failed probes that are diagnosed: a kernel that is wrong everywhere is wrong in one way.
MOST_DIAGNOSED = 3
INPUTS = "inputs"  # the quantity under which changed inputs are told
_CUDA_ERROR = "CUDA error"
OVERWRITTEN = "run wrote into what it had returned for another call; return fresh tensors each time"
Run = Callable[..., Any]
Probe = Callable[[str], dict[str, Any]]


class _Raised(Exception):
    """What the subject raised is this one's cause."""


def problem_of(task: Mapping[str, Any]) -> Problem:
    """What the families of a task start from. Its sizes may name a dtype, bf16 otherwise."""
    sizes = {"dtype": "bf16", **task["sizes"]}
    return Problem(**{**sizes, "dtype": DTYPES[sizes["dtype"]]}, device=task["device"], seed=task["seed"])


def judge(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """An answer {"name", "result"} for each probe of the task."""
    subject, problem = Subject.from_plain(task["subject"]), problem_of(task)
    try:
        # what the file takes from torch by name must be the poisoned kind
        with poisoned_memory():
            probe = _stage_probe(subject, problem) if subject.stage else _call_probe(subject, problem, task)
    except (Exception, SystemExit) as e:
        yield {"name": task["probes"][0], "result": _without_numbers(e, subject, "importing it raised")}
        return
    for name in task["probes"]:
        result = _judged(probe, name, subject)
        yield {"name": name, "result": result}
        if _CUDA_ERROR in result.get("says", ""):
            return  # nothing runs on this device any more: what follows would say no more of the kernel


def _judged(probe: Probe, name: str, subject: Subject) -> dict[str, Any]:
    try:
        return probe(name)
    except _Raised as e:
        return _without_numbers(e.__cause__ or e, subject, "it raised")
    except Exception as e:
        if _CUDA_ERROR in str(e):  # which a wild write of the kernel's left for the next who asks the device
            return _without_numbers(e, subject, "it left the GPU with")
        return _ended(BROKEN, f"the judge failed, which says nothing of the kernel: {raised(e, None)}")


def _without_numbers(e: BaseException, subject: Subject, how: str) -> dict[str, Any]:
    says = f"{how} {raised(e, subject.file)}"
    if isinstance(e, Changed):
        return _ended(CHANGED, str(e))
    if isinstance(e, BadOutput):
        return _ended(RAISED, str(e))
    if isinstance(e, NotImplementedError):
        return _ended(REFUSED, f"it refuses this call: {raised(e, subject.file)}")
    return _ended(NEEDS_GPU if needs_gpu(e, subject.file) else RAISED, says)


def _ended(how: str, says: str) -> dict[str, Any]:
    return {"ok": False, "margin": None, "quantities": {}, "ended": how, "says": says}


def _call_probe(subject: Subject, problem: Problem, task: Mapping[str, Any]) -> Probe:
    """Probes of a subject that computes the whole operator."""
    run, last = _kept(runner(subject))
    failed = 0

    def probe(name: str) -> dict[str, Any]:
        nonlocal failed
        if name == CAPTURE:
            verdict = verify_call(run, CAPTURE, _captured(task))
        else:
            verdict = verify(run, FAMILIES[name], problem)
        if endless := [c for c in verdict.comparisons if c.non_finite_want]:
            return _ended(BROKEN, f"the call has no finite answer to hold anything against: {endless[0]}")
        found = plain(verdict)
        if not verdict.ok:
            failed += 1
            if failed <= MOST_DIAGNOSED:
                with contextlib.suppress(Exception):  # the verdict stands without words
                    # fresh: it may have written into its inputs
                    kwargs = _captured(task) if name == CAPTURE else FAMILIES[name].build(problem)
                    found["says"] = _says(verdict, last[-1], kwargs, name)
        return found

    return probe


def _says(verdict: Verdict, got: Outputs, kwargs: Mapping[str, Any], name: str) -> str:
    """What is wrong, in words: with the outputs, then with what happened to the inputs."""
    outputs = [c for c in verdict.comparisons if c.quantity != INPUTS]
    spoilt = [c.mismatch for c in verdict.comparisons if c.quantity == INPUTS]
    says = [f"It wrote into its inputs ({words}); they belong to the caller." for words in spoilt]
    if not all(c.ok for c in outputs):
        says.append(diagnose(got, expected(kwargs), kwargs, name, outputs))
    return " ".join(says)


def _kept(run: Run) -> tuple[Run, list[Any]]:
    """`run` amid poisoned memory, and a list that holds what it returned last. Raises `_Raised`, also where the answer
    to one call is changed by the next."""
    last: list[Any] = []
    before: dict[str, str] = {}

    def keeping(**kwargs: Any) -> Any:
        try:
            with poisoned_memory():
                got = run(**kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # its faults are raised here, not in the judge
            if last and _hashes(last[0]) != before:
                raise BadOutput(OVERWRITTEN)
        except (Exception, SystemExit) as e:
            raise _Raised from e
        except BaseException as e:  # the parent ends this process by a signal, not by an exception
            raise _Raised from RuntimeError(f"{type(e).__name__}, which is for the process's own end")
        last[:] = [got]
        before.clear()
        before.update(_hashes(got))
        return got

    return keeping, last


def _hashes(got: Any) -> dict[str, str]:
    outputs = got.values() if isinstance(got, Mapping) else got if isinstance(got, tuple) else ()
    return fingerprint({str(i): x for i, x in enumerate(outputs) if isinstance(x, Tensor)})


def _captured(task: Mapping[str, Any]) -> Mapping[str, Any]:
    capture = Capture.load(Path(task["capture"])).to(task["device"])
    return (capture if task["tokens"] is None else capture.first(task["tokens"])).kwargs


def _stage_probe(subject: Subject, problem: Problem) -> Probe:
    """Probes of a subject that computes one stage."""
    assert subject.stage is not None
    kernel, stage, prepared = kernel_of(subject), subject.stage, set[Any]()
    names = tuple(t.name for t in STAGES[stage].outputs)

    def stage_kernel(**inputs: Any) -> dict[str, Tensor]:
        prepare_once(kernel, inputs, prepared)
        return named_outputs(kernel.run(**inputs), names)

    run, _ = _kept(stage_kernel)
    return lambda name: plain(verify_stage(run, stage, name, problem))


def plain(verdict: Verdict) -> dict[str, Any]:
    """A verdict as evidence: per quantity the error, its limit and the worst element; JSON without infinities."""
    return {
        "ok": verdict.ok,
        "margin": _finite(verdict.margin),
        "quantities": {c.quantity: _comparison(c) for c in verdict.comparisons},
    }


def _comparison(c: Comparison) -> dict[str, Any]:
    return {
        "ok": c.ok,
        "relative_l2": _finite(c.relative_l2),
        "limit": c.limit,
        "worst": str(c.worst) if c.worst is not None else None,
        "worst_rms_off": _finite(c.worst.rms_off) if c.worst is not None else None,
        "element_limit": c.element_limit,
        "says": c.explain(),
    }


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
