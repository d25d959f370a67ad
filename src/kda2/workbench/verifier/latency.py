"""L6 in the child: calls timed one at a time, as the judge asks for them, each on contents that no call has had before.

Just before a call every input that can is moved on by a secret number of places, then the cache is flushed; between
that and the clock's start nothing of the file's runs. What the file is handed are new tensors over the same memory each
time, and what it returned is let go before its inputs move. Of calls drawn in secret the outputs are kept as they were
when the clock stopped; the judge, who can make the same contents, looks at them afterwards.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kda2 import device
from kda2.workbench.profiler.timing import Clock, burst, clock_of
from kda2.workbench.verifier.foreign import ended
from kda2.workbench.verifier.guards import Seal, Watch, unhooked
from kda2.workbench.verifier.runner import UNDO, alias, arrive_late, copied
from kda2.workbench.verifier.subject import FILE, Bound, Subject, bound
from kda2.workbench.verifier.wire import Wire

# Timed calls of each subject whose outputs are looked at.
CHECKED = 3
_WARMUP = 5
_STAGE_SAMPLES = 30
Said = dict[str, Any]
Shifts = dict[str, int]


class _Contents:
    """The inputs of the next call: `base`, with each of `moving` moved on by places of its own along `axis`."""

    __slots__ = ("_axis", "_base", "_flush", "_in_place", "_moving", "_own", "shifts")

    def __init__(self, base: Mapping[str, Any], moving: Sequence[str], axis: int, in_place: Sequence[str]) -> None:
        self._base, self._axis, self._moving, self._in_place = base, axis, tuple(moving), tuple(in_place)
        self._own = {name: copied(x) if isinstance(x, Tensor) else x for name, x in base.items()}
        where = next(x.device for x in base.values() if isinstance(x, Tensor))
        size = 2 * device.gpu(where.index or 0).l2_bytes if where.type == "cuda" else 0
        self._flush = torch.empty(size, dtype=torch.uint8, device=where)
        self.shifts: Shifts = dict.fromkeys(self._moving, 0)

    def handed(self) -> dict[str, Any]:
        """New tensors over the contents' memory, for one call: nothing that was set on earlier ones is on them."""
        return {name: alias(x) if isinstance(x, Tensor) else x for name, x in self._own.items()}

    def move(self) -> Shifts:
        """Give the next call contents of its own, and put them out of the cache; returns by how far they moved."""
        for name in self._moving:
            size = self._base[name].shape[self._axis]
            self.shifts[name] = secrets.randbelow(size) if size else 0
            Tensor.copy_(self._own[name], torch.roll(self._base[name], self.shifts[name], self._axis))
        for name in self._in_place:
            Tensor.copy_(self._own[name], self._base[name])
        Tensor.zero_(self._flush)
        return dict(self.shifts)

    def fill(self, given: Mapping[str, Any]) -> None:
        """Take other contents altogether."""
        for name, x in given.items():
            if isinstance(x, Tensor):
                Tensor.copy_(self._own[name], x)

    def arrive(self, where: torch.device) -> None:
        arrive_late(self._own, where)


class _Kept:
    """A call that keeps what it returned."""

    __slots__ = ("_given", "_loaded", "result")

    def __init__(self, loaded: Bound, given: Mapping[str, Any]) -> None:
        self._loaded, self._given, self.result = loaded, given, None

    def __call__(self) -> None:
        self.result = self._loaded.call(self._given)


