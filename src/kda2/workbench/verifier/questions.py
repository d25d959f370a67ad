"""What a subject is asked, with the right answers: the judge's side, which never leaves the judge's process.

A question is one probe: the inputs that the subject gets, and a judgement of what it gives back. Each operator has its
own: whole calls of `kda`, one stage of it, `kda_step`, and contracts that came from a file (`imported.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from kda2.errors import InvalidValue
from kda2.ops.kda.gate import Gate
from kda2.ops.kda.spec import KDA, STEP_FAMILIES
from kda2.testing.compare import Comparison
from kda2.testing.diagnosis import diagnose
from kda2.testing.families import FAMILIES
from kda2.testing.inputs import Problem, as_step, make_step
from kda2.testing.oracle import Outputs, checked, checked_step
from kda2.testing.stage_verify import verify_stage
from kda2.testing.stages import STAGES, replaced, stage_inputs
from kda2.testing.verify import INPUTS, Trial, Verdict, call_trial, judge_step, trial
from kda2.workbench.capture import Capture
from kda2.workbench.profiler.problems import DTYPES
from kda2.workbench.verifier.conditions import CAPTURE, Conditions
from kda2.workbench.verifier.subject import FILE, IMPORTED, Subject

# Asked after the first probe, in its tensors: other contents, and the first ones with one block of tokens changed.
OTHER, BLOCK = "other contents", "one block changed"
AGAIN = (OTHER, BLOCK)
RANDOM = "random"
# A file's other dtypes: what it does not serve it may refuse there, and be right all the same.
OTHER_DTYPES = {f"{RANDOM} in {dtype}": dtype for dtype in ("fp16", "fp32")}
# Probes of a step beside the families: a pool of states with slots in no order, one slot that means padding.
POOL, PADDED = "state_pool", "padded_rows"
TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
OPTIONS = (
    "scale", "gate", "lower_bound", "qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "state_layout",
)  # fmt: skip
OUTPUTS = ("o", "final_state")
STEP_TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "state", "state_indices")
Answer = Mapping[str, Tensor]


class Question(Protocol):
    """One probe. `inputs`: what the subject is given, one call after another (most probes have one); `outputs`: the
    names that it must return; `in_place`: inputs that it may write to."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def in_place(self) -> tuple[str, ...]: ...

    def judge(self, answers: Sequence[Answer], changed: Sequence[str]) -> Verdict:
        """Hold the answers to what is right; `changed` names inputs that were written to."""
        ...

    def says(self, verdict: Verdict, answers: Sequence[Answer]) -> str:
        """What is wrong, in words; "" where the comparisons say it all."""
        ...


class Timed(Question, Protocol):
    """A question whose call can be timed. `moving`: inputs that move on together along `axis` from call to call."""

    @property
    def moving(self) -> tuple[str, ...]: ...
    @property
    def axis(self) -> int: ...

    def moved(self, places: Mapping[str, int]) -> Question:
        """The question after each of its inputs has moved on by so many places."""
        ...

    def other(self) -> Question:
        """The question with other contents."""
        ...


_TOKENS = ("q", "k", "v", "g", "beta")


@dataclass(frozen=True)
class CallQuestion:
    """A whole call of `kda`. `given` is the trial's call as made on the CPU."""

    trial: Trial
    given: Mapping[str, Any]
    outputs: tuple[str, ...] = OUTPUTS
    in_place: tuple[str, ...] = ()
    moving: tuple[str, ...] = _TOKENS
    axis: int = 1

    @property
    def name(self) -> str:
        return self.trial.name

    def moved(self, places: Mapping[str, int]) -> CallQuestion:
        return self._of({n: x.roll(places[n], 1) if n in places else x for n, x in self.trial.kwargs.items()}, {})

    def other(self) -> CallQuestion:
        return self._of(moved_on(self.trial.kwargs, 1), moved_on(self.given, 1))

    def _of(self, kwargs: Mapping[str, Any], given: Mapping[str, Any]) -> CallQuestion:
        asked = call_trial(self.name, kwargs)
        return replace(self, trial=replace(asked, limits=self.trial.limits, floors=self.trial.floors), given=given)

    @property
    def inputs(self) -> Sequence[Mapping[str, Any]]:
        wants_state = bool(self.given.get("output_final_state"))
        return [call_inputs(self.given) | {"output_final_state": wants_state}]

    def judge(self, answers: Sequence[Answer], changed: Sequence[str]) -> Verdict:
        return self.trial.judge(self._got(answers), changed)

    def _got(self, answers: Sequence[Answer]) -> Outputs:
        (answer,) = answers
        return answer["o"], answer.get("final_state") if self.trial.want[1] is not None else None

    def says(self, verdict: Verdict, answers: Sequence[Answer]) -> str:
        found = [c for c in verdict.comparisons if c.quantity != INPUTS]
        spoilt = [c.mismatch for c in verdict.comparisons if c.quantity == INPUTS]
        says = [f"It wrote into its inputs ({words}); they belong to the caller." for words in spoilt]
        if not all(c.ok for c in found):
            says.append(diagnose(self._got(answers), self.trial.want, self.trial.kwargs, self.name, found))
        return " ".join(says)


