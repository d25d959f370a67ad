"""Candidates through the ladder: what can be judged at once is, what was found is written down as it is found."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from kda2.workbench.candidates import TRITON, subject_of
from kda2.workbench.journal import Journal
from kda2.workbench.profiler.timing import Timing
from kda2.workbench.records import Candidate, Verdict
from kda2.workbench.verifier import counters, sanitizer, stages, timed
from kda2.workbench.verifier.code import WITH_KERNELS, not_run
from kda2.workbench.verifier.conditions import Conditions
from kda2.workbench.verifier.process import Child, Children
from kda2.workbench.verifier.subject import FILE, IMPORTED, Subject

# Told what a candidate's stage is at: (candidate, stage, text).
Progress = Callable[[str, str, str], None]
_CODE, _NUMERICS, _LATENCY = ("L0", "L1", "L2"), ("L3", "L4"), ("L6",)
_ABSENT = "not part of this job: kda2 verify does it"
MOST_AT_ONCE, MOST_PARTS = 8, 4


class Judge:
    """Judges candidates under `on` and keeps what it finds in `journal`. Verdicts that are there already stand."""

    def __init__(self, journal: Journal, on: Conditions, progress: Progress) -> None:
        self.journal, self.on, self.progress = journal, on, progress
        self.children = Children()
        self._pool = ThreadPoolExecutor(max(1, min(MOST_AT_ONCE, os.cpu_count() or 1)))
        self._idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self._parts = 1
        self._pending: dict[Future[list[Verdict]], tuple[str, bool]] = {}

    def close(self) -> None:
        """End every child, whatever it is doing."""
        for future in self._pending:
            future.cancel()
        self.children.kill()
        self._pool.shutdown(cancel_futures=True)

    def judge(self, candidates: Sequence[Candidate]) -> None:
        """L0 to L4 of the candidates."""
        self._share(sum(c.impl == TRITON for c in candidates))
        for c in candidates:
            self.journal.propose(c)
            self._code_or_numerics(c.name)
        self._settle(numerics_follow=True)

    def build(self, candidates: Sequence[Candidate]) -> None:
        """L0 to L2 of the candidates."""
        for c in candidates:
            self.journal.propose(c)
            if not self._has_code(c.name):
                self._submit_code(c.name)
        self._settle(numerics_follow=False)

    def prove(self, names: Sequence[str]) -> None:
        """L3 or L4 of candidates whose code has been judged."""
        self._share(len(names))
        for name in names:
            self._submit_numerics(name)
        self._settle(numerics_follow=False)

    def skip(self, name: str, why: str) -> None:
        """Leave the numerics of a candidate undone for good."""
        if self.journal.verdict(name, *_NUMERICS) is None:
            self._not_run(name, _NUMERICS, why)

    def time(self, names: Sequence[str], baseline: str) -> None:
        """L6 of candidates, beside the baseline; those timed before are not timed again."""
        left = [name for name in names if self.journal.verdict(name, "L6") is None]
        if not left:
            return
        together = list(dict.fromkeys([baseline, *left]))
        for name in left:
            self.progress(name, "L6", "timing")
        verdicts, _ = timed.latency(self.children, self._subjects(together), baseline, self.on)
        for name in left:
            self._found(name, verdicts[name])

    def time_against_shipped(self, name: str, samples: int = timed.SAMPLES) -> None:
        """L6 of one candidate beside what the library would run; by itself where there is nothing of the kind."""
        mine = subject_of(self.journal.candidates[name])
        subjects = {name: mine} if mine.op == IMPORTED else {"shipped": Subject("auto", op=mine.op), name: mine}
        self.progress(name, "L6", "timing")
        verdicts, _ = timed.latency(self.children, subjects, "shipped", self.on, samples)
        self._found(name, verdicts[name])

    def check_memory(self, name: str, tools: Sequence[str] = sanitizer.USUAL) -> None:
        """L5 of one candidate."""
        subject = subject_of(self.journal.candidates[name])
        self.progress(name, "L5", "checking")
        on = self.on.of(subject, derived=False)
        self._found(name, sanitizer.check(self.children, subject, on, tools))

    def count(self, name: str) -> None:
        """L7 of one candidate."""
        subject = subject_of(self.journal.candidates[name])
        self.progress(name, "L7", "counting")
        self._found(name, counters.profile(self.children, subject, self.on.of(subject, derived=False)))

    def again(self, names: Sequence[str], baseline: str) -> dict[str, Timing]:
        """Timings of candidates that have been timed before, all in one run; none are written down."""
        return timed.latency(self.children, self._subjects(names), baseline, self.on)[1]

    def finish(self, names: Sequence[str]) -> None:
        """Say of every stage that has no verdict why it did not run, and sum the candidates up."""
        for name in names:
            for stage in ("L3", "L4", "L5", "L6", "L7"):
                if self.journal.verdict(name, stage) is None:
                    self._not_run(name, (stage,), self._why_not(name, stage))
            self.journal.close(name)

    def _why_not(self, name: str, stage: str) -> str:
        if not self.on.on_gpu:
            return "no CUDA device"
        if stage == "L6":
            c = self.journal.candidate(name)
            return "it is the oracle" if c.impl == "reference" else "its numerics did not pass"
        return _ABSENT if stage in ("L5", "L7") else "refuted before"

    def _share(self, candidates: int) -> None:
        """Into how many children the numerics of each candidate are split: as many as leave no core idle."""
        self._parts = max(1, min(MOST_PARTS, (os.cpu_count() or 1) // max(1, candidates)))

    def _has_code(self, name: str) -> bool:
        return all(self.journal.verdict(name, stage) for stage in _CODE)

    def _code_or_numerics(self, name: str) -> None:
        if self._has_code(name):
            self._submit_numerics(name)
        else:
            self._submit_code(name)

    def _submit_code(self, name: str) -> None:
        subject = subject_of(self.journal.candidates[name])
        self.progress(name, "L1", "building" if subject.impl in (*WITH_KERNELS, FILE) else "")
        self._pending[self._pool.submit(self._code, subject)] = (name, True)

    def _submit_numerics(self, name: str) -> None:
        if self.journal.verdict(name, *_NUMERICS) is not None:
            return
        candidate = self.journal.candidate(name)
        if any(v.refuted for v in candidate.verdicts):
            self._not_run(name, _NUMERICS, "refuted before")
            return
        stage, probes = "L4" if self.on.on_gpu else "L3", len(self.on.probes)
        answered = iter(range(1, probes + 1))

        def heard(_: str) -> None:
            self.progress(name, stage, f"{next(answered)}/{probes}")

        self.progress(name, stage, "queued")
        subject = subject_of(candidate)
        on = self.on.of(subject, derived=candidate.parent is not None)
        parts = 1 if subject.impl != TRITON else self._parts
        future = self._pool.submit(lambda: [stages.numerics(self.children, subject, on, heard, parts)])
        self._pending[future] = (name, False)

    def _settle(self, numerics_follow: bool) -> None:
        """Wait for everything queued; write down each finding as it comes, and queue a candidate's numerics after its
        code if they follow."""
        while self._pending:
            for future in wait(self._pending, return_when=FIRST_COMPLETED).done:
                name, was_code = self._pending.pop(future)
                for verdict in future.result():
                    self._found(name, verdict)
                if was_code and numerics_follow:
                    self._submit_numerics(name)
                elif not was_code:
                    other, why = ("L3", "judged on the GPU") if self.on.on_gpu else ("L4", "no CUDA device")
                    self._not_run(name, (other,), why)

    def _code(self, subject: Subject) -> list[Verdict]:
        if subject.impl == FILE:  # a stranger's import may leave anything behind
            with Child(self.children, limits=self.on.limits) as child:
                return stages.code(child, subject, self.on)
        with self._builder() as child:
            return stages.code(child, subject, self.on)

    @contextlib.contextmanager
    def _builder(self) -> Iterator[Child]:
        """A child that builds the library's kernels one after another; it is kept unless it ended."""
        try:
            child = self._idle.get_nowait()
        except queue.Empty:
            child = Child(self.children, limits=self.on.limits)
        yield child
        if child.alive:
            self._idle.put(child)
        else:
            child.close()

    def _subjects(self, names: Sequence[str]) -> Mapping[str, Subject]:
        return {name: subject_of(self.journal.candidates[name]) for name in names}

    def _not_run(self, name: str, which: Sequence[str], why: str) -> None:
        for verdict in not_run(tuple(which), why):
            self._found(name, verdict)

    def _found(self, name: str, verdict: Verdict) -> None:
        self.journal.found(name, verdict)
        self.progress(name, verdict.stage, verdict.outcome)