class Stand:
    """Subjects, the contents that they are called on, and the clock that times them."""

    __slots__ = (
        "_checked", "_subjects", "bound", "broken", "clock", "contents", "outputs", "seal", "taken", "watch", "where",
        "wire",
    )  # fmt: skip

    def __init__(self, wire: Wire, watch: Watch) -> None:
        self.wire, self.watch = wire, watch

    def bind(self, task: Mapping[str, Any]) -> Iterator[Said]:
        """Take the call, load each subject and warm it up: {"name"} for each, with "ended" where it did."""
        self.where = torch.device(task["device"])
        self.contents = _Contents(self.wire.get(self.where), task["moving"], task["axis"], task["in_place"])
        self.outputs = tuple(task["outputs"])
        self.clock: Clock = clock_of(self.where)
        self.bound: dict[str, Bound] = {}
        self._subjects = {name: Subject.from_plain(plain) for name, plain in task["subjects"].items()}
        self._checked: dict[str, list[tuple[Shifts, dict[str, Tensor]]]] = {name: [] for name in self._subjects}
        self.taken = dict.fromkeys(self._subjects, 0)
        self.seal, self.broken = Seal(), dict[str, None]()
        for name, subject in self._subjects.items():
            yield {"name": name} | self._bound(name, subject, tuple(task["arguments"]))

    def _bound(self, name: str, subject: Subject, arguments: tuple[str, ...]) -> Said:
        try:
            with self.watch.turned(subject.impl == FILE):
                loaded = bound(subject, arguments)
                self.seal.settle()
                self.bound[name] = loaded
                for _ in range(_WARMUP):
                    self.contents.move()
                    given = self.contents.handed()
                    loaded.prepare(given)
                    self.clock.warm(name, partial(loaded.call, given))
        except (Exception, SystemExit) as e:
            self.bound.pop(name, None)
            return ended(e, subject.file, "it raised")
        return {}

    def time(self, task: Mapping[str, Any]) -> Iterator[Said]:
        """One timed call of each of `names`, in that order: {"samples": {name: [device us, call us]}}."""
        taken: dict[str, tuple[Callable[[], float], float]] = {}
        for name in task["names"]:
            try:
                taken[name] = self._sample(name)
            except (Exception, SystemExit) as e:
                yield {"name": name} | ended(e, self._subjects[name].file, "it raised")
                return
        self.clock.synchronize()
        samples = {name: [round(read(), 3), round(host, 3)] for name, (read, host) in taken.items()}
        yield {"samples": samples, "host_paced": sorted(self.clock.host_paced)}

    def _sample(self, name: str) -> tuple[Callable[[], float], float]:
        loaded, sample = self.bound[name], None
        while sample is None:
            call = _Kept(loaded, self.contents.handed())
            shifts = self.contents.move()
            with self.watch.turned(loaded.is_strange):
                sample = self.clock.time(name, call)
            if sample is not None and (place := self._place(name)) < CHECKED:
                outputs = loaded.read(call.result, self.outputs)
                self._checked[name][place : place + 1] = [(shifts, {n: copied(x) for n, x in outputs.items()})]
                del outputs
            del call
            if loaded.is_strange and sample is not None:
                self.broken |= dict.fromkeys(self.seal.broken())  # before anybody reads the clock
                unhooked()
        return sample

    def _place(self, name: str) -> int:
        """Where the outputs of the call just timed are kept, if below `CHECKED`: every call is as likely as any other
        to be among those in the end, and drawn only now, so that none knows it beforehand."""
        taken = self.taken[name] = self.taken[name] + 1
        return taken - 1 if taken <= CHECKED else secrets.randbelow(taken)

    def finish(self, task: Mapping[str, Any]) -> Iterator[Said]:
        """{"shifts": by subject those of the calls that were kept, "gates": what was seen}."""
        gates = {}
        if broken := list(self.broken | dict.fromkeys(self.seal.broken())):
            gates["tamper"] = f"it changed {', '.join(broken[:4])}, {UNDO}"
        if asked := self.watch.seen():
            gates["imports"] = f"it read {', '.join(asked[:4])} while it ran"
        yield {"shifts": {name: [shifts for shifts, _ in kept] for name, kept in self._checked.items()}, "gates": gates}

    def kept(self, task: Mapping[str, Any]) -> Iterator[Said]:
        """The outputs of one call that was kept, on the wire."""
        self.wire.give(self._checked[task["name"]][task["index"]][1])
        yield {}

    def burst(self, task: Mapping[str, Any]) -> Iterator[Said]:
        """`count` calls back to back, waited for; the last one's outputs are on the wire."""
        name, shifts = task["name"], self.contents.move()
        call = _Kept(self.bound[name], self.contents.handed())
        try:
            wall = burst(call, task["count"], self.where)
            self.wire.give({n: copied(x) for n, x in self.bound[name].read(call.result, self.outputs).items()})
            yield {"wall_us": wall, "shifts": shifts}
        except (Exception, SystemExit) as e:
            yield ended(e, self._subjects[name].file, "it raised")

    def refill(self, task: Mapping[str, Any]) -> Iterator[Said]:
        """One more answer, off the clock, with other contents in the tensors of a timed call; outputs on the wire."""
        name = task["name"]
        self.contents.fill(self.wire.get(self.where))
        try:
            given = self.contents.handed()
            self.contents.arrive(self.where)
            outputs = self.bound[name].read(self.bound[name].call(given), self.outputs)
            answer = {n: copied(x) for n, x in outputs.items()}
            if self.where.type == "cuda":
                torch.cuda.synchronize(self.where)
            self.wire.give(answer)
            yield {}
        except (Exception, SystemExit) as e:
            yield ended(e, self._subjects[name].file, "it raised")

    def stages(self, task: Mapping[str, Any]) -> Iterator[Said]:
        """Median microseconds of each launch by itself, where a subject is made of launches of the library's."""
        yield {"stages": stage_times(self._subjects[task["name"]], self.contents.handed(), self.where)}


def stage_times(subject: Subject, given: Mapping[str, Any], where: torch.device) -> dict[str, float]:
    """Median microseconds of each launch of a Triton subject with configurations of its own; none of others."""
    if subject.configs is None or where.type != "cuda":
        return {}
    from kda2.contract import KernelConfig
    from kda2.ops.kda import triton
    from kda2.testing.oracle import checked
    from kda2.workbench.profiler.timing import interleave
    from kda2.workbench.verifier.subject import public

    configs = {stage: KernelConfig.from_dict(c) for stage, c in subject.configs.items()}
    launches = triton.launches(checked(public(given)), configs)
    for launch in launches:
        launch.run()
    calls: dict[str, list[Callable[[], Any]]] = {launch.stage: [launch.run] for launch in launches}
    timings = interleave(calls, _STAGE_SAMPLES, where)
    return {stage: round(t.median_us, 3) for stage, t in timings.items()}
