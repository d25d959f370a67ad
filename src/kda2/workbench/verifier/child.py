"""The child process of the verifier: {"ready": true} once it can start, then tasks come as JSON lines on stdin, answers
go as JSON lines to stdout with the task's token, and after each task {"done": true}. Tensors come and go by the wire.
Whatever else runs here prints to stderr, and reads nothing.

Nothing here knows what is right: neither the oracle nor an expected value is ever in this process.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, TextIO

import torch

from kda2 import device
from kda2.workbench.verifier.guards import Watch
from kda2.workbench.verifier.latency import Stand
from kda2.workbench.verifier.process import MARK, WHERE, end_descendants
from kda2.workbench.verifier.runner import Runner
from kda2.workbench.verifier.wire import Wire

# What goes wrong with a machine, as a full disk: it says nothing of the subject.
_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
Answers = Iterator[dict[str, Any]]
Kind = Callable[[Mapping[str, Any]], Answers]


def _leave_with_parent(parent: int, silence_s: float) -> None:
    """A parent that was killed cannot end its children: they look for themselves, and end what they have started too.
    One that native code does not let look leaves some time after its parent would have given it up. `parent` is 0 where
    another command runs this process."""
    mark, parent = os.environ.get(MARK, ""), parent or os.getppid()

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


def _kinds(wire: Wire, watch: Watch) -> dict[str, Kind]:
    runner, stand = Runner(wire, watch), Stand(wire, watch)

    def code(task: Mapping[str, Any]) -> Answers:
        from kda2.workbench.verifier.code import judge_code  # it knows the library, which a file's numerics need not

        yield from judge_code(task, wire)

    return {
        "code": code, "call": runner.call, "bind": stand.bind, "time": stand.time, "finish": stand.finish,
        "kept": stand.kept, "burst": stand.burst, "refill": stand.refill, "stages": stand.stages,
    }  # fmt: skip


def main() -> None:
    faulthandler.enable()  # a crash says at which line of the kernel it was
    if WHERE is not None:
        faulthandler.register(WHERE)
    _leave_with_parent(int(sys.argv[1]), float(sys.argv[2]))
    wire = Wire.handed(sys.argv[3])
    tasks, answers = _own_pipes()
    with _mended(), torch.no_grad():
        kinds = _kinds(wire, Watch())
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in tasks:
            task = json.loads(line)
            for answer in _answered(kinds[task["kind"]], task):
                print(json.dumps(answer | {"token": task["token"]}), file=answers, flush=True)


def _mended() -> contextlib.AbstractContextManager[None]:
    """Triton's interpreter as files need it, if it is on: right about bf16, and without timing on a GPU."""
    if not device.interpreted() or find_spec("triton") is None:
        return contextlib.nullcontext()
    import kda2.backends.triton  # noqa: F401 - mends it when imported
    from kda2.workbench.verifier.recorder import untuned

    return untuned()


def _answered(judge: Kind, task: Mapping[str, Any]) -> Answers:
    try:
        yield from judge(task)
    except OSError as e:
        if e.errno not in _MACHINE:
            raise
        yield {"machine": {"errno": e.errno, "strerror": e.strerror or str(e), "filename": e.filename}}
    yield {"done": True}


if __name__ == "__main__":
    main()
