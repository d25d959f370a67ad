"""The main job: capture a call, put every candidate through the ladder, choose, and keep the trail in a ledger."""

from __future__ import annotations

import os
import platform
import secrets
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import kda2
from kda2 import device
from kda2.errors import InvalidValue, KDA2Error
from kda2.ops.kda.spec import KDA
from kda2.testing import FAMILIES
from kda2.testing.verify import NAMES
from kda2.workbench import capture as captures
from kda2.workbench import ladder, latency, predict
from kda2.workbench.candidates import TRITON, Proposal, meta_call, propose
from kda2.workbench.capture import Capture
from kda2.workbench.ledger import Ledger
from kda2.workbench.profiler import environment
from kda2.workbench.profiler.timing import Timing
from kda2.workbench.records import STAGES, Candidate, Verdict
from kda2.workbench.report import write_report
from kda2.workbench.verifier import Task, verify_candidate

# Told what a candidate's stage is at: (candidate, stage, text).
Progress = Callable[[str, str, str], None]

# Sizes of the probe families: small for the interpreter, with several chunks and channels that are no power of two on
# a GPU.
INTERPRETER_SIZES = {"T": 70, "H": 1, "HV": 1, "K": 32, "V": 32}
GPU_SIZES = {"T": 300, "H": 2, "HV": 4, "K": 128, "V": 100}
# Tokens of the capture that a variant is held to under the interpreter; a shipped configuration gets all of them.
VARIANT_TOKENS = 128
SEEDS = 2**31


@dataclass(frozen=True)
class Options:
    """What a run does: where it writes, for which architecture it builds, on which call and families it judges."""

    folder: Path
    arch: int
    inputs: Path | None = None
    tokens: int = 512
    gate: str = "softplus"
    families: tuple[str, ...] = tuple(FAMILIES)
    variants: bool = True
    seed: int = field(default_factory=lambda: secrets.randbelow(SEEDS))

    def __post_init__(self) -> None:
        if not 0 <= self.seed < SEEDS:
            raise InvalidValue("--seed", "at least 0 and below 2**31", str(self.seed))


@dataclass(frozen=True)
class Outcome:
    """What a run came to. `label` is "measured" or "predicted"."""

    chosen: str | None
    label: str
    rule: str
    ranking: list[dict[str, Any]]
    candidates: list[Candidate]
    shipped: tuple[str, ...]
    ledger: Path
    report: Path

    @property
    def ok(self) -> bool:
        """Whether everything users get is correct and one could be chosen. A variant may fail: it was a trial."""
        return self.chosen is not None and all(c.correct for c in self.candidates if c.name in self.shipped)


def run(options: Options, progress: Progress) -> Outcome:
    """Run the main job. Stopping it (Ctrl-C) keeps the ledger, closes it with "stopped" and passes the exception on."""
    if options.inputs is None:
        capture = captures.from_example(options.tokens, options.gate)
    else:
        capture = Capture.load(options.inputs)
    _check_dtypes(capture)
    run_ = _Run(options, capture, progress)
    try:
        return run_.go()
    except BaseException as e:
        run_.stop(e)
        raise


def _check_dtypes(capture: Capture) -> None:
    """Refuse a call that no tolerance judges."""
    wanted = [t.dtype for t in KDA.tolerances]
    for name in ("q", "initial_state"):
        x = capture.kwargs.get(name)
        if x is not None and NAMES.get(x.dtype) not in wanted:
            raise InvalidValue("--inputs", f"a call in {', '.join(wanted)}", f"{name} in {x.dtype}")


