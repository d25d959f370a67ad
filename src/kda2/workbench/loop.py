"""The main job: capture a call, judge what ships, then rounds of plan, write, verify and tune; choose, and keep the
trail in a ledger."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kda2
from kda2 import device
from kda2.errors import InvalidValue
from kda2.ops.kda.spec import KDA
from kda2.testing import FAMILIES
from kda2.testing.verify import NAMES
from kda2.workbench import candidates as kernels
from kda2.workbench import capture as captures
from kda2.workbench import choice, rounds
from kda2.workbench.candidates import TRITON
from kda2.workbench.capture import Capture
from kda2.workbench.floors import kernel_floors
from kda2.workbench.journal import Journal, alone
from kda2.workbench.judge import Judge, Progress
from kda2.workbench.profiler import environment
from kda2.workbench.records import Candidate
from kda2.workbench.report import write_report
from kda2.workbench.rounds import GO_ON, Gap, Round
from kda2.workbench.standings import Standings
from kda2.workbench.tuner.search import Search
from kda2.workbench.verifier.conditions import Conditions
from kda2.workbench.verifier.process import Limits
from kda2.workbench.writer import TemplateWriter, hypothesis_held

# Sizes of the probe families: small for the interpreter, with several chunks and channels that are no power of two on
# a GPU.
INTERPRETER_SIZES = {"T": 70, "H": 1, "HV": 1, "K": 32, "V": 32}
# Those of files of one's own, which nothing else tests: every axis has a length of its own, and no power of two.
FILE_SIZES = {"T": 70, "B": 2, "H": 2, "HV": 4, "K": 24, "V": 20}
# Tokens of the capture that go through the interpreter: of what ships, and of what was derived from it.
INTERPRETER_TOKENS, VARIANT_TOKENS = 256, 128
GPU_SIZES = {"T": 300, "B": 2, "H": 2, "HV": 4, "K": 128, "V": 100}
SEEDS = 2**31
ROUNDS = 3
# Seconds of a budget that are kept for timing the best once more.
FINAL_HEAT_S = 25.0


@dataclass(frozen=True)
class Options:
    """What a run does: where it writes, for which architecture it builds, on which call and families it judges.

    `rounds` of improvement at most, None for as many as `budget_s` seconds and the stopping rules allow. `kernels` are
    files of one's own, judged with what ships. A round writes `width` candidates and searches for `trials` more.
    A child that says nothing for `timeout_s` seconds is given up on. `seed` is that of the probes' inputs and of the
    search, None for a fresh one.
    """

    folder: Path
    arch: int
    inputs: Path | None = None
    tokens: int = 512
    gate: str = "softplus"
    families: tuple[str, ...] = tuple(FAMILIES)
    rounds: int | None = ROUNDS
    budget_s: float | None = None
    kernels: tuple[Path, ...] = ()
    width: int | None = None
    trials: int | None = None
    timeout_s: float = 600.0
    seed: int | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.rounds is None and self.budget_s is None:
            raise InvalidValue("--budget", "given where --rounds is not", "neither")


def check_seed(seed: int | None) -> None:
    """Refuse a seed that no generator takes; None stands for a fresh one."""
    if seed is not None and not 0 <= seed < SEEDS:
        raise InvalidValue("--seed", "at least 0 and below 2**31", str(seed))


@dataclass(frozen=True)
class Outcome:
    """What a run came to. `label` is "measured" or "predicted"."""

    chosen: str | None
    label: str
    rule: str
    ranking: list[dict[str, Any]]
    candidates: list[Candidate]
    shipped: tuple[str, ...]
    rounds: list[Round]
    stopped_by: str
    ledger: Path
    report: Path

    @property
    def ok(self) -> bool:
        """Whether everything users get is correct and one could be chosen. What was on trial may fail."""
        return self.chosen is not None and all(c.correct for c in self.candidates if c.name in self.shipped)


def run(options: Options, progress: Progress) -> Outcome:
    """Run the main job, or go on with the one that the folder holds. Stopping it (Ctrl-C) keeps the ledger, closes it
    with "stopped" and the best so far, and passes the exception on."""
    if options.inputs is None:
        capture = captures.from_example(options.tokens, options.gate)
    else:
        capture = Capture.load(options.inputs)
    check_dtypes(capture)
    kernels.check_distinct(options.kernels)
    with alone(options.folder):
        run_ = _Run(options, capture, progress)
        try:
            return run_.go()
        except BaseException as e:
            run_.stop(e)
            raise
        finally:
            run_.close()


def check_dtypes(capture: Capture) -> None:
    """Refuse a call that no tolerance judges."""
    wanted = KDA.judged_dtypes
    for name in ("q", "initial_state"):
        x = capture.kwargs.get(name)
        if x is not None and NAMES.get(x.dtype) not in wanted:
            raise InvalidValue("--inputs", f"a call in {', '.join(wanted)}", f"{name} in {x.dtype}")


class _Run:
    def __init__(self, options: Options, capture: Capture, progress: Progress) -> None:
        self.options, self.capture, self.progress = options, capture, progress
        self.started = time.monotonic()
        self.report = options.folder / "report.html"
        self.where = torch.device("cuda", 0) if device.gpus() else torch.device("cpu")
        self.shipped = kernels.shipped(capture)
        self.files = [kernels.of_file(path) for path in options.kernels]
        tunable = any(c.name == TRITON for c in self.shipped)
        self.space = kernels.design_space(capture) if tunable else {}
        self.journal = Journal(options.folder / "ledger.jsonl")
        self.standings = Standings(self.journal, capture, options.arch, measures=self.where.type == "cuda")
        self.label = "measured" if self.standings.measures else "predicted"
        self.judge: Judge | None = None
        self.best: tuple[str, float] | None = None
        # candidates that the ledger had before this run
        self.known = set(self.journal.candidates)

    def go(self) -> Outcome:
        if self.journal.choice:
            fix = "take another folder"
            raise InvalidValue("--out", "a folder without a finished run", str(self.options.folder), fix)
        judge = self._begin()
        self.standings.tried = [c.name for c in (*self.shipped, *self.files)]
        judge.judge([*self.shipped, *self.files])
        self._time(judge, [n for n in self.standings.tried if self.standings.contends(n)])
        self.best = self.standings.lead()
        self._plan()
        write_report(self.journal.path, self.report)
        done, why = self._rounds(judge)
        judge.finish(list(self.journal.candidates))
        return self._choose(judge, done, why)

    def close(self) -> None:
        if self.judge is not None:
            self.judge.close()

    def stop(self, why: BaseException) -> None:
        """Close the ledger with "stopped" and the best so far, and report what it holds; remove one that does not even
        say what was to be run. A full disk must not hide why the run stopped, so what cannot be written is noted."""
        says = str(why)[:500].encode(errors="replace").decode()
        try:
            if not self.journal.ledger.seq:
                self.journal.path.unlink(missing_ok=True)
                return
            if self.judge is None:  # it was refused before it began: the ledger is another run's
                return
            best = {"best": self.best[0], "best_us": self.best[1], "label": self.label} if self.best else {}
            self.journal.note("stopped", {"reason": type(why).__name__, "says": says, **best})
            write_report(self.journal.path, self.report)
        except Exception as e:
            why.add_note(f"this could not be reported: {e}")

    def _begin(self) -> Judge:
        """Write the ledger's first line, or check that it is this run's."""
        o = self.options
        fresh = secrets.randbelow(SEEDS) if o.seed is None else o.seed
        self.seed = int(self.journal.run.get("seed", fresh)) if o.seed is None else o.seed
        file = o.inputs or o.folder / "capture.safetensors"
        # an ended run's capture stays as it is, whatever this one comes to
        keep = o.inputs is not None or (self.journal.resumed and file.exists())
        digest = environment.file_hash(file) if keep else self.capture.save(file)
        self.journal.begin(
            {
                "op": "kda",
                "spec": KDA.content_hash,
                "arch": o.arch,
                "seed": self.seed,
                "families": list(o.families),
                "rounds": o.rounds,
                "kernels": [f"{c.name} {c.source}" for c in self.files],
                "capture": {**self.capture.facts(), "file": file.name, "sha256": digest},
                "tuning_key": kernels.tuning_key(self.capture) if self.space else None,
                "environment": {
                    **environment.machine(self.where),
                    "kda2": kda2.__version__,
                    "python": platform.python_version(),
                    "system": f"{platform.system()} {platform.machine()}",
                    "cpus": os.cpu_count(),
                    "source": environment.source_hash("kda"),
                },
            }
        )
        on = Conditions(
            arch=o.arch, device=str(self.where), capture=str(file.resolve()), families=o.families,
            tokens=None if self.standings.measures else INTERPRETER_TOKENS,
            variant_tokens=None if self.standings.measures else VARIANT_TOKENS,
            sizes=GPU_SIZES if self.standings.measures else INTERPRETER_SIZES,
            file_sizes=GPU_SIZES if self.standings.measures else FILE_SIZES,
            seed=self.seed, limits=Limits(o.timeout_s),
        )  # fmt: skip
        for name, verdicts in self.journal.verdicts.items():  # of an interrupted run
            for verdict in verdicts.values():
                self.progress(name, verdict.stage, verdict.outcome)
        self.judge = Judge(self.journal, on, self.progress)
        return self.judge

    def _plan(self) -> None:
        """The specification book of the captured call goes into the ledger, once."""
        lead = self.standings.lead(tunable=True)
        if lead is None or self.journal.plan or (book := self.standings.book(lead[0])) is None:
            return
        floors = kernel_floors(book)
        stages = ", ".join(f"{stage} {us:g} us" for stage, us in floors.items())
        says = f"floors on {book.part['name']}: {stages}; the whole call {book.totals.floor.us:.2f} us"
        self.journal.note("plan", {"says": says, "floors_us": floors, "book": book.model_dump(mode="json")})

    def _rounds(self, judge: Judge) -> tuple[list[Round], str]:
        """Rounds until a rule stops them; returns them and the rule."""
        done: list[Round] = []
        if self.options.rounds == 0:
            return done, "rounds"
        if self.standings.lead(tunable=True) is None:
            return done, "empty"
        while (left := self._left()) is None or left > 0:
            round_ = self._round(judge, done)
            if round_ is None:
                return done, "empty"
            done.append(round_)
            if round_.decision != GO_ON:
                return done, round_.decision
        return done, "budget"

    def _round(self, judge: Judge, done: Sequence[Round]) -> Round | None:
        """Plan, write, verify and tune for one stage. A round that the ledger has already is told as it was."""
        start, lead = time.monotonic(), self.standings.lead(tunable=True)
        assert lead is not None
        gap = rounds.attack(self.standings.gaps(lead[0]), rounds.barren(done))
        if gap is None:
            return None
        tried = self._write_and_tune(judge, self.journal.candidates[lead[0]], gap.stage, self.seed + len(done))
        if not tried:
            return None
        if len(done) < len(self.journal.rounds):
            return Round.from_plain(self.journal.rounds[len(done)])
        this = self._told(gap, lead, tried, len(done) + 1, time.monotonic() - start)
        this = rounds.decided([*done, this], tuple(self.space), self.options.rounds, self._left())
        self.journal.note("round", this.plain())
        write_report(self.journal.path, self.report)
        return this

    def _write_and_tune(self, judge: Judge, best: Candidate, stage: str, seed: int) -> list[str]:
        """The writer's proposals, then the search's; returns the names of what was tried."""
        o, base = self.options, self.journal.candidates[TRITON].parameters
        written = TemplateWriter(self.space, base).propose(
            best, stage, frozenset(self.standings.tried), o.width or (6 if self.standings.measures else 3)
        )
        self._build(judge, written)
        search = Search(self.space, base, best, stage, seed)
        for name in self.standings.tried:
            if self.journal.candidates[name].impl == TRITON and (us := self.standings.score(name)) is not None:
                search.know(self.journal.candidates[name].parameters, us)
        asked = search.ask(frozenset(self.standings.tried), o.trials or (8 if self.standings.measures else 3))
        self._build(judge, asked)
        names = [c.name for c in (*written, *asked)]
        if not self.standings.measures:
            self._prove_in_order(judge, names)
        return names

    def _build(self, judge: Judge, proposed: Sequence[Candidate]) -> None:
        """Build candidates, and drop those that cannot be better; where times are measured, prove and time the rest."""
        names = [c.name for c in proposed]
        judge.build(proposed)
        for name in names:
            if why := self.standings.pruned(name):
                judge.skip(name, why)
            self.standings.tried.append(name)
        if self.standings.measures:
            judge.prove(names)
            self._time(judge, [n for n in names if self.standings.contends(n)])
            self.best = self.standings.lead()

    def _prove_in_order(self, judge: Judge, names: Sequence[str]) -> None:
        """The numerics of built candidates, the lowest modelled time first, until one is correct: proofs are what costs
        most without a GPU, and the others are no better by the model."""
        order = sorted(
            (us, n)
            for n in names
            if (us := self.standings.score(n)) is not None and self.journal.verdict(n, "L3", "L4") is None
        )
        for us, name in order:
            if self.best is not None and us >= self.best[1]:
                judge.skip(name, f"its modelled time, {us} us, is not below the {self.best[1]} us of {self.best[0]}")
            else:
                judge.prove([name])
                self.best = self.standings.lead()

    def _time(self, judge: Judge, names: Sequence[str]) -> None:
        if self.standings.measures and names:
            judge.time(names, self.standings.baseline(names))

    def _told(self, gap: Gap, lead: tuple[str, float], tried: Sequence[str], number: int, seconds: float) -> Round:
        best = self.standings.lead(tunable=True) or lead
        became = {name: self.standings.became(name) for name in tried}
        held = {
            name: hypothesis_held(
                c.expected,
                self.journal.verdicts[name],
                self.journal.verdicts[c.parent or name],
                self.standings.gain(name, c.parent or name),
            )
            for name in tried
            if (c := self.journal.candidates[name]).expected is not None
        }
        return Round(
            round=number, stage=gap.stage, why=str(gap), candidates=became, hypotheses=held, best=best[0],
            best_us=best[1], label=self.label, gain_percent=round(100 * (1 - best[1] / lead[1]), 2),
            seconds=round(seconds, 1), interrupted=bool(self.known & set(tried)),
        )  # fmt: skip

    def _left(self) -> float | None:
        """Seconds of the budget that are left for rounds; a last heat of the best has its own."""
        if self.options.budget_s is None:
            return None
        reserve = FINAL_HEAT_S if self.standings.measures else 0.0
        return self.options.budget_s - reserve - (time.monotonic() - self.started)

    def _choose(self, judge: Judge, done: list[Round], stopped_by: str) -> Outcome:
        made = choice.make(self.standings, judge)
        self.journal.note(
            "choice",
            {
                "chosen": made.chosen, "label": self.label, "rule": made.rule, "ranking": made.ranking,
                "stopped_by": stopped_by, "why": rounds.STOP_RULES[stopped_by], "cost": rounds.next_percent(done),
            },
        )  # fmt: skip
        write_report(self.journal.path, self.report)
        found = [self.journal.candidate(n) for n in self.journal.candidates]
        shipped, path = tuple(c.name for c in self.shipped), self.journal.path
        return Outcome(
            made.chosen, self.label, made.rule, made.ranking, found, shipped, done, stopped_by, path, self.report
        )