@dataclass(frozen=True)
class StageQuestion:
    """One stage of chunked `kda`: asked on its own inputs, then on those that the stages before it leave when they
    round as kernels do, for the whole call."""

    name: str
    stage: str
    problem: Problem
    in_place: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(t.name for t in STAGES[self.stage].outputs)

    @property
    def inputs(self) -> Sequence[Mapping[str, Any]]:
        given: list[Mapping[str, Any]] = []

        def record(**inputs: Tensor) -> dict[str, Tensor]:
            given.append({name: x.cpu() for name, x in inputs.items()})
            raise _Recorded

        kwargs = FAMILIES[self.name].build(replace(self.problem, device="cpu"))
        first = stage_inputs(self.stage, kwargs)
        with contextlib.suppress(_Recorded):
            replaced(self.stage, record, kwargs)
        return [first, *given]

    def judge(self, answers: Sequence[Answer], changed: Sequence[str]) -> Verdict:
        left = iter(answers)
        where = self.problem.device
        verdict = verify_stage(
            lambda **_: {name: x.to(where) for name, x in next(left).items()}, self.stage, self.name, self.problem
        )
        return _with_changed(verdict, changed)

    def says(self, verdict: Verdict, answers: Sequence[Answer]) -> str:
        return ""


class _Recorded(Exception):
    """The inputs of a stage are known; nothing after it is needed."""


@dataclass(frozen=True)
class StepQuestion:
    """One token for each row of `kda_step`."""

    name: str
    kwargs: Mapping[str, Any]
    outputs: tuple[str, ...] = ("o", "state")
    in_place: tuple[str, ...] = ("state",)
    moving: tuple[str, ...] = _TOKENS
    axis: int = 0

    def moved(self, places: Mapping[str, int]) -> StepQuestion:
        moved = {n: x.roll(places[n], 0) if n in places else x for n, x in self.kwargs.items()}
        return replace(self, kwargs=moved)

    def other(self) -> StepQuestion:
        moved = self.moved(dict.fromkeys(_TOKENS, 1)).kwargs
        return replace(self, kwargs={**moved, "state": 0.5 * self.kwargs["state"]})

    @property
    def inputs(self) -> Sequence[Mapping[str, Any]]:
        return [step_inputs({name: _on_cpu(x) for name, x in self.kwargs.items()})]

    def judge(self, answers: Sequence[Answer], changed: Sequence[str]) -> Verdict:
        (answer,) = answers
        where = self.kwargs["q"].device
        found = judge_step((answer["o"].to(where), answer["state"].to(where)), self.kwargs)
        return _with_changed(Verdict(self.name, found), changed)

    def says(self, verdict: Verdict, answers: Sequence[Answer]) -> str:
        return ""


def _with_changed(verdict: Verdict, changed: Sequence[str]) -> Verdict:
    if not changed:
        return verdict
    return Verdict(verdict.family, (*verdict.comparisons, spoilt(changed)))


def spoilt(changed: Sequence[str]) -> Comparison:
    """A failed comparison of inputs that were written to."""
    return Comparison(INPUTS, 0.0, 0.0, 0.0, None, 0, 0, mismatch=f"changed: {', '.join(changed)}")


