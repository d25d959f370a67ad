"""A run's memory: its ledger, and what the ledger already holds, so that a run that was ended goes on where it was."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kda2.errors import InvalidValue
from kda2.workbench import ledger as ledgers
from kda2.workbench.ledger import Ledger
from kda2.workbench.records import STAGES, Candidate, Verdict

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class Journal:
    """Candidates, verdicts and rounds as they are found, each written once. `resumed` says whether earlier lines were
    there."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._torn = _set_torn_line_aside(path)
        self._read(path)
        self.ledger = Ledger(path)
        self.resumed = bool(self.ledger.seq)

    @classmethod
    def reading(cls, path: Path) -> Journal:
        """What a ledger holds, not open for writing. Raises `LedgerError`, and `InvalidValue` for a ledger of something
        else."""
        journal = cls.__new__(cls)
        journal._read(path)
        return journal

    def _read(self, path: Path) -> None:
        self.path = path
        self.candidates: dict[str, Candidate] = {}
        self.verdicts: dict[str, dict[str, Verdict]] = {}
        self.rounds: list[dict[str, Any]] = []
        self.run: dict[str, Any] = {}
        self.plan: dict[str, Any] = {}
        self.choice: dict[str, Any] = {}
        self._judged: set[str] = set()
        for line in ledgers.read(path) if path.exists() else ():
            try:
                self._take(line.kind, line.payload)
            except (KeyError, TypeError, ValueError) as e:
                got = f"{path}, whose line {line.seq + 1} of kind {line.kind!r} does not read as one of its own"
                raise InvalidValue("the ledger", "one that this kda2's runs write", got) from e

    def begin(self, payload: Mapping[str, Any]) -> None:
        """The run's first line; where there is one, it must tell of the same run. Raises `InvalidValue`."""
        if not self.resumed:
            self.note("run", payload)
            return
        differ = [name for name in _SAME if self.run.get(name) != payload.get(name)]
        before, now = self.run.get("environment", {}), payload["environment"]
        differ += [name for name in _SAME_PLACE if before.get(name) != now.get(name)]
        if differ:
            got, fix = f"{self.path}, of a run with another {', '.join(differ)}", "take another, or the same options"
            raise InvalidValue("--out", "a new folder, or one of this very run", got, fix)
        torn = {"torn_bytes_set_aside": self._torn} if self._torn else {}
        self.note("resumed", {"lines": self.ledger.seq, "environment": payload["environment"], **torn})

    def note(self, kind: str, payload: Mapping[str, Any]) -> None:
        """Append a line of any kind."""
        self.ledger.append(kind, payload)
        self._take(kind, payload)

    def propose(self, candidate: Candidate) -> None:
        """A candidate, written unless it is known already; a file that has moved is known by its contents."""
        known = self.candidates.get(candidate.name)
        if known is None:
            self.note("candidate", candidate.model_dump(mode="json", exclude={"verdicts", "latency_us"}))
        elif (known.impl, known.source) != (candidate.impl, candidate.source):
            raise InvalidValue("the ledger", f"of the same {candidate.name}", f"{self.path}, with another of that name")
        else:
            self.candidates[candidate.name] = candidate

    def found(self, name: str, verdict: Verdict) -> None:
        """A verdict on a candidate, written unless its stage has one."""
        if verdict.stage not in self.verdicts[name]:
            self.note("verdict", {"candidate": name, "verdict": verdict.model_dump(mode="json")})

    def close(self, name: str) -> None:
        """Sum a candidate up, once: correct, wrong, or (None) neither shown."""
        if name not in self._judged:
            c = self.candidate(name)
            correct = True if c.correct else False if any(v.refuted for v in c.verdicts) else None
            summary = {"name": name, "correct": correct, "latency_us": c.latency_us}
            self.note("judged", summary)

    def verdict(self, name: str, *stages: str) -> Verdict | None:
        """The first of these stages' verdicts that there is."""
        return next((self.verdicts[name][s] for s in stages if s in self.verdicts[name]), None)

    def candidate(self, name: str) -> Candidate:
        """What is known of a candidate; its latency only where it passed."""
        verdicts = tuple(sorted(self.verdicts[name].values(), key=lambda v: list(STAGES).index(v.stage)))
        timed = [v.evidence["median_us"] for v in verdicts if v.stage == "L6" and v.passed]
        stages: dict[str, Any] = next((v.evidence.get("stages", {}) for v in verdicts if v.stage == "L1"), {})
        fields = self.candidates[name].model_dump() | {
            "verdicts": verdicts,
            "latency_us": timed[0] if timed else None,
            "build": next(({**s["versions"], "arch": f"sm_{s['arch']}"} for s in stages.values()), {}),
            "artifacts": {f"{stage} {kind}": h for stage, s in stages.items() for kind, h in s["artifacts"].items()},
        }
        return Candidate.model_validate(fields)

    def _take(self, kind: str, payload: Mapping[str, Any]) -> None:
        if kind == "run":
            self.run = dict(payload)
        elif kind == "candidate":
            candidate = Candidate.model_validate(payload)
            self.candidates[candidate.name] = candidate
            self.verdicts[candidate.name] = {}
        elif kind == "verdict":
            verdict = Verdict.model_validate(payload["verdict"])
            self.verdicts[payload["candidate"]][verdict.stage] = verdict
        elif kind == "judged":
            self._judged.add(payload["name"])
        elif kind == "round":
            self.rounds.append(dict(payload))
        elif kind == "plan":
            self.plan = dict(payload)
        elif kind == "choice":
            self.choice = dict(payload)


# What must agree for a run to go on in another's ledger: of the job, and of where it runs.
_SAME = ("op", "arch", "seed", "families", "kernels", "capture")
_SAME_PLACE = ("device", "torch", "triton", "kda2", "source")


def _set_torn_line_aside(path: Path) -> int:
    """A line that was being written when the machine stopped is moved to a file beside the ledger; returns its bytes.
    It was never finished, so nothing that it says was found."""
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    if whole == len(data):
        return 0
    aside = path.with_name(f"{path.name}.torn")
    with aside.open("ab") as f:
        f.write(data[whole:] + b"\n")
    with path.open("r+b") as f:
        f.truncate(whole)
    return len(data) - whole


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the hold ends with the process, however that ends. Raises `InvalidValue` if
    another run has it."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(descriptor)
        fix = "wait for it, or take another folder"
        raise InvalidValue("--out", "a folder that no other run is writing to", str(folder), fix) from e
    except OSError:  # some network file systems have no locks
        pass
    try:
        yield
    finally:
        os.close(descriptor)
