"""Where a run stands: which candidates are correct, how fast, which leads, and where the leader loses its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kda2.workbench import predict
from kda2.workbench.blockplan import BlockPlan
from kda2.workbench.candidates import TRITON
from kda2.workbench.capture import Capture
from kda2.workbench.floors import kernel_floors, plan_of
from kda2.workbench.journal import Journal
from kda2.workbench.records import shown_correct
from kda2.workbench.rounds import Gap


class Standings:
    """What the journal's verdicts come to. `measures`: times come from L6, otherwise from the model of the machine
    code. `tried` names what this run has tried, in order: of a resumed run the journal knows more than that."""

    def __init__(self, journal: Journal, capture: Capture, arch: int, measures: bool) -> None:
        self.journal, self.measures = journal, measures
        self.tried: list[str] = []
        self._capture, self._arch = capture, arch
        self._books: dict[int, BlockPlan | None] = {}

    def correct(self, name: str) -> bool:
        return shown_correct(self.journal.verdicts[name].values())

    def refuted(self, name: str) -> bool:
        return any(v.refuted for v in self.journal.verdicts[name].values())

    def contends(self, name: str) -> bool:
        """Whether a candidate's time counts: it is correct, and not there to be the oracle."""
        return self.correct(name) and self.journal.candidates[name].impl != "reference"

    def score(self, name: str) -> float | None:
        """A candidate's microseconds: measured, relative to the baseline of its own measurement, or modelled."""
        if not self.measures:
            return None if self.refuted(name) else self.modelled(name)
        verdict = self.journal.verdict(name, "L6")
        if verdict is None or not verdict.passed:
            return None
        own, speed = float(verdict.evidence["median_us"]), verdict.evidence.get("speed")
        if speed is None or (base := self.journal.verdict(verdict.evidence["against"], "L6")) is None:
            return own
        return round(float(base.evidence["median_us"]) / float(speed["value"]), 3)

    def gain(self, name: str, parent: str) -> float | None:
        """The share of its parent's time that a candidate saves; None where either has no time."""
        us, before = self.score(name), self.score(parent)
        return None if us is None or before is None else 1.0 - us / before

    def modelled(self, name: str) -> float | None:
        """The model's microseconds of a configuration of the library's kernels."""
        stages = self.stages(name)
        if not stages or self.journal.candidates[name].impl != TRITON:
            return None
        us = predict.modelled_us(predict.loads_of(stages), self._arch)
        return None if us is None else round(us, 3)

    def lead(self, tunable: bool = False) -> tuple[str, float] | None:
        """The best correct candidate and its time; what ships unless another is faster beyond noise. `tunable`: of the
        kernels that have a design space."""
        scored = {n: us for n in self.tried if self.contends(n) and (us := self.score(n)) is not None}
        if tunable:
            scored = {n: us for n, us in scored.items() if self.journal.candidates[n].impl == TRITON}
        if TRITON in scored:
            scored = {n: us for n, us in scored.items() if n == TRITON or self._beats_shipped(n)}
        return min(scored.items(), key=lambda x: x[1]) if scored else None

    def _beats_shipped(self, name: str) -> bool:
        verdict = self.journal.verdict(name, "L6")
        if verdict is None or not verdict.passed:
            return not self.measures
        return bool(verdict.evidence.get("speed", {}).get("verdict") == "faster")

    def baseline(self, names: Sequence[str]) -> str:
        """What the others are timed against: what ships, if it is correct."""
        return TRITON if TRITON in self.tried and self.contends(TRITON) else names[0]

    def stages(self, name: str) -> dict[str, dict[str, Any]]:
        """What L1 found of each stage's machine code."""
        verdict = self.journal.verdict(name, "L1")
        found: dict[str, dict[str, Any]] = {} if verdict is None else verdict.evidence.get("stages", {})
        return found

    def book(self, name: str) -> BlockPlan | None:
        """The plan of the captured call for the candidate's chunks; None where nothing can be planned."""
        chunk = int(self.journal.candidates[name].parameters["prepare"]["BT"])
        if chunk not in self._books:
            self._books[chunk] = plan_of(self._capture, self._arch, chunk)
        return self._books[chunk]

    def gaps(self, name: str) -> list[Gap]:
        """Each stage's time beside the floor that the plan gives it."""
        book, timed = self.book(name), self.journal.verdict(name, "L6")
        floors = {} if book is None else kernel_floors(book)
        measured = timed.evidence.get("stages_us", {}) if timed is not None else {}
        modelled = predict.stages_us(self.stages(name), self._arch)
        return [Gap(s, measured.get(s, us), floors[s]) for s, us in modelled.items() if s in floors]

    def pruned(self, name: str) -> str:
        """Why a built variant is not worth running, "" if it is: it is what another is, or spills more than what
        ships."""
        mine = self._code(name)
        same = next((other for other in self.tried if other != name and mine and mine == self._code(other)), None)
        if same is not None:
            return f"the same machine code as {same}"
        for stage, code in self.stages(name).items():
            allowed = self.stages(TRITON).get(stage, {}).get("spills", 0)
            if code["spills"] > allowed:
                return f"pruned: {stage} spills {code['spills']} bytes a thread, the shipped one {allowed}"
        return ""

    def _code(self, name: str) -> tuple[tuple[str, str, int, int], ...]:
        """The machine code and the grids: equal ones run alike."""
        return tuple((s, x["sass_hash"], x["ctas"], x["num_warps"]) for s, x in self.stages(name).items())

    def became(self, name: str) -> str:
        """What became of a candidate, in a few words."""
        verdicts = self.journal.verdicts[name]
        if (wrong := next((v for v in verdicts.values() if v.refuted), None)) is not None:
            return f"{wrong.outcome} at {wrong.stage}"
        if self.correct(name):
            us = self.score(name)
            return "correct" if us is None else f"correct, {us:g} us"
        numerics = [v.outcome for s, v in verdicts.items() if s in ("L3", "L4") and "no CUDA device" not in v.outcome]
        return numerics[0] if numerics else "not judged"
