"""L6 in the child: calls timed one at a time, as the judge asks for them, each on contents that no call has had before.

After a call, off the clock, the tokens of its inputs move on by one place, so that an answer kept from an earlier call
is never right again. Of calls drawn in secret the outputs are kept as they were when the clock stopped; the judge, who
can make the same contents, looks at them afterwards.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kda2.workbench.profiler.timing import Clock, burst, clock_of, input_sets
from kda2.workbench.verifier.foreign import ended
from kda2.workbench.verifier.guards import Seal, Watch, unhooked
from kda2.workbench.verifier.runner import arrive_late
from kda2.workbench.verifier.subject import FILE, Bound, Subject, bound
from kda2.workbench.verifier.wire import Wire

# Timed calls of each subject whose outputs are looked at.
CHECKED = 3
_WARMUP = 5
_STAGE_SAMPLES = 30
Said = dict[str, Any]


class _Set:
    """One set of inputs: `base` moved on by `shift` places along `axis`."""

    def __init__(self, base: Mapping[str, Any], moving: Sequence[str], axis: int, in_place: Sequence[str]) -> None:
        self.given = {name: x.clone() if isinstance(x, Tensor) else x for name, x in base.items()}
        self.shift, self._axis = 0, axis
        self._moving = [self.given[name] for name in moving]
        self._kept = [(self.given[name], base[name]) for name in in_place]

    def move_on(self) -> None:
        self.shift += 1
        for x in self._moving:
            x.copy_(x.roll(1, dims=self._axis))
        for x, was in self._kept:
            x.copy_(was)


class _Kept:
    """A call that keeps what it returned."""

    def __init__(self, loaded: Bound, given: Mapping[str, Any]) -> None:
        self._loaded, self._given, self.result = loaded, given, None

    def __call__(self) -> None:
        self.result = self._loaded.call(self._given)


class Stand:
    """Subjects bound to the same input sets, and the clock that times them."""

    def __init__(self, wire: Wire, watch: Watch) -> None:
        self.wire, self.watch = wire, watch

    def bind(self, task: Mapping[str, Any]) -> Iterator[Said]:
        """Make the input sets, load each subject and warm it up: {"name"} for each, with "ended" where it did."""
        self.where = torch.device(task["device"])
        base = self.wire.get(self.where)
        self.outputs, self.in_place = tuple(task["outputs"]), tuple(task["in_place"])
        size = sum(x.nbytes for x in base.values() if isinstance(x, Tensor))
        count = max(2, input_sets(size, self.where))
        self.sets = [_Set(base, task["moving"], task["axis"], self.in_place) for _ in range(count)]
        for i, own in enumerate(self.sets):
            for _ in range(i):  # no two sets are alike
                own.move_on()
        self.clock: Clock = clock_of(self.where)
        self.turn, self.samples = itertools.count(), int(task["samples"])
        self.bound: dict[str, Bound] = {}
        self.subjects = {name: Subject.from_plain(plain) for name, plain in task["subjects"].items()}
        self.checked: dict[str, list[tuple[int, dict[str, Tensor]]]] = {name: [] for name in self.subjects}
        self.seal, self.broken = Seal(), dict[str, None]()
        for name, subject in self.subjects.items():
            yield {"name": name} | self._bound(name, subject, tuple(task["arguments"]))

    def _bound(self, name: str, subject: Subject, arguments: tuple[str, ...]) -> Said:
        try:
            with self.watch.turned(subject.impl == FILE):
                loaded = bound(subject, arguments)
                self.bound[name] = loaded
                for i in range(_WARMUP):
                    own = self.sets[i % len(self.sets)]
                    loaded.prepare(own.given)
                    self.clock.warm(name, partial(loaded.call, own.given))
                    own.move_on()
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
                yield {"name": name} | ended(e, self.subjects[name].file, "it raised")
                return
        self.clock.synchronize()
        samples = {name: [round(read(), 3), round(host, 3)] for name, (read, host) in taken.items()}
        yield {"samples": samples, "host_paced": sorted(self.clock.host_paced)}

    def _sample(self, name: str) -> tuple[Callable[[], float], float]:
        loaded, sample = self.bound[name], None
        while sample is None:
            own = self.sets[next(self.turn) % len(self.sets)]
            call = _Kept(loaded, own.given)
            with self.watch.turned(loaded.is_strange):
                sample = self.clock.time(name, call)
            if loaded.is_strange and sample is not None:
                self.broken |= dict.fromkeys(self.seal.broken())  # before anybody reads the clock
                unhooked()
            if sample is not None and self._looks(name):
                outputs = loaded.read(call.result, self.outputs)
                self.checked[name].append((own.shift, {n: x.detach().clone() for n, x in outputs.items()}))
            own.move_on()
        return sample

    def _looks(self, name: str) -> bool:
        """Whether the outputs of the call just timed are kept: drawn only now, so that no call knows it beforehand."""
        chance = 2 * CHECKED
        return len(self.checked[name]) < CHECKED and secrets.randbelow(self.samples) < chance

    def finish(self, task: Mapping[str, Any]) -> Iterator[Said]:
        """{"shifts": by subject those of the calls that were kept, "gates": what was seen}."""
        gates = {}
        if broken := list(self.broken | dict.fromkeys(self.seal.broken())):
            gates["tamper"] = f"it changed {', '.join(broken[:4])}, which a judge or a clock may rest on"
        if asked := self.watch.seen():
            gates["imports"] = f"it read {', '.join(asked[:4])} while it ran"
        yield {"shifts": {name: [shift for shift, _ in kept] for name, kept in self.checked.items()}, "gates": gates}

    def kept(self, task: Mapping[str, Any]) -> Iterator[Said]:
        """The outputs of one call that was kept, on the wire."""
        self.wire.give(self.checked[task["name"]][task["index"]][1])
        yield {}

    def burst(self, task: Mapping[str, Any]) -> Iterator[Said]:
        """`count` calls back to back, waited for."""
        loaded = self.bound[task["name"]]
        sets = itertools.cycle(self.sets)
        try:
            wall = burst(lambda: loaded.call(next(sets).given), task["count"], self.where)
            yield {"wall_us": wall}
        except (Exception, SystemExit) as e:
            yield ended(e, self.subjects[task["name"]].file, "it raised")

    def refill(self, task: Mapping[str, Any]) -> Iterator[Said]:
        """One more answer, off the clock, with other contents in the tensors of a timed call; outputs on the wire."""
        name, own = task["name"], self.sets[0]
        for n, x in self.wire.get(self.where).items():
            if isinstance(x, Tensor):
                own.given[n].copy_(x)
        try:
            arrive_late(own.given, self.where)
            outputs = self.bound[name].read(self.bound[name].call(own.given), self.outputs)
            answer = {n: x.detach().clone() for n, x in outputs.items()}
            if self.where.type == "cuda":
                torch.cuda.synchronize(self.where)
            self.wire.give(answer)
            yield {}
        except (Exception, SystemExit) as e:
            yield ended(e, self.subjects[name].file, "it raised")

    def stages(self, task: Mapping[str, Any]) -> Iterator[Said]:
        """Median microseconds of each launch by itself, where a subject is made of launches of the library's."""
        yield {"stages": stage_times(self.subjects[task["name"]], self.sets[0].given, self.where)}


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
