"""The child process of the verifier: {"ready": true} once it can start, then tasks come as JSON lines on stdin, answers
go as JSON lines to stdout, and after each task {"done": true}. Whatever else runs here prints to stderr, and reads
nothing."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import torch

from kda2 import device
from kda2.testing import FAMILIES, stage_inputs
from kda2.workbench.capture import Capture
from kda2.workbench.verifier.code import Builder
from kda2.workbench.verifier.foreign import inputs_of
from kda2.workbench.verifier.latency import measure
from kda2.workbench.verifier.numerics import judge, problem_of
from kda2.workbench.verifier.process import MARK, WHERE, end_descendants
from kda2.workbench.verifier.subject import Subject

Answers = Iterator[dict[str, Any]]


def _code(builder: Builder, task: Mapping[str, Any]) -> Answers:
    """L0 to L2 of a subject: an answer {"verdict"} for each, {"phase"} before what may not come back."""
    subject = Subject.from_plain(task["subject"])
    capture = Capture.load(Path(task["capture"])) if task["capture"] is not None else None

    def inputs() -> dict[str, Any]:
        if capture is not None and subject.stage is None:
            return inputs_of(capture.to(task["device"]).kwargs)
        kwargs = FAMILIES["random"].build(problem_of(task))
        if subject.stage is None:
            return inputs_of(kwargs)
        return dict(stage_inputs(subject.stage, kwargs))

    for found in builder.judge(subject, task["arch"], capture, inputs):
        yield {"phase": found} if isinstance(found, str) else {"verdict": found.model_dump(mode="json")}


def _leave_with_parent(parent: int, silence_s: float) -> None:
    """A parent that was killed cannot end its children: they look for themselves, and end what they have started too.
    One that native code does not let look leaves some time after its parent would have given it up."""
    mark = os.environ.get(MARK, "")

    def look() -> None:
        while os.getppid() == parent:
            faulthandler.dump_traceback_later(silence_s + 60.0, exit=True, file=2)
            time.sleep(1.0)
        if mark and os.getpgrp() == os.getpid():
            end_descendants(os.getpid(), mark)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def _own_pipes() -> tuple[TextIO, TextIO]:
    """Tasks and answers, out of the reach of what prints to stdout or reads stdin."""
    tasks, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what it said last is not lost with it
    return tasks, answers


def main() -> None:
    faulthandler.enable()  # a crash says at which line of the kernel it was
    if WHERE is not None:
        faulthandler.register(WHERE)
    _leave_with_parent(int(sys.argv[1]), float(sys.argv[2]))
    tasks, answers = _own_pipes()
    builder = Builder()
    kinds: dict[str, Callable[[Mapping[str, Any]], Answers]] = {
        "code": lambda task: _code(builder, task),
        "numerics": judge,
        "latency": measure,
    }
    with _mended(), torch.no_grad():
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in tasks:
            task = json.loads(line)
            for answer in _answered(kinds[task["kind"]], task):
                print(json.dumps(answer), file=answers, flush=True)


def _mended() -> contextlib.AbstractContextManager[None]:
    """Triton's interpreter as files need it, if it is on: right about bf16, and without timing on a GPU."""
    if not device.interpreted() or find_spec("triton") is None:
        return contextlib.nullcontext()
    import kda2.backends.triton  # noqa: F401 - mends it when imported
    from kda2.workbench.verifier.recorder import untuned

    return untuned()


def _answered(judge: Callable[[Mapping[str, Any]], Answers], task: Mapping[str, Any]) -> Answers:
    try:
        yield from judge(task)
    except OSError as e:  # of the machine, as a full disk: it says nothing of the subject
        yield {"machine": {"errno": e.errno, "strerror": e.strerror or str(e), "filename": e.filename}}
    yield {"done": True}


if __name__ == "__main__":
    main()
