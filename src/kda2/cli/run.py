"""`kda2 run`: the main job, with a live table."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kda2 import device
from kda2.cli.common import FAILED, command, err, out
from kda2.errors import InvalidValue
from kda2.testing import FAMILIES
from kda2.workbench.loop import Options, Outcome
from kda2.workbench.loop import run as run_loop
from kda2.workbench.profiler.environment import new_run
from kda2.workbench.records import STAGES


@command
def run(
    op: Annotated[str, typer.Argument(help="The operator: kda.")],
    inputs: Annotated[Path | None, typer.Option(help="A captured call; the example layer's unless given.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where to write, one folder a run; runs/kda/<run> unless given.")
    ] = None,
    target: Annotated[str, typer.Option(help="Architecture to build for.")] = "sm_90",
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the example's text: 512 unless given.")] = None,
    gate: Annotated[str | None, typer.Option(help="The example's gate: softplus (unless given) or bounded.")] = None,
    families: Annotated[str, typer.Option(help="Regular expression over probe families.")] = "",
    variants: Annotated[bool, typer.Option(help="Also try configurations around the shipped one.")] = True,
    seed: Annotated[int | None, typer.Option(help="Seed of the probe inputs; fresh unless given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON, nothing else.")] = False,
) -> None:
    """Capture, build, verify, inspect, measure where there is a GPU, and name the best implementation."""
    if op != "kda":
        raise InvalidValue("op", "'kda'", repr(op))
    if gate not in (None, "softplus", "bounded"):
        raise InvalidValue("--gate", "softplus or bounded", repr(gate))
    for option, value in (("--tokens", tokens), ("--gate", gate)):
        if inputs is not None and value is not None:
            raise InvalidValue(option, "absent beside --inputs: the captured call has its own", repr(value))
    where = folder or Path("runs") / "kda" / new_run()
    given: dict[str, Any] = {"tokens": tokens, "gate": gate, "seed": seed}
    given = {name: x for name, x in given.items() if x is not None}
    options = Options(where, _arch(target), inputs, families=_families(families), variants=variants, **given)
    try:
        outcome = run_loop(options, lambda *_: None) if as_json else _watched(options)
    except KeyboardInterrupt:
        if (where / "ledger.jsonl").exists():
            err.print(f"what was found stands in {where / 'ledger.jsonl'}", soft_wrap=True)
        raise
    if as_json:
        print(json.dumps(_plain(outcome)))
    else:
        _tell(outcome)
    if not outcome.ok:
        raise typer.Exit(FAILED)


def _families(pattern: str) -> tuple[str, ...]:
    try:
        chosen = tuple(name for name in FAMILIES if re.search(pattern, name))
    except re.error as e:
        raise InvalidValue("--families", "a regular expression", repr(pattern), str(e)) from e
    if not chosen:
        raise InvalidValue("--families", f"an expression that finds one of {', '.join(FAMILIES)}", repr(pattern))
    return chosen


def _watched(options: Options) -> Outcome:
    """Run under a table that follows along."""
    board = _Board()
    with Live(console=out, get_renderable=board.table, refresh_per_second=4):
        return run_loop(options, board)


def _arch(target: str) -> int:
    found = re.fullmatch(r"sm_(\d+)a?", target)
    known = sorted(device.SHARED_MEMORY_LIMIT)
    if found is None or int(found[1]) not in known:
        raise InvalidValue("--target", f"one of {', '.join(f'sm_{a}' for a in known)}", repr(target))
    return int(found[1])


class _Board:
    """Candidates down, stages across; told of progress from several threads."""

    def __init__(self) -> None:
        self.cells: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()

    def __call__(self, candidate: str, stage: str, text: str) -> None:
        with self._lock:
            self.cells.setdefault(candidate, {})[stage] = text
        if not out.is_terminal and text in ("pass", "fail", "invalid", "inconclusive"):
            out.print(f"{candidate}: {stage} {STAGES[stage]}: {text}", highlight=False)  # a log has no live table

    def table(self) -> Table | str:
        if not self.cells:
            return ""  # the run may still refuse its arguments
        table = Table(title="KDA: candidates through the ladder")
        table.add_column("candidate")
        for stage, meaning in STAGES.items():
            table.add_column(f"{stage}\n[dim]{meaning.split(',')[0].split(' and ')[0]}[/dim]", justify="center")
        with self._lock:
            for name, cells in self.cells.items():
                table.add_row(name, *(_styled(cells.get(stage, "")) for stage in STAGES))
        return table


def _styled(text: str) -> str:
    if text.startswith("not_run"):
        return "[dim]not run[/dim]"
    colour = {"pass": "green", "fail": "red", "invalid": "red", "inconclusive": "yellow"}.get(text)
    return f"[{colour}]{text}[/{colour}]" if colour else escape(text)


def _tell(outcome: Outcome) -> None:
    for candidate in outcome.candidates:
        for verdict in candidate.verdicts:
            if verdict.refuted:
                out.print(
                    f"[red]{escape(candidate.name)} {verdict.stage} {verdict.outcome}[/red]: {_why(verdict.evidence)}"
                )
    unit = "us" if outcome.label == "measured" else "us by the model"
    out.print()
    for row in outcome.ranking:
        paced = ", paced by the host" if row.get("host_paced") else ""
        out.print(f"  {row['us']:10.2f} {unit}  {escape(row['name'])}{paced}", highlight=False)
    out.print(f"[bold]{outcome.label} best: {outcome.chosen or 'none'}[/bold]")
    out.print(f"  by the rule: {outcome.rule}", highlight=False)
    out.print(f"report {outcome.report}\nledger {outcome.ledger}", highlight=False, soft_wrap=True)


def _why(evidence: dict[str, Any]) -> str:
    """The first thing that the evidence of a failed stage names."""
    failed = [
        f"{name}: {q['says']}"
        for name, family in evidence.get("families", {}).items()
        for q in family["quantities"].values()
        if not q["ok"]
    ]
    checks = [
        f"{name}: {c['observed']}, wants {c['expected']}"
        for name, c in evidence.get("checks", {}).items()
        if not c["ok"]
    ]
    found = [*failed, *checks, *evidence.get("failures", {}).values(), evidence.get("ended", "")]
    return escape(next((text for text in found if text), "see the report"))


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "chosen": outcome.chosen,
        "label": outcome.label,
        "ranking": outcome.ranking,
        "verdicts": {c.name: {v.stage: v.outcome for v in c.verdicts} for c in outcome.candidates},
        "ledger": str(outcome.ledger),
        "report": str(outcome.report),
    }
