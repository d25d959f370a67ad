"""`kda2 run`: the main job, with a live table."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kda2.cli.common import FAILED, Json, check_op, command, err, families_of, out, seconds
from kda2.errors import InvalidValue
from kda2.workbench.loop import ROUNDS, Options, Outcome
from kda2.workbench.loop import run as run_loop
from kda2.workbench.parts import arch_of
from kda2.workbench.profiler.environment import new_run
from kda2.workbench.records import STAGES
from kda2.workbench.verifier.words import reasons


@command
def run(
    op: Annotated[str, typer.Argument(help="The operator: kda.")],
    inputs: Annotated[Path | None, typer.Option(help="A captured call; the example layer's unless given.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write; runs/kda/<run> unless given. An interrupted run there is resumed."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the newest interrupted run under runs/kda.")] = False,
    target: Annotated[str, typer.Option(help="Architecture to build for.")] = "sm_90",
    rounds: Annotated[
        int | None, typer.Option(min=0, help="Rounds of improvement at most: 3 unless given, or what --budget allows.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Time for the run, such as 90s, 10m or 1h.")] = None,
    kernel: Annotated[list[Path] | None, typer.Option(help="A file of your own, judged too; may be repeated.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the example's text: 512 unless given.")] = None,
    gate: Annotated[str | None, typer.Option(help="The example's gate: softplus (unless given) or bounded.")] = None,
    families: Annotated[str, typer.Option(help="Regular expression over probe families.")] = "",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds of silence after which one is given up.")] = 600,
    seed: Annotated[int | None, typer.Option(help="Seed of the probes and of the search; fresh unless given.")] = None,
    as_json: Json = False,
) -> None:
    """Judge what ships, improve on it in rounds of plan, write, verify and tune, and name the best."""
    check_op(op)
    if gate not in (None, "softplus", "bounded"):
        raise InvalidValue("--gate", "softplus or bounded", repr(gate))
    for option, value in (("--tokens", tokens), ("--gate", gate)):
        if inputs is not None and value is not None:
            raise InvalidValue(option, "absent beside --inputs: the captured call has its own", repr(value))
    budget_s = None if budget is None else seconds(budget)
    where = _folder(folder, resume)
    given: dict[str, Any] = {"tokens": tokens, "gate": gate}
    options = Options(
        where, arch_of(target), inputs, families=families_of(families), seed=seed, budget_s=budget_s,
        rounds=ROUNDS if rounds is None and budget is None else rounds, kernels=tuple(kernel or ()), timeout_s=timeout,
        **{name: x for name, x in given.items() if x is not None},
    )  # fmt: skip
    try:
        outcome = run_loop(options, lambda *_: None) if as_json else _watched(options)
    except KeyboardInterrupt:
        if (where / "ledger.jsonl").exists():
            err.print(f"what was found stands in {where / 'ledger.jsonl'}; to go on: --out {where}", soft_wrap=True)
        raise
    if as_json:
        print(json.dumps(_plain(outcome)))
    else:
        _tell(outcome)
    if not outcome.ok:
        raise typer.Exit(FAILED)


RUNS = Path("runs") / "kda"


def _folder(given: Path | None, resume: bool) -> Path:
    """The folder to write to: the one given, a new one, or that of the newest run that was ended."""
    if not resume:
        return given or RUNS / new_run()
    if given is not None:
        raise InvalidValue("--resume", "absent beside --out: an interrupted run there is resumed", "both")
    ended = [f.parent for f in sorted(RUNS.glob("*/ledger.jsonl")) if not _finished(f)]
    if not ended:
        raise InvalidValue("--resume", "given where a run was interrupted", f"no such run in {RUNS}")
    return ended[-1]


def _finished(ledger: Path) -> bool:
    return any(line.startswith(b'{"') and b'"kind": "choice"' in line for line in ledger.read_bytes().splitlines()[-1:])


def _watched(options: Options) -> Outcome:
    """Run under a table that follows along."""
    board = _Board()
    with Live(console=out, get_renderable=board.table, refresh_per_second=4):
        return run_loop(options, board)


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
                table.add_row(name, *(styled(cells.get(stage, "")) for stage in STAGES))
        return table


def styled(text: str) -> str:
    if text.startswith("not_run"):
        return "[dim]not run[/dim]"
    colour = {"pass": "green", "fail": "red", "invalid": "red", "inconclusive": "yellow"}.get(text)
    return f"[{colour}]{text}[/{colour}]" if colour else escape(text)


def _tell(outcome: Outcome) -> None:
    for candidate in outcome.candidates:
        for verdict in candidate.verdicts:
            if verdict.refuted:
                why = escape(reasons(verdict)[0])
                out.print(f"[red]{escape(candidate.name)} {verdict.stage} {verdict.outcome}[/red]: {why}")
    for round_ in outcome.rounds:
        out.print(escape(round_.says), highlight=False)
    unit = "us" if outcome.label == "measured" else "us by the model"
    out.print()
    for row in outcome.ranking:
        paced = ", paced by the host" if row.get("host_paced") else ""
        out.print(f"  {row['us']:10.2f} {unit}  {escape(row['name'])}{paced}", highlight=False)
    out.print(f"[bold]{outcome.label} best: {outcome.chosen or 'none'}[/bold]")
    out.print(f"  by the rule: {outcome.rule}", highlight=False)
    out.print(f"report {outcome.report}\nledger {outcome.ledger}", highlight=False, soft_wrap=True)


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "chosen": outcome.chosen,
        "label": outcome.label,
        "rule": outcome.rule,
        "ranking": outcome.ranking,
        "rounds": [r.plain() for r in outcome.rounds],
        "stopped_by": outcome.stopped_by,
        "verdicts": {c.name: {v.stage: v.outcome for v in c.verdicts} for c in outcome.candidates},
        "ledger": str(outcome.ledger),
        "report": str(outcome.report),
    }
