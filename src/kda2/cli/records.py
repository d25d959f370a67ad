"""`kda2 records`: the page of figures, and whether it and its records are current."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kda2.cli.common import FAILED, command, out
from kda2.errors import InvalidValue
from kda2.workbench import page as pages
from kda2.workbench.profiler.environment import checkout
from kda2.workbench.profiler.suites import GPU_TESTS
from kda2.workbench.testrun import record_tests

app = typer.Typer(no_args_is_help=True, help="Benchmark records and the page made from them.")
Folder = Annotated[Path | None, typer.Option("--folder", help="The benchmarks folder; the checkout's unless given.")]


@app.command()
@command
def page(folder: Folder = None) -> None:
    """Write benchmarks/README.md from benchmarks/records."""
    where = _folder(folder)
    target = where / "README.md"
    target.write_text(pages.page(pages.load(where / "records")), encoding="utf-8")
    out.print(f"wrote {target}")


@app.command()
@command
def check(folder: Folder = None) -> None:
    """Say which ops have stale records; fail if README.md is not what the records give."""
    where = _folder(folder)
    records = pages.load(where / "records")
    stale = pages.stale(records)
    for op, what in stale.items():
        out.print(f"stale records of {op} (its kernels have changed since): {'; '.join(what)}")
    if not stale:
        out.print("no stale records")
    target = where / "README.md"
    if not target.exists() or target.read_text(encoding="utf-8") != pages.page(records):
        out.print(f"{target} is not what its records give; run: kda2 records page")
        raise typer.Exit(FAILED)


@app.command("tests", context_settings={"ignore_unknown_options": True})
@command
def count_tests(
    suite: Annotated[str, typer.Argument(help="What to call the run; its first word is the op: kda-gpu.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments for pytest, e.g. -m gpu tests/ops.")] = None,
    target: Annotated[Path, typer.Option("--out", help="Where gpu-tests.jsonl is appended.")] = Path("."),
) -> None:
    """Run pytest and append what it counted to gpu-tests.jsonl; exit code 1 if a test failed."""
    path = target / GPU_TESTS
    record = record_tests(suite, arguments or [], path)
    out.print(f"{record.passed} passed, {record.failed} failed, {record.skipped} skipped on {record.device}: {path}")
    if record.failed or not record.passed:
        raise typer.Exit(FAILED)


def _folder(given: Path | None) -> Path:
    if given is None:
        root = checkout()
        given = Path("benchmarks") if root is None else root / "benchmarks"
    if not given.is_dir():
        raise InvalidValue("--folder", "the benchmarks folder of a checkout", str(given))
    return given
