"""The child's part in numerics: it runs the subject on what it is given and gives back what came out. It has no idea
what is right.

Fresh memory is NaN while a question is answered the first time, inputs lie between bands of NaN and are hashed before
and after, and outputs are looked at for whose memory they are in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kda2.memory import fingerprint, guarded, poison, poisoned_memory
from kda2.workbench.verifier.foreign import ended
from kda2.workbench.verifier.guards import Seal, Watch, fill_free_memory, overlapping, unhooked
from kda2.workbench.verifier.subject import FILE, Bound, Subject, bound
from kda2.workbench.verifier.wire import Wire

UNDO = "which judges and clocks may rest on; leave the process as it was when run returns"
OVERWRITTEN = "run wrote into what it had returned for another call; return fresh tensors each time"
_BAND = 1024
# Answers that are kept to see whether a later call writes into them: a ring of a few buffers is one too.
_KEPT = 8
# About 5 ms.
_LATE_CYCLES = 8_000_000


class Runner:
    """Runs one subject after another; the one it ran last stays loaded, with what it was given last."""

    __slots__ = ("_bound", "_given", "_kept", "_seal", "_subject", "watch", "wire")

    def __init__(self, wire: Wire, watch: Watch) -> None:
        self.wire, self.watch = wire, watch
        self._subject: Subject | None = None
        self._bound: Bound | None = None
        self._seal: Seal | None = None
        self._given: dict[str, Any] = {}
        self._kept: list[tuple[dict[str, Tensor], dict[str, str]]] = []

    def call(self, task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """One answer: {"gates": what was seen} with the outputs on the wire, or {"ended", "says"} without any.

        The task: `subject`, `outputs` by name, `in_place` (inputs that it may write to), `again` (the contents go into
        the tensors of the call before, in memory as it is found), `counted` (for a profiler around this process)."""
        subject, where = Subject.from_plain(task["subject"]), torch.device(task["device"])
        try:
            run = self._load(subject, task, where)
            given = self._take(task, where)
            with self.watch.turned(run.is_strange):
                run.prepare(handed(given))
        except (Exception, SystemExit) as e:
            yield ended(e, subject.file, "importing it raised" if self._bound is None else "it raised")
            return
        try:
            yield self._answered(run, given, task, where)
        except (Exception, SystemExit) as e:
            yield ended(e, subject.file, "it raised")
        except BaseException as e:  # the parent ends this process by a signal, not by an exception
            yield ended(RuntimeError(f"{type(e).__name__}, which is for the process's own end"), None, "it raised")

    def _load(self, subject: Subject, task: Mapping[str, Any], where: torch.device) -> Bound:
        if self._bound is None or subject != self._subject:
            self._subject, self._bound, self._kept = subject, None, []
            self._seal = Seal()
            # what the file takes from torch by name must be the poisoned kind
            with self.watch.turned(subject.impl == FILE), poisoned_memory():
                self._bound = bound(subject, tuple(task["arguments"]))
            self._seal.settle()
            fill_free_memory(poison, where)
        return self._bound

    def _take(self, task: Mapping[str, Any], where: torch.device) -> dict[str, Any]:
        fresh = self.wire.get(where)
        if not task.get("again"):
            self._given = {name: _banded(x) for name, x in fresh.items()}
            return self._given
        for name, x in fresh.items():
            if isinstance(x, Tensor):
                Tensor.copy_(self._given[name], x)
        return self._given

    def _answered(
        self, run: Bound, given: dict[str, Any], task: Mapping[str, Any], where: torch.device
    ) -> dict[str, Any]:
        mine = handed(given)
        if task.get("counted"):
            run.call(mine)  # compiles
        before = fingerprint(given)
        arrive_late(given, where)
        as_found = task.get("again") or task.get("counted")
        memory = contextlib.nullcontext() if as_found else poisoned_memory()
        with memory, _marked(bool(task.get("counted"))):
            seal = Seal() if run.is_strange else None  # fresh memory comes by way of other functions in here
            with self.watch.turned(run.is_strange):
                got = run.call(mine)
            broken = seal.broken() if seal is not None else []
            unhooked()
        outputs = run.read(got, tuple(task["outputs"]))
        answer = {name: copied(x) for name, x in outputs.items()}  # in the order of the caller's stream
        _synchronize(where)  # its faults are raised here
        self.wire.give(answer)
        found = self._gates(outputs, given, before, tuple(task["in_place"]))
        return {"gates": found | (self.tampering(broken) if run.is_strange else {})}

    def _gates(
        self, outputs: dict[str, Tensor], given: Mapping[str, Any], before: Mapping[str, str], in_place: tuple[str, ...]
    ) -> dict[str, str]:
        """What was seen that should not be, by the gate that sees it."""
        found: dict[str, str] = {}
        now = fingerprint(given)
        if changed := [name for name, was in before.items() if now[name] != was and name not in in_place]:
            found["inputs"] = ", ".join(changed)
        if shared := overlapping(outputs, given, in_place):
            found["aliasing"] = (
                f"run returned outputs in the memory of inputs ({'; '.join(shared)}): return new tensors"
            )
        if any(_hashes(kept) != was for kept, was in self._kept):
            found["aliasing"] = OVERWRITTEN
        own = {n: x for n, x in outputs.items() if not overlapping({n: x}, given)}  # those in place are the caller's
        self._kept = [*self._kept, (own, _hashes(own))][-_KEPT:]
        return found

    def tampering(self, broken: list[str]) -> dict[str, str]:
        """What a file did to the process: `broken` in this call, or before it and not undone."""
        found = {}
        if self._seal is not None and (broken := [*broken, *self._seal.broken()]):
            names = list(dict.fromkeys(broken))
            found["tamper"] = f"it changed {', '.join(names[:4])}, {UNDO}"
        if asked := self.watch.seen():
            found["imports"] = f"it read {', '.join(asked[:4])} while it ran: no kernel may ask the oracle or the judge"
        return found


def alias(x: Tensor) -> Tensor:
    """Another tensor over the same memory."""
    return torch.as_strided(x, x.shape, x.stride(), x.storage_offset())


def handed(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the subject gets of a call: tensors over its memory that nobody else holds, so that nothing set on them is
    met again."""
    return {name: alias(x) if isinstance(x, Tensor) else x for name, x in given.items()}


def copied(x: Tensor) -> Tensor:
    """A copy, by torch's own functions whatever the tensor's attributes are."""
    return torch.clone(Tensor.detach(x))


def _banded(x: Any) -> Any:
    """A contiguous floating tensor between bands of NaN: what is read past its ends shows, and so does what is written
    there."""
    if (
        isinstance(x, Tensor)
        and x.is_floating_point()
        and x.is_contiguous()
        and x.untyped_storage().nbytes() == x.nbytes
    ):
        return guarded(x, _BAND).inside
    return x


def arrive_late(given: Mapping[str, Any], where: torch.device) -> None:
    """Let a call's inputs come into being on the caller's stream just before it: what runs on another stream without
    waiting for this one reads NaN."""
    if where.type != "cuda":
        return
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    contents = [copied(x) for x in tensors]
    for x in tensors:
        x.fill_(torch.nan) if x.is_floating_point() else x.zero_()
    torch.cuda._sleep(_LATE_CYCLES)
    for x, content in zip(tensors, contents, strict=True):
        Tensor.copy_(x, content)


def _hashes(outputs: Mapping[str, Tensor]) -> dict[str, str]:
    return fingerprint(dict(outputs))


@contextlib.contextmanager
def _marked(counted: bool) -> Iterator[None]:
    """What a profiler that this process runs under counts."""
    if not counted:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


def _synchronize(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)
