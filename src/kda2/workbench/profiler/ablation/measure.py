"""Timing a call as it is, with each stage left out and doubled, with empty kernels, and with half the parallel work."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kda2 import device
from kda2.errors import InvalidValue, KDA2Error
from kda2.ops.kda import spec
from kda2.testing import verify_call
from kda2.testing.oracle import Outputs
from kda2.workbench.capture import Capture
from kda2.workbench.journal import Journal
from kda2.workbench.profiler.ablation.bound import Bound, Floor, Measured, classify
from kda2.workbench.profiler.ablation.intercept import Launched, altered, emptied, record
from kda2.workbench.profiler.ablation.record import KIND, Ablation, Stage, Variant
from kda2.workbench.profiler.environment import machine, utc_now
from kda2.workbench.profiler.timing import Timing, compare, input_sets, interleave

AS_IT_IS, EMPTY, HALF = "as it is", "empty launches", "half the"
SAMPLES = 200
_STAGE_SAMPLES = 60
# Seconds after which a slow variant has samples enough.
_LIMIT_S = 5.0
# The share of a call that its stages must take for one of them to name its bound.
_MOST = 0.5
_BY_TOKEN = ("q", "k", "v", "g", "beta")
Run = Callable[..., Outputs]
Call = Callable[[], Any]
Say = Callable[[str], None]


def ablate(
    run: Run, name: str, capture: Capture, where: torch.device, *, stages: str = "", samples: int = SAMPLES,
    arithmetic: Mapping[str, Floor] | None = None, say: Say = lambda text: None, journal: Journal | None = None,
) -> Ablation:  # fmt: skip
    """Ablate `run`, which takes the arguments of `kda2.kda`, on a call.

    `stages` is a regular expression over kernels' names: those that are left out and doubled. `arithmetic` gives the
    floors of operations that are known of stages. Raises `KDA2Error` if the call is wrong as it is, or a variant broke
    the GPU.
    """
    gpu = device.gpu(where.index or 0) if where.type == "cuda" else None
    with torch.no_grad():
        plain, fewer, what = _bound(run, name, capture, where)
        launched = record(plain[0], gpu.arch if gpu else 0)
        names = list(dict.fromkeys(x.stage for x in launched))
        if not names:
            say("it makes no launches of Triton's: no stage can be left out")
        calls = _variants(plain, _chosen(names, stages))
        calls |= {EMPTY: [emptied(launched, capture.to(where).kwargs["q"])]} if launched else {}
        calls |= {f"{HALF} {what}": fewer} if fewer else {}
        failed = {v: why for v, own in calls.items() if (why := _failure(v, own[0], where))}
        fit = {v: own for v, own in calls.items() if v not in failed}
        timings = interleave(fit, samples, where, limit_s=_LIMIT_S)
        alone = _alone(launched, gpu.sm_count if gpu else 0, where)
    told = _Told(capture, gpu, launched, timings, alone, arithmetic or {})
    bound = told.bound(f"{HALF} {what}")
    done = Ablation(
        utc=utc_now(), name=name, case=capture.case(), samples=samples, variants=_timed(calls, timings, failed),
        stages=tuple(told.stage(n) for n in names), bound=bound.name, evidence=bound.evidence,
        environment=machine(where),
    )  # fmt: skip
    if journal is not None:
        journal.note(KIND, done.model_dump(mode="json", by_alias=True))
    return done


def _bound(run: Run, name: str, capture: Capture, where: torch.device) -> tuple[list[Call], list[Call], str]:
    """The call on each set of inputs, right and warm; the same with half the heads or sequences, and which of them."""
    sets = _copies(capture, where)
    halves = [halved(own) for own in sets]
    plain: list[Call] = [partial(run, **own.kwargs) for own in sets]
    fewer: list[Call] = [partial(run, **half.kwargs) for half, _ in halves if half is not None]
    _check_right(run, name, sets[0])
    for call in (*plain, *fewer):
        call()  # compiles, and tunes what tunes itself
    return plain, fewer, halves[0][1]


def halved(capture: Capture) -> tuple[Capture | None, str]:
    """The call with half the heads, else half the sequences; None if it has one of each."""
    kwargs = capture.kwargs
    H, HV, B = kwargs["q"].shape[2], kwargs["v"].shape[2], kwargs["q"].shape[0]
    if H % 2 == 0:
        gate, state = kwargs["gate"], kwargs.get("initial_state")
        learned = {n: None if x is None else x[: HV // 2] for n, x in _learned(gate).items()}
        cut = {n: kwargs[n][:, :, : kwargs[n].shape[2] // 2].contiguous() for n in _BY_TOKEN}
        cut["initial_state"] = None if state is None else state[:, : HV // 2].contiguous()
        return Capture({**kwargs, **cut, "gate": replace(gate, **learned)}, capture.origin), "heads"
    offsets = kwargs.get("cu_seqlens")
    N = B if offsets is None else offsets.numel() - 1
    if N < 2:
        return None, "heads"
    state = kwargs.get("initial_state")
    rest = {} if state is None else {"initial_state": state[: N // 2].contiguous()}
    if offsets is None:
        return Capture({**kwargs, **rest, **{n: kwargs[n][: N // 2] for n in _BY_TOKEN}}, capture.origin), "sequences"
    end = int(offsets[N // 2])
    tokens = {n: kwargs[n][:, :end] for n in _BY_TOKEN}
    return Capture({**kwargs, **rest, **tokens, "cu_seqlens": offsets[: N // 2 + 1]}, capture.origin), "sequences"


def _learned(gate: Any) -> dict[str, Tensor | None]:
    return {"A_log": gate.A_log, "dt_bias": gate.dt_bias}


def _copies(capture: Capture, where: torch.device) -> list[Capture]:
    """The call in as many copies as let each leave the cache before its next turn."""
    moved = capture.to(where)
    size = sum(x.nbytes for x in moved.kwargs.values() if isinstance(x, Tensor))
    return [
        Capture({n: x.clone() if isinstance(x, Tensor) else x for n, x in moved.kwargs.items()}, capture.origin)
        for _ in range(input_sets(size, where))
    ]


def _check_right(run: Run, name: str, capture: Capture) -> None:
    verdict = verify_call(run, "the call", capture.kwargs)
    if not verdict.ok:
        raise KDA2Error(f"{name} is wrong as it is, so its parts explain nothing: {verdict}; kda2 verify says more")


def _chosen(names: Sequence[str], pattern: str) -> list[str]:
    try:
        chosen = [n for n in names if re.search(pattern, n)]
    except re.error as e:
        raise InvalidValue("--stages", "a regular expression", repr(pattern), str(e)) from e
    if names and not chosen:
        raise InvalidValue("--stages", f"an expression that finds one of {', '.join(names)}", repr(pattern))
    return chosen


def _variants(plain: Sequence[Call], stages: Sequence[str]) -> dict[str, list[Call]]:
    """The calls of each variant, one per set of inputs."""
    calls: dict[str, list[Call]] = {AS_IT_IS: list(plain)}
    for stage in stages:
        calls[f"without {stage}"] = [altered(call, without=stage) for call in plain]
        calls[f"{stage} twice"] = [altered(call, twice=stage) for call in plain]
    return calls


def _failure(variant: str, call: Call, where: torch.device) -> str:
    """Why a variant cannot run, "" if it can."""
    try:
        call()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
    except Exception as e:  # what is left computes with what was never written
        says = (str(e).splitlines() or [""])[0]
        if "CUDA error" in str(e):
            fix = "choose other stages with --stages"
            raise KDA2Error(f"{variant}: it broke the GPU for this process ({says}); {fix}") from e
        return f"{type(e).__name__}: {says}"
    return ""


@dataclass(frozen=True)
class _Alone:
    """A stage by itself: all of its launches, and the largest over cut grids: one program for each multiprocessor, and
    as many as fit at once."""

    largest: Launched
    us: float
    one_us: float | None = None
    more_us: float | None = None
    more: float | None = None


def _alone(launched: Sequence[Launched], sms: int, where: torch.device) -> dict[str, _Alone]:
    """Every stage by itself, on the tensors that it had."""
    groups: dict[str, list[Launched]] = {}
    for x in launched:
        groups.setdefault(x.stage, []).append(x)
    largest = {stage: max(group, key=lambda x: x.programs) for stage, group in groups.items()}
    cuts = {stage: (x.cut(sms), x.cut(sms * (x.resident or 1))) for stage, x in largest.items()}
    calls: dict[str, list[Call]] = {stage: [partial(_again, group)] for stage, group in groups.items()}
    for stage, (one, more) in cuts.items():
        if sms and math.prod(more) > math.prod(one):
            calls |= {f"{stage} one": [partial(largest[stage].over, one)]}
            calls |= {f"{stage} more": [partial(largest[stage].over, more)]}
    us = {name: t.median_us for name, t in interleave(calls, _STAGE_SAMPLES, where, limit_s=_LIMIT_S).items()}
    return {
        stage: _Alone(
            largest[stage], us[stage], us.get(f"{stage} one"), us.get(f"{stage} more"),
            math.prod(cuts[stage][1]) / math.prod(cuts[stage][0]),
        )
        for stage in groups
    }  # fmt: skip


def _again(group: Sequence[Launched]) -> None:
    for x in group:
        x.again()


def _timed(
    calls: Mapping[str, Sequence[Call]], timings: Mapping[str, Timing], failed: Mapping[str, str]
) -> tuple[Variant, ...]:
    base, found = timings[AS_IT_IS], []
    for name in calls:
        wrong = name != AS_IT_IS and not name.startswith(HALF)
        if name in failed:
            found.append(Variant(name=name, wrong=wrong, failed=failed[name]))
            continue
        timing, speed = timings[name], None
        if name != AS_IT_IS:
            ratio = compare(base, timing)
            speed = (round(ratio.low, 4), round(ratio.value, 4), round(ratio.high, 4))
        device_us, host_us = round(timing.median_us, 3), round(timing.median_call_us, 3)
        found.append(Variant(name=name, wrong=wrong, device_us=device_us, host_us=host_us, speed=speed))
    return tuple(found)


class _Told:
    """What the timings say of each stage, and of the call."""

    def __init__(
        self, capture: Capture, gpu: device.Gpu | None, launched: Sequence[Launched], timings: Mapping[str, Timing],
        alone: Mapping[str, _Alone], arithmetic: Mapping[str, Floor],
    ) -> None:  # fmt: skip
        self.gpu, self.launched, self.timings, self.alone = gpu, launched, timings, alone
        self.case, self.arithmetic = capture.case(), arithmetic
        self.ceilings = gpu.ceilings if gpu else None

    def stage(self, name: str) -> Stage:
        """A stage's record."""
        m, own = self.measured(name), [x for x in self.launched if x.stage == name]
        base, bound = self.timings[AS_IT_IS].median_us, classify(m)
        without, twice = (self.timings.get(v) for v in (f"without {name}", f"{name} twice"))
        return Stage(
            name=name, launches=len(own), programs=self.alone[name].largest.programs, resident=m.resident,
            alone_us=round(m.us, 3), saves_us=None if without is None else round(base - without.median_us, 3),
            adds_us=None if twice is None else round(twice.median_us - base, 3), bound=bound.name,
            evidence=bound.evidence,
        )  # fmt: skip

    def measured(self, name: str) -> Measured:
        """A stage by itself."""
        own, alone = [x for x in self.launched if x.stage == name], self.alone[name]
        empty = self.timings.get(EMPTY)
        return Measured(
            us=alone.us, launches=len(own),
            empty_us=None if empty is None else empty.median_us * len(own) / len(self.launched),
            memory=self._memory(sum(x.nbytes for x in own)),
            # a call of one stage does all that the recurrence asks for in it
            arithmetic=self.arithmetic.get(name) or (self._arithmetic() if len(self.alone) == 1 else None),
            programs=alone.largest.programs, resident=alone.largest.resident,
            sms=self.gpu.sm_count if self.gpu else None,
            one_us=alone.one_us, more_us=alone.more_us, more=alone.more,
        )  # fmt: skip

    def bound(self, half: str) -> Bound:
        """The call's: launches if they dominate; else what binds its longest stage; else, where stages are not what
        takes its time, what can be said of the whole."""
        base, fewer, empty = (self.timings.get(v) for v in (AS_IT_IS, half, EMPTY))
        assert base is not None
        whole = Measured(
            us=base.median_us, call_us=base.median_call_us, host_paced=base.host_paced,
            launches=len(self.launched) or None, empty_us=None if empty is None else empty.median_us,
            memory=self._memory(sum(x.nbytes for x in self.launched) or spec.bytes_moved(self.case)),
            arithmetic=self._arithmetic(), half_us=None if fewer is None else fewer.median_us,
        )  # fmt: skip
        found = classify(whole)
        seen = sum(x.us for x in self.alone.values())
        if found.name == "launches" or not self.alone:
            return found
        if seen < _MOST * base.median_us:
            other = f"its stages take {seen:.1f} of {base.median_us:.1f} us by themselves: most is not theirs"
            return Bound(found.name, (other, *found.evidence))
        longest = max(self.alone, key=lambda n: self.alone[n].us)
        its = classify(self.measured(longest))
        share = self.alone[longest].us / seen
        lead = f"{longest} takes {self.alone[longest].us:.1f} us by itself, {share:.0%} of all stages"
        return Bound(its.name, (lead, *its.evidence))

    def _memory(self, nbytes: int) -> Floor | None:
        if self.ceilings is None:
            return None
        rate = self.ceilings.copy_bytes_per_s
        return Floor(nbytes / rate * 1e6, f"{nbytes / 1e6:,.1f} MB at the measured {rate / 1e12:.2f} TB/s")

    def _arithmetic(self) -> Floor | None:
        if self.ceilings is None:
            return None
        flops, rate = spec.flops(self.case), self.ceilings.bf16_flops
        counted = f"the recurrence's {flops / 1e9:,.1f} GFLOP at the measured {rate / 1e12:.0f} TFLOP/s"
        return Floor(flops / rate * 1e6, counted)
