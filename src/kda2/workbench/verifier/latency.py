"""L6 in the child: subjects timed turn by turn on the captured call, then asked again with other inputs in the same
tensors, so that an answer kept from the timed calls shows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda2.testing import checked, verify_call
from kda2.testing.oracle import Outputs
from kda2.workbench.capture import Capture
from kda2.workbench.profiler.timing import Timing, input_sets, interleave
from kda2.workbench.verifier.foreign import inputs_of, outputs_of, prepare_once, raised
from kda2.workbench.verifier.numerics import plain
from kda2.workbench.verifier.subject import FILE, Subject, kernel_of, runner

SAMPLES = 200
# Seconds after which a slow subject has samples enough.
LIMIT_S = 2.0
_STAGE_SAMPLES = 30
REFILLED = "refilled inputs"


def measure(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """An answer {"name", "timing", "refilled", "stages"} for each subject; {"name", "raised"} where it raised."""
    where = torch.device(task["device"])
    sets = _input_sets(Capture.load(Path(task["capture"])), where)
    calls: dict[str, list[Callable[[], Any]]] = {}
    readers: dict[str, Callable[[Any], Outputs]] = {}
    failed: dict[str, str] = {}
    for name, plain_subject in task["subjects"].items():
        try:
            bind, readers[name] = _binder(Subject.from_plain(plain_subject))
            calls[name] = [bind(own) for own in sets]
            calls[name][0]()
        except (Exception, SystemExit) as e:
            calls.pop(name, None)
            failed[name] = raised(e, plain_subject.get("file"))
    yield from ({"name": name, "raised": says} for name, says in failed.items())
    timings = interleave(calls, SAMPLES, where, limit_s=LIMIT_S)
    refilled = _refill(sets[0])
    for name, timing in timings.items():
        subject = Subject.from_plain(task["subjects"][name])
        call, read = calls[name][0], readers[name]
        verdict = verify_call(lambda call=call, read=read, **_: read(call()), REFILLED, refilled.kwargs)
        stages = _stage_times(subject, refilled, where)
        yield {"name": name, "timing": _plain_timing(timing), "refilled": plain(verdict), "stages": stages}


def _binder(subject: Subject) -> tuple[Callable[[Capture], Callable[[], Any]], Callable[[Any], Outputs]]:
    """What binds the subject to a call's tensors, checks and all, off the clock; and what reads its answer."""
    if subject.impl != FILE:
        run = runner(subject)
        return lambda own: partial(run, **own.kwargs), lambda got: got
    kernel, prepared = kernel_of(subject), set[tuple[Any, ...]]()

    def bind(own: Capture) -> Callable[[], Any]:
        inputs = inputs_of(own.kwargs)
        prepare_once(kernel, inputs, prepared)
        return partial(kernel.run, **inputs)

    return bind, lambda got: outputs_of(got, True)


def _input_sets(capture: Capture, where: torch.device) -> list[Capture]:
    """Copies of the call, enough that each has left the cache before its next turn."""
    size = sum(x.nbytes for x in capture.kwargs.values() if isinstance(x, Tensor))
    return [_copy(capture, where) for _ in range(input_sets(size, where))]


def _copy(capture: Capture, where: torch.device) -> Capture:
    moved = capture.to(where)
    fresh = {name: x.clone() if isinstance(x, Tensor) else x for name, x in moved.kwargs.items()}
    return Capture(fresh, capture.origin)


def _refill(capture: Capture) -> Capture:
    """Other contents in the same tensors: every token moves on by one, heads change places with their neighbours'
    states. Offsets and learned parameters stay."""
    for name in ("q", "k", "v", "g", "beta"):
        x = capture.kwargs[name]
        x.copy_(x.roll(1, dims=1).flip(1))
    state = capture.kwargs.get("initial_state")
    if state is not None:
        state.mul_(0.5)
    return capture


def _stage_times(subject: Subject, capture: Capture, where: torch.device) -> dict[str, float]:
    """Median microseconds of each launch by itself, where the subject is made of launches of the library's."""
    if subject.configs is None or where.type != "cuda":
        return {}
    from kda2.contract import KernelConfig
    from kda2.ops.kda import triton

    configs = {stage: KernelConfig.from_dict(c) for stage, c in subject.configs.items()}
    launches = triton.launches(checked(capture.kwargs), configs)
    for launch in launches:
        launch.run()
    calls: dict[str, list[Callable[[], Any]]] = {launch.stage: [launch.run] for launch in launches}
    timings = interleave(calls, _STAGE_SAMPLES, where)
    return {stage: round(statistics.median(t.device_us), 3) for stage, t in timings.items()}


def _plain_timing(timing: Timing) -> dict[str, Any]:
    return {
        "device_us": [round(us, 3) for us in timing.device_us],
        "call_us": [round(us, 3) for us in timing.call_us],
        "host_paced": timing.host_paced,
    }
