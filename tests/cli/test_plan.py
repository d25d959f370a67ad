"""`kda2 plan`: what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kda2.cli.plan import plan
from kda2.workbench.blockplan import BlockPlan

app = typer.Typer()
app.command()(plan)
runner = CliRunner()


def test_it_prints_the_book() -> None:
    result = runner.invoke(app, ["kda", "--problem", "H=96", "--sms", "78"])
    assert result.exit_code == 0, result.output
    assert "kda on H20: specification book" in result.output
    assert "1 x 96 x 2 = 192 CTAs on 78 SMs; one an SM: 3 waves" in " ".join(result.output.split())


def test_json_alone(tmp_path: Path) -> None:
    result = runner.invoke(app, ["kda", "--json", "--problem", "T=100,H=2", "--out", str(tmp_path / "new" / "plan")])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["op"] == "kda" and document["sizes"]["NT"] == 2
    assert (tmp_path / "new" / "plan" / "plan.json").read_text() == result.stdout
    assert BlockPlan.from_line(result.stdout).target == "sm_90"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gla"], "op must be 'kda', got 'gla'"),
        (["kda", "--problem", "T=x"], "T must be a whole number, got 'x'"),
        (["kda", "--target", "sm_1"], "target must be one of sm_80"),
        (["kda", "--gpu", "B300"], "gpu must be one of"),
        (["kda", "--sms", "0"], "sms must be at least 1"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1 and not result.stdout


def test_an_architecture_without_a_part() -> None:
    result = runner.invoke(app, ["kda", "--target", "sm_100"])
    assert result.exit_code == 1 and "no part of sm_100 is known" in result.stderr