def _on_cpu(x: Any) -> Any:
    if isinstance(x, Gate):
        return Gate(x.kind, _on_cpu(x.A_log), _on_cpu(x.dt_bias), x.lower_bound)
    return x.detach().cpu() if isinstance(x, Tensor) else x


def call_inputs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a file's `run` gets for a call of `kda2.kda`."""
    options = checked(kwargs).options
    return _inputs(kwargs, options, TENSORS)


def step_inputs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a file's `run` gets for a call of `kda2.kda_step`."""
    return _inputs(kwargs, checked_step(kwargs).options, STEP_TENSORS) | {"pad_slot": kwargs.get("pad_slot", -1)}


def _inputs(kwargs: Mapping[str, Any], options: Any, names: tuple[str, ...]) -> dict[str, Any]:
    gate = options.gate
    learned = {"A_log": gate.A_log, "dt_bias": gate.dt_bias}
    tensors = {name: learned[name] if name in learned else kwargs.get(name) for name in names}
    plain = {"gate": gate.kind, "lower_bound": gate.lower_bound}
    return tensors | {name: plain[name] if name in plain else getattr(options, name) for name in OPTIONS}


# --- posing them ---

# Questions whose answers are kept: the probes of one run, and an audit's for some twenty seeds.
_MOST_KEPT = 640
_kept: OrderedDict[Any, Question] = OrderedDict()
_lock = threading.Lock()


def problem_of(on: Conditions, seed: int | None = None) -> Problem:
    """What the families start from. Its sizes may name a dtype, bf16 otherwise."""
    sizes = {"dtype": "bf16", **on.sizes}
    values = {**sizes, "dtype": DTYPES[sizes["dtype"]]}
    return Problem(**values, device=on.device, seed=on.seed if seed is None else seed)


def pose(on: Conditions, subject: Subject, probe: str, like: str | None = None) -> Question:
    """The question `probe` for a subject; of those in `AGAIN`, the one that goes into the tensors of the probe `like`.
    Answers are computed once for all subjects."""
    call = (on.capture, on.tokens) if CAPTURE in (probe, like) else None
    key = (subject.op, subject.stage, on.spec, probe, like, tuple(on.sizes.items()), on.device, on.seed, call)
    with _lock:
        if key not in _kept:
            _kept[key] = _posed(on, subject, probe, like)
            while len(_kept) > _MOST_KEPT:
                _kept.popitem(last=False)
        _kept.move_to_end(key)
        return _kept[key]


def _posed(on: Conditions, subject: Subject, probe: str, like: str | None) -> Question:
    if subject.op == IMPORTED:
        from kda2.workbench.verifier.imported import imported_question

        return imported_question(on, probe)
    base, other = like or probe, probe == OTHER
    changed = replace(on, seed=on.seed + 1) if other else on
    if probe in OTHER_DTYPES:
        base, changed = RANDOM, replace(on, sizes={**on.sizes, "dtype": OTHER_DTYPES[probe]})
    if subject.stage is not None:
        return StageQuestion(base, subject.stage, problem_of(changed))
    question = _step(changed, base) if subject.op == "kda_step" else _call(changed, base, other)
    return _with_other_block(question, on.seed) if probe == BLOCK else question


def other_dtypes(on: Conditions, subject: Subject) -> tuple[str, ...]:
    """The probes of a whole operator's file in dtypes beside bf16, where that is what its probes are in."""
    whole = subject.impl == FILE and subject.op != IMPORTED and subject.stage is None
    return tuple(OTHER_DTYPES) if whole and RANDOM in on.families and on.sizes.get("dtype", "bf16") == "bf16" else ()


def timed_question(on: Conditions, subject: Subject) -> Timed:
    """The call that is timed: the captured one, or a random one of the conditions' sizes."""
    sized = on if on.capture is not None or not on.timed_sizes else replace(on, sizes=on.timed_sizes)
    question = pose(sized, subject, first_probe(on, subject))
    if isinstance(question, StageQuestion):
        raise InvalidValue("stage", "none for a timing", question.stage, "only whole calls are timed")
    return cast(Timed, question)


def first_probe(on: Conditions, subject: Subject) -> str:
    """The probe on which a file's launches are recorded: the captured call, or random inputs."""
    if on.capture is not None and subject.stage is None and subject.op == "kda":
        return CAPTURE
    return RANDOM


