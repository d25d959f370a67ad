"""The end of a run: which candidate is chosen, and by which rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kda2.workbench import predict
from kda2.workbench.candidates import TRITON
from kda2.workbench.judge import Judge
from kda2.workbench.profiler.timing import Timing, compare
from kda2.workbench.standings import Standings

# Candidates that a measured choice times once more, beside what ships.
FINALISTS = 4


@dataclass(frozen=True)
class Choice:
    """The candidate chosen (None if none is correct), the rule, and the order of those that have a time."""

    chosen: str | None
    rule: str
    ranking: list[dict[str, Any]]


def make(standings: Standings, judge: Judge) -> Choice:
    """By measurement where times are measured, else by the model."""
    contenders = [name for name in standings.tried if standings.contends(name)]
    if standings.measures and contenders:
        return _by_final_heat(standings, judge, contenders)
    return _by_model(standings, contenders)


def _by_final_heat(standings: Standings, judge: Judge, contenders: Sequence[str]) -> Choice:
    """The fastest of the few best, timed once more in one run; what ships unless it is slower beyond noise."""
    baseline, times = standings.baseline(contenders), {n: standings.score(n) for n in contenders}
    order = sorted(contenders, key=lambda n: times[n] or float("inf"))
    heat = list(dict.fromkeys([baseline, *order[:FINALISTS]]))
    timings = judge.again(heat, baseline)
    earlier = [{"name": n, "us": us, "earlier": True} for n in order if n not in timings and (us := times[n])]
    if not timings:
        lead = standings.lead()
        rule = "the leader of the earlier heats: the last one, of the best few, could not be timed"
        return Choice(lead and lead[0], rule, earlier)
    rule = (
        f"lowest median of the {len(heat)} best, timed once more turn by turn; the shipped one unless another is "
        "faster beyond noise"
    )
    ranking = sorted((_ranked(n, t) for n, t in timings.items()), key=lambda entry: entry["us"])
    return Choice(_fastest(timings, baseline), rule, [*ranking, *earlier])


def _fastest(timings: Mapping[str, Timing], baseline: str) -> str:
    """The fastest; the baseline where the fastest is not faster than it beyond noise."""
    best = min(timings, key=lambda name: timings[name].median_us)
    if baseline in timings and compare(timings[baseline], timings[best]).verdict != "faster":
        return baseline
    return best


def _ranked(name: str, timing: Timing) -> dict[str, Any]:
    paced = {"host_paced": True} if timing.host_paced else {}
    return {"name": name, "us": round(timing.median_us, 3), **paced}


def _by_model(standings: Standings, contenders: Sequence[str]) -> Choice:
    times = {n: us for n in contenders if (us := standings.modelled(n)) is not None}
    ranking = [{"name": n, "us": us} for n, us in sorted(times.items(), key=lambda x: x[1])]
    chosen = predict.best(times, TRITON)
    if chosen is not None:
        others = [n for n in contenders if n not in times]
        beside = f"; correct, and not ranked as the model knows them not: {', '.join(others)}" if others else ""
        return Choice(chosen, predict.RULE + beside, ranking)
    correct = [n for n in standings.tried if standings.correct(n)]
    if not correct:
        return Choice(None, "no candidate is correct", ranking)
    modelled = any(standings.modelled(n) is not None for n in standings.tried)
    why = "as none of the modelled kernels is" if modelled else "as no kernel could be modelled"
    return Choice(correct[0], f"the first implementation that is correct, {why}", ranking)
