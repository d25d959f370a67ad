"""What a ledger's line says, in one sentence for somebody who was not there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kda2.workbench.records import STAGES, LedgerLine, Verdict
from kda2.workbench.verifier.words import reasons

# Characters of a line whose kind is not known.
_MOST = 200


def gist(line: LedgerLine) -> str:
    """The line in one sentence."""
    tell = _TELL.get(line.kind, _other)
    try:
        return tell(line.payload)
    except (KeyError, TypeError, ValueError):  # a line as another version wrote it
        return _other(line.payload)


def _other(p: Mapping[str, Any]) -> str:
    text = json.dumps(dict(p), ensure_ascii=False)
    return text if len(text) <= _MOST else f"{text[:_MOST]} ..."


def _run(p: Mapping[str, Any]) -> str:
    e, c = p["environment"], p["capture"]
    call = ""
    if isinstance(c, dict):
        call = f", {c['tokens']} tokens, {c['value_heads']} heads, {c['dtype']}, gate {c['gate']}"
    return f"{p['op']} for sm_{p['arch']} on {e['device']}, seed {p['seed']}{call}"


def _resumed(p: Mapping[str, Any]) -> str:
    torn = p.get("torn_bytes_set_aside")
    aside = f"; {torn} bytes of an unfinished line were set aside" if torn else ""
    return f"goes on after {p['lines']} lines{aside}"


def _plan(p: Mapping[str, Any]) -> str:
    return str(p.get("says", ""))


def _candidate(p: Mapping[str, Any]) -> str:
    why = f": {p['hypothesis']}" if p.get("hypothesis") else ""
    expected = p.get("expected")
    shows = f"; {expected['metric']} should be {expected['change']}" if expected else ""
    return f"{p['name']}, by {p['writer']}{why}{shows}"


def _verdict(p: Mapping[str, Any]) -> str:
    v = Verdict.model_validate(p["verdict"])
    outcome = v.outcome.partition("(")[0].replace("_", " ")
    why = "" if v.passed else f": {reasons(v)[0]}"
    return f"{p['candidate']}  {v.stage} {STAGES[v.stage]}  {outcome}{why}"


def _judged(p: Mapping[str, Any]) -> str:
    us = f", {p['latency_us']:g} us" if p.get("latency_us") else ""
    found = {True: "correct", False: "wrong", None: "neither shown to be correct nor wrong"}[p["correct"]]
    return f"{p['name']}  {found}{us}"


def _round(p: Mapping[str, Any]) -> str:
    return str(p["says"])


def _choice(p: Mapping[str, Any]) -> str:
    why = f"; stopped: {p['why']}; {p['cost']}" if "why" in p else ""
    return f"{p['label']} best: {p['chosen'] or 'none'}, by the rule: {p['rule']}{why}"


def _stopped(p: Mapping[str, Any]) -> str:
    best = f"; best so far {p['best']}, {p['best_us']:g} us {p['label']}" if p.get("best") else ""
    return f"{p['reason']} {p['says']}".strip() + best


def _growth(p: Mapping[str, Any]) -> str:
    laws = (f"{c['gate']} {name} {f['law']}" for c in p["curves"] for name, f in c["fits"].items())
    return f"{p['name']}, {p['dtype']}: {'; '.join(laws)}"


def _ablation(p: Mapping[str, Any]) -> str:
    return f"{p['name']} is bound by {p['bound']} ({p['label']}: its times rank nothing)"


def _audit(p: Mapping[str, Any]) -> str:
    if p["not_run"]:
        return f"{p['kind']} {p['name']}: not run, {p['not_run']}"
    how = f"refused by {', '.join(p['gates'])}" if p["gates"] else "passes"
    return f"{p['kind']} {p['name']} {how}{'' if p['ok'] else ', and should not'}"


def _audited(p: Mapping[str, Any]) -> str:
    failed = f"; {', '.join(p['failed'])} came out wrong" if p["failed"] else ""
    wrong = f"{p['refused']} of {p['wrong']} wrong kernels refused"
    return f"{wrong}, {p['passed']} of {p['faithful']} faithful ones passed{failed}"


_TELL = {
    "run": _run, "resumed": _resumed, "plan": _plan, "candidate": _candidate, "verdict": _verdict, "judged": _judged,
    "round": _round, "choice": _choice, "stopped": _stopped,
    "growth": _growth, "ablation": _ablation, "audit": _audit, "audited": _audited,
}  # fmt: skip