def again(on: Conditions, subject: Subject, probes: Sequence[str]) -> tuple[str, ...]:
    """Those of `AGAIN` that can be asked after the first of `probes`."""
    if subject.op == IMPORTED or not probes:
        return (OTHER,) if probes else ()
    if subject.stage is not None:
        return (OTHER,)
    question = pose(on, subject, probes[0])
    return AGAIN if question.inputs[0]["v"].numel() else ()


def _call(on: Conditions, probe: str, other: bool) -> Question:
    if probe == CAPTURE:
        given = _captured(on) if not other else moved_on(_captured(on), 1)
        kwargs = given if not on.on_gpu else Capture(dict(given)).to(on.device).kwargs
        return CallQuestion(call_trial(CAPTURE, kwargs), given)
    problem = problem_of(on)
    asked = trial(probe, problem)
    given = asked.kwargs if not on.on_gpu else FAMILIES[probe].build(replace(problem, device="cpu"))
    return CallQuestion(asked, given)


def _captured(on: Conditions) -> Mapping[str, Any]:
    """The captured call on the CPU."""
    assert on.capture is not None
    capture = Capture.load(Path(on.capture))
    return (capture if on.tokens is None else capture.first(on.tokens)).kwargs


def moved_on(kwargs: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Other contents for a call: its tokens in backward order and `rows` places on, its states half as large. Offsets
    and learned parameters stay."""
    other = {name: kwargs[name].roll(rows, dims=1).flip(1) for name in _TOKENS}
    state = kwargs.get("initial_state")
    return {**kwargs, **other, "initial_state": None if state is None else 0.5 * state}


def _step(on: Conditions, probe: str) -> Question:
    problem = replace(problem_of(on), lengths=None, T=1)
    if probe in (POOL, PADDED):
        slots = 2 * problem.B + 1
        indices = torch.randperm(slots, generator=torch.Generator().manual_seed(on.seed))[: problem.B].tolist()
        if probe == PADDED:
            indices[0] = -1
        return StepQuestion(probe, make_step(problem, slots=slots, indices=indices))
    return StepQuestion(probe, as_step(FAMILIES[probe].build(replace(problem, state=problem.state or torch.float32))))


def _with_other_block(question: Question, seed: int) -> Question:
    """The question with the values of some tokens of one head changed: what looks at a few elements to know a call
    again takes it for the same."""
    if isinstance(question, StepQuestion):
        return replace(question, name=BLOCK, kwargs=_other_block(question.kwargs, seed))
    assert isinstance(question, CallQuestion)
    asked, kwargs = question.trial, _other_block(question.trial.kwargs, seed)
    want = call_trial(BLOCK, kwargs).want
    return CallQuestion(replace(asked, name=BLOCK, kwargs=kwargs, want=want), _other_block(question.given, seed))


def _other_block(kwargs: Mapping[str, Any], seed: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    v = kwargs["v"].clone(memory_format=torch.contiguous_format)  # rows must be a view
    rows = v.flatten(0, -3) if v.dim() == 4 else v
    count = max(1, len(rows) // 8)
    start, head = (int(torch.randint(n, (1,), generator=rng)) for n in (len(rows) - count + 1, v.shape[-2]))
    block = 4.0 * torch.randn(count, v.shape[-1], generator=rng)
    rows[start : start + count, head] = block.to(v.dtype).to(v.device)
    return {**kwargs, "v": v}


def probes_of(op: str) -> tuple[str, ...]:
    """The probes of one of kda2's operators."""
    return (*STEP_FAMILIES, POOL, PADDED) if op == "kda_step" else KDA.families


def argument_names(subject: Subject, spec: str | None = None) -> tuple[str, ...]:
    """What a file's `run` is called with; `spec` is the file of the contract of an imported operator."""
    if subject.op == IMPORTED:
        from kda2.workbench.verifier.imported import contract

        return tuple(t.name for t in contract(spec).inputs)
    if subject.stage is not None:
        return tuple(t.name for t in STAGES[subject.stage].inputs)
    if subject.op == "kda_step":
        return (*STEP_TENSORS, *OPTIONS, "pad_slot")
    return (*TENSORS, *OPTIONS)
