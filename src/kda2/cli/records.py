"""`kda2 records`: the page of figures, and whether it and its records are current."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kda2.cli.common import FAILED, Json, command, out
from kda2.errors import InvalidValue
from kda2.workbench import page as pages
from kda2.workbench.profiler.environment import checkout
from kda2.workbench.profiler.suites import GPU_TESTS
from kda2.workbench.testrun import record_tests

app = typer.Typer(no_args_is_help=True, help="Benchmark records and the page made from them.")
Folder = Annotated[Path | None, typer.Option("--folder", help="The benchmarks folder; the checkout's unless given.")]


@app.command()
@command
def page(folder: Folder = None, as_json: Json = False) -> None:
    """Write benchmarks/README.md from benchmarks/records."""
    where = _folder(folder)
    target = where / "README.md"
    target.write_text(pages.page(pages.load(where / "records")), encoding="utf-8")
    _print({"page": str(target)}, as_json, f"wrote {target}")


@app.command()
@command
def check(folder: Folder = None, as_json: Json = False) -> None:
    """Say which ops have stale records; fail if README.md is not what the records give."""
    where = _folder(folder)
    records = pages.load(where / "records")
    stale = pages.stale(records)
    target = where / "README.md"
    current = target.exists() and target.read_text(encoding="utf-8") == pages.page(records)
    words = [f"stale records of {op} (its kernels have changed since): {'; '.join(what)}" for op, what in stale.items()]
    words = words or ["no stale records"]
    if not current:
        words.append(f"{target} is not what its records give; run: kda2 records page")
    _print({"stale": stale, "page_is_current": current}, as_json, *words)
    if not current:
        raise typer.Exit(FAILED)


@app.command("tests", context_settings={"ignore_unknown_options": True})
@command
def count_tests(
    suite: Annotated[str, typer.Argument(help="What to call the run; its first word is the op: kda-gpu.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments for pytest, e.g. -m gpu tests/ops.")] = None,
    target: Annotated[Path, typer.Option("--out", help="Where gpu-tests.jsonl is appended.")] = Path("."),
    as_json: Json = False,
) -> None:
    """Run pytest and append what it counted to gpu-tests.jsonl; exit code 1 if a test failed."""
    path = target / GPU_TESTS
    record = record_tests(suite, arguments or [], path, quiet=as_json)
    counts = f"{record.passed} passed, {record.failed} failed, {record.skipped} skipped on {record.device}: {path}"
    _print(json.loads(record.line()), as_json, counts)
    if record.failed or not record.passed:
        raise typer.Exit(FAILED)


def _print(document: dict[str, Any], as_json: bool, *words: str) -> None:
    if as_json:
        print(json.dumps(document))
        return
    for text in words:
        out.print(text)


def _folder(given: Path | None) -> Path:
    if given is None:
        root = checkout()
        given = Path("benchmarks") if root is None else root / "benchmarks"
    if not given.is_dir():
        raise InvalidValue("--folder", "the benchmarks folder of a checkout", str(given))
    return given