def _new_ledger(path: Path) -> Ledger:
    """A ledger in a file of its own, which is made now: of two runs into one folder, one goes on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.touch(exist_ok=False)
    except FileExistsError as e:
        fix = "each run takes a folder of its own"
        raise InvalidValue("--out", "a folder without a run's ledger", str(path), fix) from e
    return Ledger(path)


class _Run:
    def __init__(self, options: Options, capture: Capture, progress: Progress) -> None:
        self.options, self.capture, self.progress = options, capture, progress
        self.report = options.folder / "report.html"
        gpus = device.gpus()
        self.where = torch.device("cuda", 0) if gpus else torch.device("cpu")
        self.children: set[subprocess.Popen[str]] = set()
        self.verdicts: dict[str, list[Verdict]] = {}
        self.pending: dict[Future[Verdict], str] = {}
        self.ledger = _new_ledger(options.folder / "ledger.jsonl")

    def go(self) -> Outcome:
        file = self._begin()
        proposals = [p for p in propose(self.capture) if p.shipped or self.options.variants]
        for p in proposals:
            self.verdicts[p.name] = []
            about = {"name": p.name, "impl": p.impl, "parent": p.parent, "hypothesis": p.hypothesis}
            self.ledger.append("candidate", {**about, "parameters": p.parameters() or {}})
            self.progress(p.name, "L0", "")
        self._judge(proposals, file)
        timings = self._time(proposals)
        for p in proposals:
            self._close(p.name)
        return self._choose(proposals, timings)

    def stop(self, why: BaseException) -> None:
        """Close the ledger with "stopped" and report what it holds; remove one that does not even say what was to be
        run. A full disk must not hide why the run stopped, so what cannot be written is only noted."""
        says = str(why)[:500].encode(errors="replace").decode()
        try:
            if not self.ledger.seq:
                self.ledger.path.unlink()
                return
            self.ledger.append("stopped", {"reason": type(why).__name__, "says": says})
            write_report(self.ledger.path, self.report)
        except (KDA2Error, OSError) as e:
            why.add_note(f"this could not be reported: {e}")

    def _begin(self) -> Path:
        """Write the ledger's first line; returns the capture's file."""
        o = self.options
        file = o.inputs or o.folder / "capture.safetensors"
        digest = environment.file_hash(file) if o.inputs is not None else self.capture.save(file)
        self.ledger.append(
            "run",
            {
                "op": "kda",
                "arch": o.arch,
                "seed": o.seed,
                "families": list(o.families),
                "capture": {**self.capture.facts(), "file": file.name, "sha256": digest},
                "environment": {
                    **environment.machine(self.where),
                    "kda2": kda2.__version__,
                    "python": platform.python_version(),
                    "system": f"{platform.system()} {platform.machine()}",
                    "cpus": os.cpu_count(),
                    "source": environment.source_hash("kda"),
                },
            },
        )
        return file

    def _judge(self, proposals: Sequence[Proposal], file: Path) -> None:
        """L0 to L4. Numerics run beside the builds, as many at a time as there are cores: on a GPU too, where compiling
        takes most of their time."""
        builder, call = ladder.Builder(self.options.arch), meta_call(self.capture)
        pool = ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1)))
        try:
            for p in proposals:
                self._found(p.name, ladder.parse(p))
                self.progress(p.name, "L1", "building" if p.impl == TRITON else "")
                for verdict in builder.judge(p, call):
                    self._found(p.name, verdict)
                self._submit(pool, p, file)
                self._collect(block=False)
            while self.pending:
                self._collect(block=True)
        finally:
            for child in list(self.children):
                child.kill()
            pool.shutdown(cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, p: Proposal, file: Path) -> None:
        """Queue the numerics of a candidate that nothing has refuted."""
        gpu = self.where.type == "cuda"
        if any(v.refuted for v in self.verdicts[p.name]):
            for verdict in ladder.not_run(("L3", "L4"), "refuted before"):
                self._found(p.name, verdict)
            return
        task = Task(
            impl=p.impl,
            configs=p.parameters(),
            capture=str(file),
            tokens=None if p.shipped or gpu else VARIANT_TOKENS,
            families=self.options.families,
            sizes=GPU_SIZES if gpu else INTERPRETER_SIZES,
            device=str(self.where),
            seed=self.options.seed,
            interpreted=p.impl == TRITON and not gpu,
        )
        stage = "L4" if gpu else "L3"
        done = iter(range(1, len(task.families) + 2))

        def heard(family: str) -> None:
            self.progress(p.name, stage, f"{next(done)}/{len(task.families) + 1}")

        self.progress(p.name, stage, "queued")
        self.pending[pool.submit(verify_candidate, task, heard, self.children)] = p.name

    def _collect(self, block: bool) -> None:
        """Write down the numerics that have finished; wait for the next to finish if `block`."""
        for future in wait(self.pending, timeout=None if block else 0, return_when=FIRST_COMPLETED).done:
            name = self.pending.pop(future)
            verdict = future.result()
            other, why = ("L3", "judged on the GPU") if verdict.stage == "L4" else ("L4", "no CUDA device")
            for v in (verdict, *ladder.not_run((other,), why)):
                self._found(name, v)

    def _time(self, proposals: Sequence[Proposal]) -> dict[str, Timing]:
        """L5 to L7."""
        gpu = self.where.type == "cuda"
        contenders = [p for p in proposals if gpu and p.impl != "reference" and self._correct(p.name)]
        for p in contenders:
            self.progress(p.name, "L6", "timing")
        timings = latency.measure(contenders, self.capture, self.where) if contenders else {}
        found = latency.verdicts(timings, TRITON)
        for p in proposals:
            absent = "not part of this job" if gpu else "no CUDA device"
            why = absent if not gpu else "it is the oracle" if p.impl == "reference" else "its numerics did not pass"
            timed = found.get(p.name) or ladder.not_run(("L6",), why)[0]
            for verdict in (*ladder.not_run(("L5",), absent), timed, *ladder.not_run(("L7",), absent)):
                self._found(p.name, verdict)
        return timings

    def _found(self, name: str, verdict: Verdict) -> None:
        self.verdicts[name].append(verdict)
        self.ledger.append("verdict", {"candidate": name, "verdict": verdict.model_dump(mode="json")})
        self.progress(name, verdict.stage, verdict.outcome)

    def _correct(self, name: str) -> bool:
        return self._candidate(name).correct

    def _candidate(self, name: str) -> Candidate:
        """What is known of a candidate; its latency only where it passed."""
        verdicts = tuple(sorted(self.verdicts[name], key=lambda v: list(STAGES).index(v.stage)))
        timed = [v.evidence["median_us"] for v in verdicts if v.stage == "L6" and v.passed]
        return Candidate(
            name=name, op="kda", impl=name.partition(" ")[0], writer="kda2", verdicts=verdicts,
            latency_us=timed[0] if timed else None,
        )  # fmt: skip

    def _close(self, name: str) -> None:
        candidate = self._candidate(name)
        self.ledger.append("judged", {"name": name, "correct": candidate.correct, "latency_us": candidate.latency_us})

    def _choose(self, proposals: Sequence[Proposal], timings: dict[str, Timing]) -> Outcome:
        correct = [p.name for p in proposals if self._correct(p.name)]
        if timings:
            label, rule = "measured", "lowest median; the shipped one unless another is faster beyond noise"
            times = {name: round(t.median_us, 3) for name, t in timings.items()}
            chosen: str | None = latency.fastest(timings, TRITON)
        else:
            label, rule = "predicted", predict.RULE
            times = {name: us for name in correct if (us := self._modelled(name)) is not None}
            chosen = predict.best(times, TRITON)
            if chosen is None:
                chosen, rule = self._unmodelled(correct)
        paced = {name for name, t in timings.items() if t.host_paced}
        ranking: list[dict[str, Any]] = [
            {"name": n, "us": us} | ({"host_paced": True} if n in paced else {})
            for n, us in sorted(times.items(), key=lambda x: x[1])
        ]
        self.ledger.append("choice", {"chosen": chosen, "label": label, "rule": rule, "ranking": ranking})
        write_report(self.ledger.path, self.report)
        candidates = [self._candidate(p.name) for p in proposals]
        shipped = tuple(p.name for p in proposals if p.shipped)
        return Outcome(chosen, label, rule, ranking, candidates, shipped, self.ledger.path, self.report)

    def _unmodelled(self, correct: Sequence[str]) -> tuple[str | None, str]:
        """The choice where no correct candidate has a modelled time, and its rule."""
        if not correct:
            return None, "no candidate is correct"
        modelled = any(self._modelled(name) is not None for name in self.verdicts)
        why = "as none of the modelled kernels is" if modelled else "as no kernel could be modelled"
        return correct[0], f"the first implementation that is correct, {why}"

    def _modelled(self, name: str) -> float | None:
        stages = next((v.evidence.get("stages") for v in self.verdicts[name] if v.stage == "L1"), None)
        if not stages:
            return None
        us = predict.modelled_us(predict.loads_of(stages), self.options.arch)
        return None if us is None else round(us, 3)
