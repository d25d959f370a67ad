"""The ledger: nothing earlier can change unseen, and nothing is lost when writing fails."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from kda2.errors import InvalidValue
from kda2.workbench import ledger as ledgers
from kda2.workbench.ledger import Ledger, LedgerError, LedgerWriteError, verify


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "ledger.jsonl"
    ledger = Ledger(path)
    for i in range(4):
        ledger.append("note", {"name": f"n{i}", "value": 0.1 * i, "nothing": None, "é": [1, 2]})
    return path


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def test_chain_holds_and_continues(path: Path) -> None:
    assert verify(path).lines == 4
    Ledger(path).append("more", {})
    found = verify(path)
    assert found.ok
    assert found.lines == 5
    assert [line.kind for line in ledgers.read(path)] == ["note"] * 4 + ["more"]
    assert [line.seq for line in ledgers.read(path)] == list(range(5))


def test_a_changed_value_is_found(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace('"n1"', '"n9"'))
    found = verify(path)
    assert not found.ok
    assert found.lines == 1
    assert "line 2 was changed" in found.problem


def test_a_resealed_line_breaks_the_next(path: Path) -> None:
    old = lines(path)
    body = json.loads(old[1])
    forged = ledgers.chained(1, body["prev"], body["utc"], "note", {"name": "forged"})
    old[1] = json.dumps(forged.model_dump(mode="json")) + "\n"
    path.write_text("".join(old))
    assert "line 3 does not follow" in verify(path).problem


@pytest.mark.parametrize("drop", [0, 1, 2])
def test_a_dropped_line_is_found(path: Path, drop: int) -> None:
    kept = lines(path)
    del kept[drop]
    path.write_text("".join(kept))
    assert f"line {drop + 1} does not follow" in verify(path).problem


def test_swapped_lines_are_found(path: Path) -> None:
    a, b, *rest = lines(path)
    path.write_text("".join([b, a, *rest]))
    assert not verify(path).ok


def test_a_key_given_twice_is_found(path: Path) -> None:
    """Readers of JSON may take the first or the last: a line has one form only."""
    text = path.read_text()
    path.write_text(text.replace('"payload": {"name": "n2"', '"payload": {"name": "forged"}, "payload": {"name": "n2"'))
    assert "line 3 was changed: it is not written as a ledger writes it" in verify(path).problem


def test_two_writers_do_not_break_the_chain(path: Path) -> None:
    first, second = Ledger(path), Ledger(path)
    first.append("mine", {})
    with pytest.raises(LedgerWriteError, match="another writer"):
        second.append("theirs", {})
    first.append("mine", {})
    assert verify(path) == ledgers.Check(6, first.head)


def test_a_torn_last_line_is_reported_and_kept(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    found = verify(path)
    assert found.lines == 3
    assert "line 4 is torn" in found.problem
    with pytest.raises(LedgerError, match="torn"):
        Ledger(path)
    assert path.read_bytes() == whole[:-30]


def test_what_is_no_json_is_found(path: Path) -> None:
    path.write_text(path.read_text() + "hello\n")
    assert "line 5 is not a ledger line" in verify(path).problem


def test_no_number_that_json_lacks(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        Ledger(path).append("x", {"value": float("nan")})
    assert path.read_bytes() == before


def test_a_full_disk_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, before, write = Ledger(path), path.read_bytes(), os.write

    def half(fd: int, data: bytes) -> int:
        return write(fd, data[: len(data) // 2])

    with monkeypatch.context() as m:
        m.setattr(os, "write", half)
        with pytest.raises(LedgerWriteError, match="its 4 lines stand"):
            ledger.append("lost", {"a": 1})
    assert path.read_bytes() == before
    ledger.append("after", {})
    assert verify(path).lines == 5


def test_an_interruption_leaves_no_line_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, before = Ledger(path), path.read_bytes()

    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.append("lost", {"a": 1})
    assert path.read_bytes() == before
    ledger.append("stopped", {})
    assert verify(path) == ledgers.Check(5, ledger.head)


def test_a_second_writer_waits_for_the_first_and_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, write = Ledger(path), Ledger(path), os.write
    theirs: list[Future[object]] = []

    def slow(fd: int, data: bytes) -> int:
        if not theirs:
            theirs.append(pool.submit(second.append, "theirs", {}))
            time.sleep(0.2)
        return write(fd, data)

    monkeypatch.setattr(os, "write", slow)
    with ThreadPoolExecutor(1) as pool:
        first.append("mine", {})
    with pytest.raises(LedgerWriteError, match="another writer"):
        theirs[0].result()
    assert verify(path) == ledgers.Check(5, first.head)


def test_what_could_not_be_read_back_is_not_written(path: Path) -> None:
    ledger, before = Ledger(path), path.read_bytes()
    with pytest.raises(InvalidValue, match="payload must be JSON that can be read back"):
        ledger.append("note", {"text": "half a pair: \ud800"})
    assert path.read_bytes() == before
    ledger.append("note", {})
    assert verify(path).lines == 5


def test_a_real_full_device() -> None:
    ledger = Ledger.__new__(Ledger)
    ledger.path, ledger.seq, ledger.head, ledger.size = Path("/dev/full"), 0, ledgers.GENESIS, 0
    if not ledger.path.exists():
        pytest.skip("no /dev/full")
    with pytest.raises(LedgerWriteError, match="cannot write /dev/full"):
        ledger.append("x", {})


def test_an_absent_file_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot read"):
        verify(tmp_path / "none.jsonl")
