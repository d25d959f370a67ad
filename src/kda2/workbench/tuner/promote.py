"""Promotion: what a run measured becomes a row of the shipped tables, with its provenance. Nothing else does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda2.errors import InvalidValue, KDA2Error
from kda2.workbench import files
from kda2.workbench import ledger as ledgers
from kda2.workbench.journal import Journal
from kda2.workbench.profiler.environment import checkout, source_hash
from kda2.workbench.records import Candidate


class NotPromoted(KDA2Error, RuntimeError):
    """A run's choice may not enter a table; the message says why."""


@dataclass(frozen=True)
class Promotion:
    """What was written: the candidate, the table, and its rows by stage."""

    candidate: str
    table: Path
    rows: tuple[dict[str, Any], ...]


def promote(ledger: Path, table: Path | None = None) -> Promotion:
    """Write the configurations that the run of `ledger` chose into the op's table, for the run's tuning key.

    The key holds what changes the generated code, so the row serves every call of that key, whatever its tokens and
    heads: what is fastest for a short call may not be for a long one, and only its own call was measured.

    Raises `NotPromoted` unless the chain holds, the choice was measured, the chosen candidate passed L1, L2, L4 and L6
    there, is faster than what ships beyond noise, and the kernels are still those that were measured.
    """
    found = ledgers.verify(ledger)
    if not found.ok:
        raise NotPromoted(f"{ledger} does not hold: {found.problem}")
    journal = Journal.reading(ledger)
    try:
        chosen = _promotable(journal)
        rows = _rows(journal, chosen, found.head)
    except (AttributeError, KeyError, TypeError) as e:
        raise NotPromoted(f"{ledger} does not read as the ledger of a run: {type(e).__name__} {e}") from e
    target = table or _shipped_table(chosen)
    if not rows:
        raise NotPromoted(f"{chosen.name} differs from the shipped configuration in nothing: the table has it already")
    _write(target, rows)
    return Promotion(chosen.name, target, tuple(rows))


def _promotable(journal: Journal) -> Candidate:
    choice, run = journal.choice, journal.run
    if not choice or choice.get("chosen") is None:
        raise NotPromoted("the run chose nothing: only a finished run's choice can be promoted")
    if choice["label"] != "measured":
        raise NotPromoted(f"the choice is {choice['label']}, not measured: run on the GPU that the table is for")
    chosen = journal.candidate(choice["chosen"])
    for stage in ("L1", "L2", "L4", "L6"):
        verdict = journal.verdict(chosen.name, stage)
        outcome = "not run" if verdict is None else verdict.outcome
        if outcome != "pass":
            raise NotPromoted(f"{chosen.name} did not pass {stage}: {outcome}")
    if not chosen.correct or not chosen.parameters or run.get("tuning_key") is None:
        raise NotPromoted(f"{chosen.name} has no configuration that a table could hold")
    if run["environment"]["source"] != source_hash("kda"):
        raise NotPromoted("the kernels or their tables have changed since the run: measure again")
    if chosen.parent is None:
        raise NotPromoted(f"{chosen.name} is what ships: the table has it already")
    return chosen


def _rows(journal: Journal, chosen: Candidate, head: str) -> list[dict[str, Any]]:
    base, run = journal.candidates[chosen.impl].parameters, journal.run
    environment = run["environment"]
    times = {entry["name"]: entry["us"] for entry in journal.choice["ranking"]}
    against = f", against {times[chosen.impl]:g} us as shipped" if chosen.impl in times else ""
    provenance = (
        f"{environment['device']}, torch {environment['torch']}, Triton {environment['triton']}, ledger {head[:12]}: "
        f"{times[chosen.name]:g} us{against}, {run['capture']['tokens']} tokens, {run['capture']['value_heads']} heads"
    )
    return [
        {"stage": stage, "when": run["tuning_key"], "config": dict(config), "provenance": provenance}
        for stage, config in chosen.parameters.items()
        if config != base[stage]
    ]


def _shipped_table(chosen: Candidate) -> Path:
    root = checkout()
    if root is None:
        fix = "kda2 runs from an installed package here, whose tables are not for editing"
        raise InvalidValue("--table", "given outside a checkout of kda2", "nothing", fix)
    return root / "src" / "kda2" / "tables" / chosen.op / f"{chosen.impl}.json"


def _write(table: Path, rows: list[dict[str, Any]]) -> None:
    """Put `rows` before those they come before: the first row that agrees with a key wins. A row for the same key is
    replaced. The file is replaced whole."""
    same = [(row["stage"], row["when"]) for row in rows]
    try:
        old = json.loads(table.read_text(encoding="utf-8"))
        kept = [row for row in old["rows"] if (row["stage"], row["when"]) not in same]
    except (KeyError, OSError, TypeError, ValueError) as e:
        raise InvalidValue("--table", "a table of kda2", f"{table}: {type(e).__name__} {e}") from e
    files.replace_whole(table, _text({**old, "rows": [*rows, *kept]}))


def _text(table: Mapping[str, Any]) -> str:
    """One row a line, as the tables are kept."""
    rows = ",\n".join(f"    {json.dumps(row)}" for row in table["rows"])
    return f'{{\n  "schema": {table["schema"]},\n  "rows": [\n{rows}\n  ]\n}}\n'
