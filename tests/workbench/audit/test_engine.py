"""The audit as a whole: what it makes of mutants, of cheats and of the faithful, and that it sees a survivor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kda2.testing.mutants import MUTANTS
from kda2.workbench.audit import engine
from kda2.workbench.audit.catalogue import CHEATS, FAITHFUL, FOLDER, GATES
from kda2.workbench.audit.engine import CLEAR, Options, Row, audit, survivors

SEED = 123_457  # none that a file would guess
CHEAT = {cheat.name: cheat for cheat in CHEATS}
# One for each gate that a CPU shows, two mutants, and one that is faithful.
SHORT = {
    "imports_oracle": "policy", "reads_oracle_source": "imports", "missing_state": "outputs", "gc_search": "numerics",
    "writes_gap": "inputs", "views_of_inputs": "aliasing", "cached_by_fingerprint": "repeat",
    "precision_flags": "tamper", "exits": "process", "forges_pipe": "protocol", "no_delta": "numerics",
    "step: pad_slot_ignored": "numerics", "honest": "",
}  # fmt: skip
Audit = Callable[..., dict[str, Row]]


@pytest.fixture
def audited(tmp_path: Path) -> Audit:
    """The rows of what a regular expression finds, by name."""

    def run(only: str, seeds: int = 1) -> dict[str, Row]:
        heard = list[Row]()
        rows = audit(Options("cpu", only=only, seeds=seeds, seed=SEED), tmp_path, heard.append)
        assert {row.name for row in heard} == {row.name for row in rows} and len(heard) == len(rows)
        return {row.name: row for row in rows}

    return run


def only(*names: str) -> str:
    return f"^({'|'.join(names)})$"


def test_one_for_each_gate(audited: Audit) -> None:
    rows = audited(only(*SHORT))
    assert set(rows) == set(SHORT) and survivors([*rows.values()]) == []
    for name, gate in SHORT.items():
        assert rows[name].expected == gate and (not gate or gate in rows[name].gates), rows[name]
    assert rows["honest"].kind == "faithful" and rows["honest"].on.endswith(" of its limit")
    assert rows["no_delta"].kind == "mutant" and (rows["no_delta"].gates["numerics"] or 99) > CLEAR
    assert rows["cached_by_fingerprint"].on == "one block changed, o"
    assert rows["writes_gap"].seconds > 0


def test_every_gate_of_a_cpu_is_in_the_short_form() -> None:
    assert set(SHORT.values()) - {""} == {c.gate for c in CHEATS if c.needs == "cpu"} <= set(GATES)


@pytest.mark.slow
def test_nothing_survives(audited: Audit) -> None:
    rows = audited("", seeds=2)
    assert survivors([*rows.values()]) == []
    kinds = {kind: [row for row in rows.values() if row.kind == kind] for kind in ("mutant", "cheat", "faithful")}
    assert len([row for row in kinds["mutant"] if row.gates]) == len(kinds["mutant"]) >= 30
    assert {row.name for row in kinds["cheat"]} == set(CHEAT)
    assert {row.name for row in kinds["cheat"] if row.not_run} == {c.name for c in CHEATS if c.needs == "cuda"}
    ran = [row for row in kinds["cheat"] if not row.not_run]
    assert [(row.name, row.gates) for row in ran if row.expected not in row.gates] == []
    assert {"torch", "reference", "step: torch", "step: reference", "honest", "honest_workspace"} <= {
        row.name for row in kinds["faithful"]
    }


# What survives is seen.


def test_a_mutant_that_does_not_show_survives(audited: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = replace(MUTANTS["no_delta"], family="all_empty")
    monkeypatch.setitem(engine.MUTANTS, "no_delta", hidden)
    row = audited(only("no_delta"))["no_delta"]
    assert not row.ok and row.gates == {}


def test_a_mutant_that_raises_is_not_killed(audited: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine.MUTANTS, "unheard_of", MUTANTS["no_delta"])  # its process knows none of that name
    row = audited(only("unheard_of"))["unheard_of"]
    assert not row.ok and row.gates == {} and "KeyError: 'unheard_of'" in row.why


def test_a_faithful_file_that_is_wrong_is_refused(
    audited: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (FOLDER / "honest.py").read_text()
    assert "= scale * torch" in text
    (tmp_path / "unfaithful.py").write_text(text.replace("= scale * torch", "= 1.1 * scale * torch"))
    faithful = replace(FAITHFUL[0], name="unfaithful", file=tmp_path / "unfaithful.py")
    monkeypatch.setattr(engine, "FAITHFUL", (faithful,))
    row = audited(only("unfaithful"))["unfaithful"]
    assert (row.kind, row.ok) == ("faithful", False) and list(row.gates) == ["numerics"]
    assert row.on == f"random, o, seed {SEED}" and "o is 1.1 times what is wanted" in row.why


def test_a_faithful_file_that_ends_is_refused(audited: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    faithful = replace(FAITHFUL[0], name="gone", file=FOLDER / "exits.py")
    monkeypatch.setattr(engine, "FAITHFUL", (faithful,))
    row = audited(only("gone"))["gone"]
    assert not row.ok and list(row.gates) == ["process"] and row.why == "it left with exit code 0"


def test_what_needs_a_gpu_is_not_run(audited: Audit) -> None:
    row = audited(only("other_stream"))["other_stream"]
    assert row.not_run == "it needs a GPU" and row.ok and row.gates == {}


def test_nothing_is_found(audited: Audit) -> None:
    assert audited("^nothing of the kind$") == {}


# What a row comes to.


@pytest.mark.parametrize(
    ("kind", "gates", "ok"),
    [
        ("mutant", {}, False),
        ("mutant", {"numerics": CLEAR}, False),  # luck
        ("mutant", {"numerics": CLEAR + 0.1}, True),
        ("mutant", {"numerics": None}, True),  # no number: NaN, or another shape
        ("cheat", {"tamper": None}, False),  # by another gate than the catalogue names
        ("cheat", {"numerics": 1.2, "repeat": None}, False),
        ("cheat", {"numerics": 9.0, "tamper": None}, True),
        ("faithful", {}, True),
        ("faithful", {"numerics": 1.01}, False),
        ("faithful", {"aliasing": None}, False),
    ],
)
def test_when_a_row_is_well(kind: Any, gates: dict[str, float | None], ok: bool) -> None:
    assert Row("it", kind, "", "numerics", gates).ok is ok


def test_a_row_as_plain_data() -> None:
    plain = Row("it", "cheat", "does.", "tamper", {"tamper": None, "numerics": 4.2}, on="random, o").plain()
    assert plain["gates"] == {"tamper": None, "numerics": 4.2} and plain["ok"] is True
    assert set(plain) == {
        "name", "kind", "says", "expected", "gates", "on", "why", "not_run", "seconds", "ok",
    }  # fmt: skip
