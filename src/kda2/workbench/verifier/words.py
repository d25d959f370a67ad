"""Verdicts in words: what the evidence of a stage names, the first thing first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kda2.workbench.records import Verdict

# Of a probe: quantities told in full, and probes named before the rest are counted.
_QUANTITIES, _NAMES = 2, 4
_FRONT_END = re.compile(r"(?P<error>\w+): at (?P<line>\d+):\d+:\n(?P<rest>.*)", re.DOTALL)
# A compiler's words can fill pages; the ledger has them all.
_LONGEST = 1500


def reasons(verdict: Verdict) -> list[str]:
    """Why a stage did not pass, one sentence each; never empty. How a process ended comes first, then checks, then
    probes, those that failed in the same words together."""
    if verdict.outcome.startswith("not_run"):
        return [verdict.outcome.removeprefix("not_run(").removesuffix(")")]
    return [_shortened(why) for why in _reasons(verdict)] or ["see its evidence"]


def margins(verdicts: Iterable[Verdict]) -> list[str]:
    """The largest error of each quantity over its limit, one sentence each: how much room a kernel has, or how far it
    is off."""
    worst: dict[str, tuple[float, str, str]] = {}
    for verdict in verdicts:
        for family, result in verdict.evidence.get("families", {}).items():
            for name, q in result["quantities"].items():
                if (margin := q.get("margin")) is not None and margin >= worst.get(name, (-1.0,))[0]:
                    worst[name] = (margin, family, verdict.stage)
    return [f"{stage} {name}: {margin:.2f} of its limit at most, on {family}"
            for name, (margin, family, stage) in worst.items()]  # fmt: skip


def _reasons(verdict: Verdict) -> Iterator[str]:
    evidence = verdict.evidence
    if "ended" in evidence:
        yield str(evidence["ended"])
    yield from (f"{stage}: {says}" for stage, says in evidence.get("failures", {}).items())  # of older ledgers
    yield from evidence.get("not_powers_of_two", ())
    for name, c in evidence.get("checks", {}).items():
        if not c["ok"]:
            wanted = f", wants {c['expected']}" if c["expected"] else ""
            hint = f"; {c['hint']}" if c["hint"] else ""
            yield f"{name}: {_compiler(c['observed'])}{wanted}{hint}"
    alike: dict[str, list[str]] = {}
    for name, result in evidence.get("families", {}).items():
        if not result["ok"]:
            alike.setdefault(_probe(result), []).append(name)
    for says, names in alike.items():
        yield f"{_listed(names)}: {says}"


def _probe(result: Mapping[str, Any]) -> str:
    """What went wrong on one probe."""
    if says := result.get("says"):
        return str(says)
    wrong = {name: str(q["says"]) for name, q in result["quantities"].items() if not q["ok"]}
    told, rest = list(wrong.values())[:_QUANTITIES], list(wrong)[_QUANTITIES:]
    after = f"; off too: {', '.join(rest)}" if rest else ""
    probes = f" (the probe: {result['probes']})" if result.get("probes") else ""
    return "; ".join(told) + after + probes


def _compiler(observed: str) -> str:
    """What Triton's front end says, without the kernel's text above the line that it stumbled over."""
    found = _FRONT_END.search(observed)
    if found is None:
        return observed.partition("Repro command:")[0].strip()
    source, _, says = found["rest"].rpartition("^\n")
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    code = f" `{lines[-1]}`" if lines else ""
    return f"{found['error']} at line {found['line']} of the kernel,{code}: {says}"


def _listed(names: list[str]) -> str:
    if len(names) <= _NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _NAMES - 1])} and {len(names) - _NAMES + 1} more"


def _shortened(why: str) -> str:
    words = " ".join(why.split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ..."
