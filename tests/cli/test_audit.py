"""`kda2 audit` as a user meets it: lines, a matrix, one JSON document, exit codes, a ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kda2.cli.app import app
from kda2.workbench import ledger
from kda2.workbench.audit import engine
from kda2.workbench.audit.catalogue import FOLDER, Cheat
from kda2.workbench.verifier import timed

runner = CliRunner()
SEED = ("--seed", "123457", "--seeds", "1")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_json_is_one_document_and_the_ledger_holds_its_rows(tmp_path: Path) -> None:
    done = runner.invoke(app, ["audit", "--cpu", "--only", "^(no_delta|wrong_dtype|torch|other_stream)$", *SEED,
                               "--out", "here", "--json"])  # fmt: skip
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["ok"], told["refused"], told["wrong"], told["passed"], told["faithful"]) == (True, 2, 2, 1, 1)
    assert told["not_run"] == ["other_stream"] and told["failed"] == [] and told["ledger"] == "here/ledger.jsonl"
    assert [row["name"] for row in told["rows"]] == ["torch", "wrong_dtype", "other_stream", "no_delta"]
    lines = list(ledger.read(tmp_path / "here" / "ledger.jsonl"))
    assert [line.kind for line in lines] == ["run", *["audit"] * 4, "audited"]
    assert lines[0].payload["seed"] == 123457 and "environment" in lines[0].payload
    written = {line.payload["name"]: line.payload for line in lines[1:-1]}
    assert written["wrong_dtype"]["gates"] == {"outputs": None} and written["torch"]["kind"] == "faithful"
    assert written == {row["name"]: row for row in told["rows"]}
    assert lines[-1].payload["ok"] is True and lines[-1].payload["refused"] == 2


def test_a_survivor_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cheat = Cheat("new_trick", FOLDER / "honest.py", "Does [what] it should.", "numerics", "cpu", "Nowhere.")
    monkeypatch.setattr(engine, "CHEATS", (cheat,))
    monkeypatch.setattr(timed, "_BURST_OVERHEAD_US", 1e6)  # other tests may keep this machine's cores busy
    done = runner.invoke(app, ["audit", "--cpu", "--only", "^(new_trick|no_delta)$", *SEED])
    assert done.exit_code == 1
    words = " ".join(done.stdout.split())
    assert "which gate refused which" in words and " numerics " in words and "ledger runs/audit/" in words
    assert words.count("SURVIVES") == 1 and "1 of 2 wrong kernels refused, 0 of 0 faithful ones passed" in words
    assert "new_trick is not refused, or not clearly (Does [what] it should.)" in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--only", "("], "kda2: --only must be a regular expression, got '('"),
        (["--only", "^nothing of the kind$"], "kda2: --only must be an expression that finds a mutant, a cheat or "),
        (["--seed", "-1"], "kda2: --seed must be "),
        (["--seeds", "0"], ""),
        (["--workers", "0"], ""),
    ],
)
def test_bad_usage_is_2(tmp_path: Path, args: list[str], says: str) -> None:
    done = runner.invoke(app, ["audit", "--cpu", *args])
    assert (done.exit_code, done.stdout) == (2, "") and says in done.stderr
    assert not list(tmp_path.glob("runs/audit/*/ledger.jsonl"))
