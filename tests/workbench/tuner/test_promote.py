"""Promotion: only what a finished run measured, proved and chose enters a table, and it says where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kda2.contract import KernelConfig
from kda2.dispatch import table as tables
from kda2.errors import InvalidValue
from kda2.workbench.journal import Journal
from kda2.workbench.ledger import LedgerError
from kda2.workbench.profiler.environment import source_hash
from kda2.workbench.records import Candidate, Verdict
from kda2.workbench.tuner import promote
from kda2.workbench.tuner.promote import NotPromoted

KEY = {"K": 128, "V": 128, "precision": "bf16", "anchored": True}
BASE = {"prepare": {"BT": 32, "num_warps": 2, "num_stages": 1}, "state": {"BV": 32, "num_warps": 4, "num_stages": 3}}
BETTER = {**BASE, "state": {"BV": 16, "num_warps": 2, "num_stages": 4}}
CHOSEN = "triton state BV=16 num_warps=2 num_stages=4"


def verdict(stage: str, outcome: str = "pass", **evidence: Any) -> Verdict:
    return Verdict.model_validate({"stage": stage, "outcome": outcome, "evidence": evidence})


def a_run(path: Path, **changes: Any) -> Path:
    """A ledger of a measured run that chose CHOSEN; `changes` are fields of its lines, or of the chosen's L4."""
    journal = Journal(path)
    environment = {"device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "kda2": "0"}
    environment["source"] = changes.get("source", source_hash("kda"))
    capture = {"tokens": 8192, "value_heads": 64}
    journal.note("run", {"op": "kda", "capture": capture, "environment": environment, "tuning_key": KEY})
    common: dict[str, Any] = {"op": "kda", "impl": "triton", "writer": "kda2"}
    journal.propose(Candidate(name="triton", parameters=BASE, **common))
    journal.propose(Candidate(name=CHOSEN, parent="triton", parameters=changes.get("parameters", BETTER), **common))
    for name, us in (("triton", 430.0), (CHOSEN, 402.5)):
        for found in (
            verdict("L1"),
            verdict("L2"),
            verdict("L4", changes.get("L4", "pass") if name == CHOSEN else "pass"),
        ):
            journal.found(name, found)
        if journal.candidate(name).correct:
            journal.found(name, verdict("L6", median_us=us))
    if changes.get("finished", True):
        ranking = [{"name": CHOSEN, "us": 402.5}, {"name": "triton", "us": 430.0}]
        choice = {
            "chosen": changes.get("chosen", CHOSEN),
            "label": changes.get("label", "measured"),
            "ranking": ranking,
        }
        journal.note("choice", choice)
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "triton.json"
    rows = [{"stage": "state", "when": {"precision": "bf16"}, "config": BASE["state"], "provenance": "not tuned"}]
    path.write_text(json.dumps({"schema": 1, "rows": rows}))
    return path


def test_what_was_measured_enters_the_table_with_its_provenance(tmp_path: Path, table: Path) -> None:
    done = promote(a_run(tmp_path / "ledger.jsonl"), table)
    assert (done.candidate, done.table) == (CHOSEN, table)
    first, second = json.loads(table.read_text())["rows"]
    assert (first["stage"], first["when"], first["config"]) == ("state", KEY, BETTER["state"])
    head = Journal(tmp_path / "ledger.jsonl").ledger.head[:12]
    assert first["provenance"] == (
        f"NVIDIA H200, torch 2.11.0, Triton 3.6.0, ledger {head}: 402.5 us, against 430 us as shipped, 8192 tokens, "
        "64 heads"
    )
    assert second["provenance"] == "not tuned"


def test_the_dispatch_finds_the_promoted_row_for_its_key_and_no_other(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(a_run(tmp_path / "ledger.jsonl"), table)
    rows = tuple(json.loads(table.read_text())["rows"])
    monkeypatch.setattr(tables, "rows", lambda op, impl: rows)
    tables._lookup.cache_clear()
    assert tables.lookup("kda", "promoted", "state", KEY) == KernelConfig.from_dict(BETTER["state"])
    assert tables.lookup("kda", "promoted", "state", {**KEY, "K": 64}) == KernelConfig.from_dict(BASE["state"])
    tables._lookup.cache_clear()


def test_promoting_again_replaces_the_row(tmp_path: Path, table: Path) -> None:
    promote(a_run(tmp_path / "a.jsonl"), table)
    other = {**BASE, "state": {"BV": 64, "num_warps": 8, "num_stages": 2}}
    promote(a_run(tmp_path / "b.jsonl", parameters=other), table)
    rows = json.loads(table.read_text())["rows"]
    assert [row["config"] for row in rows] == [other["state"], BASE["state"]]


def test_the_table_keeps_one_row_a_line(tmp_path: Path, table: Path) -> None:
    promote(a_run(tmp_path / "ledger.jsonl"), table)
    assert len(table.read_text().splitlines()) == 7


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"label": "predicted"}, "the choice is predicted, not measured"),
        ({"L4": "fail"}, "did not pass L4: fail"),
        ({"L4": "inconclusive"}, "did not pass L4: inconclusive"),
        ({"L4": "not_run(no CUDA device)"}, "did not pass L4: not_run"),
        ({"finished": False}, "the run chose nothing"),
        ({"chosen": None}, "the run chose nothing"),
        ({"chosen": "triton"}, "triton is what ships"),
        ({"source": "0" * 64}, "the kernels or their tables have changed since the run"),
        ({"parameters": BASE}, "differs from the shipped configuration in nothing"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], why: str, tmp_path: Path, table: Path) -> None:
    before = table.read_bytes()
    with pytest.raises(NotPromoted, match=why):
        promote(a_run(tmp_path / "ledger.jsonl", **changes), table)
    assert table.read_bytes() == before


def test_a_tampered_ledger_is_refused(tmp_path: Path, table: Path) -> None:
    ledger = a_run(tmp_path / "ledger.jsonl")
    ledger.write_bytes(ledger.read_bytes().replace(b"402.5", b"302.5"))
    with pytest.raises(NotPromoted, match="does not hold: line"):
        promote(ledger, table)


@pytest.mark.parametrize("choice", [{"chosen": "x"}, {"chosen": "x", "label": "measured"}, {"chosen": 3}])
def test_a_choice_that_no_run_made(choice: dict[str, Any], tmp_path: Path, table: Path) -> None:
    Journal(tmp_path / "ledger.jsonl").note("choice", choice)
    with pytest.raises(NotPromoted):
        promote(tmp_path / "ledger.jsonl", table)


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"rows": [{}]}', "nonsense"])
def test_a_file_that_is_no_table(text: str, tmp_path: Path, table: Path) -> None:
    table.write_text(text)
    with pytest.raises(InvalidValue, match="--table must be a table of kda2"):
        promote(a_run(tmp_path / "ledger.jsonl"), table)
    assert table.read_text() == text


def test_files_that_are_no_ledger_or_no_table(tmp_path: Path, table: Path) -> None:
    with pytest.raises(LedgerError, match="cannot read"):
        promote(tmp_path / "none.jsonl", table)
    with pytest.raises(InvalidValue, match="--table must be a table of kda2"):
        promote(a_run(tmp_path / "ledger.jsonl"), tmp_path / "none.json")
