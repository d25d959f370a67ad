"""L3 and L4 from the judge's side: a child answers one question after another, and what it answers is held to what is
right here. The child gets inputs and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from kda2.testing.compare import Comparison
from kda2.testing.verify import INPUTS, Verdict
from kda2.workbench.verifier.conditions import Conditions
from kda2.workbench.verifier.foreign import BROKEN, RAISED, raised
from kda2.workbench.verifier.process import Child, Ended
from kda2.workbench.verifier.questions import AGAIN, Question, again, argument_names, pose
from kda2.workbench.verifier.subject import FILE, Subject

# Failed probes that are diagnosed: a kernel that is wrong everywhere is wrong in one way.
MOST_DIAGNOSED = 3
# Gates by which a file cheats rather than errs.
CHEATS = ("tamper", "imports")
_CUDA_ERROR = "CUDA error"
Result = dict[str, Any]


class Interview:
    """Asks one subject in one child. `diagnosed`: of how many wrong answers it is found out what they are. `counted`:
    kernels are warmed up and then marked for a profiler around the child, and nothing is asked twice."""

    def __init__(
        self, child: Child, subject: Subject, on: Conditions, diagnosed: int = MOST_DIAGNOSED, counted: bool = False
    ) -> None:
        self.child, self.subject, self.on, self.counted = child, subject, on, counted
        self._left = diagnosed

    def ask(self, probes: Sequence[str], then: Sequence[str] = ()) -> Iterator[tuple[str, Result]]:
        """(probe, result) of each, and of `then` if all were right; a file that is right is asked the first again, with
        other contents in its tensors. Raises what `Child.ask` raises."""
        right = True
        for i, name in enumerate(probes):
            yield name, (result := self._result(name, None))
            right = right and bool(result["ok"])
            if _CUDA_ERROR in result.get("says", ""):
                return  # nothing runs on this device any more: what follows would say no more of the kernel
            if i == 0 and self.subject.impl == FILE and result["ok"] and not self.counted:
                for other in again(self.on, self.subject, probes):
                    yield other, (result := self._result(other, name))
                    right = right and bool(result["ok"])
        for name in then if right else ():
            yield name, self._result(name, None)

    def _result(self, name: str, like: str | None) -> Result:
        try:
            question = pose(self.on, self.subject, name, like)
        except Exception as e:
            return broken(e)
        return self.put(question, again=like is not None)

    def put(self, question: Question, again: bool = False) -> Result:
        """Ask one question; `again`: in the tensors of the one before. Raises what `Child.ask` raises."""
        answers, gates = [], dict[str, str]()
        try:
            inputs = question.inputs
        except Exception as e:
            return broken(e)
        for given in inputs:
            said = _answer(list(self.child.ask(self._task(question, again), given)))
            if "ended" in said:
                return without_numbers(str(said["ended"]), str(said.get("says", "")), str(said.get("gate", "process")))
            answers.append(self.child.answer())
            gates |= said.get("gates", {})
        try:
            return self._judged(question, answers, gates, again)
        except Exception as e:
            return broken(e)

    def _task(self, question: Question, again: bool) -> dict[str, Any]:
        return {
            "kind": "call", "subject": self.subject.plain(), "arguments": argument_names(self.subject, self.on.spec),
            "outputs": question.outputs, "in_place": question.in_place, "device": self.on.device, "again": again,
            "counted": self.counted,
        }  # fmt: skip

    def _judged(self, question: Question, answers: list[Any], gates: dict[str, str], again: bool) -> Result:
        changed = [name for name in gates.pop("inputs", "").split(", ") if name]
        if missing := [x for answer in answers for x in question.outputs if x not in answer]:
            return without_numbers(RAISED, f"its answer lacks {', '.join(missing)}", "outputs")
        verdict = question.judge(answers, changed)
        if endless := [c for c in verdict.comparisons if c.non_finite_want]:
            return broken(f"the call has no finite answer to hold anything against: {endless[0]}")
        found = plain(verdict)
        if not verdict.ok:
            found["gate"] = _gate([c for c in verdict.comparisons if not c.ok], again)
            found |= self._says(question, verdict, answers, again)
        if gates:
            gate = next((name for name in CHEATS if name in gates), next(iter(gates)))
            says = found.get("says", "")
            found |= {"ok": False, "gate": gate, "says": " ".join([gates[gate], *([says] if says else [])])}
        return found

    def _says(self, question: Question, verdict: Verdict, answers: list[Any], again: bool) -> Result:
        """What is wrong in words, of the first probes that fail."""
        if again:
            worst = next(c for c in verdict.comparisons if not c.ok)
            asked = f"asked again with {question_words(question.name)}, it is wrong, as if it kept earlier answers"
            return {"says": f"{asked}: {worst.explain()}"}
        self._left -= 1
        if self._left < 0:
            return {}
        try:
            says = question.says(verdict, answers)
        except Exception:  # the verdict stands without words
            return {}
        return {"says": says} if says else {}


def _answer(said: list[dict[str, Any]]) -> dict[str, Any]:
    """The last thing said, if that is an answer. Raises `Ended`: what knows the protocol may say anything."""
    gates = said[-1].get("gates", {}) if said else None
    if not isinstance(gates, dict) or not all(isinstance(says, str) for says in gates.values()):
        raise Ended("garbled", "what it answered is no answer")
    return said[-1]


def _gate(wrong: Sequence[Comparison], again: bool) -> str:
    """What refuses an answer with these comparisons."""
    if any(c.quantity == INPUTS for c in wrong):
        return "inputs"
    if any(c.mismatch for c in wrong):
        return "outputs"
    return "repeat" if again else "numerics"


def question_words(name: str) -> str:
    return "the values of some tokens changed" if name == AGAIN[1] else "other contents in the same tensors"


def without_numbers(how: str, says: str, gate: str) -> Result:
    """A probe that ended without numbers to compare."""
    return {"ok": False, "margin": None, "quantities": {}, "ended": how, "says": says, "gate": gate}


def broken(e: Exception | str) -> Result:
    """A probe that could not be judged, whatever the kernel did."""
    says = e if isinstance(e, str) else raised(e, None)
    prefix = "" if isinstance(e, str) else "the judge failed, which says nothing of the kernel: "
    return without_numbers(BROKEN, prefix + says, "")


def plain(verdict: Verdict) -> Result:
    """A verdict as evidence: per quantity the error, its limit and the worst element; JSON without infinities."""
    return {
        "ok": verdict.ok,
        "margin": finite(verdict.margin),
        "quantities": {c.quantity: _comparison(c) for c in verdict.comparisons},
    }


def _comparison(c: Comparison) -> dict[str, Any]:
    return {
        "ok": c.ok,
        "margin": finite(c.margin),
        "relative_l2": finite(c.relative_l2),
        "limit": c.limit,
        "worst": str(c.worst) if c.worst is not None else None,
        "worst_rms_off": finite(c.worst.rms_off) if c.worst is not None else None,
        "element_limit": c.element_limit,
        "says": c.explain(),
    }


def finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
