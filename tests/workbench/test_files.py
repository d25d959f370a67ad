"""Appending: a line is there whole or not at all."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kda2.workbench import files
from kda2.workbench.files import AppendError


def test_lines_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    files.append_line(path, '{"a": 1}')
    files.append_line(path, '{"é": 2}')
    assert path.read_bytes() == '{"a": 1}\n{"é": 2}\n'.encode()


@pytest.mark.parametrize("stops", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_line_that_is_stopped_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: BaseException
) -> None:
    path = tmp_path / "x.jsonl"
    files.append_line(path, "first")

    def fsync(fd: int) -> None:
        raise stops

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", fsync)
        with pytest.raises((AppendError, KeyboardInterrupt)):
            files.append_line(path, "second")
    assert path.read_text() == "first\n"
    files.append_line(path, "third")
    assert path.read_text() == "first\nthird\n"


def test_half_a_line_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "x.jsonl", os.write
    path.write_text("first\n")
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    with pytest.raises(AppendError, match="only 3 of 7 bytes fitted"):
        files.append_line(path, "second")
    assert path.read_text() == "first\n"


def test_nothing_is_joined_to_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"b"')
    with pytest.raises(AppendError, match=r"the last line of .*x\.jsonl is torn"):
        files.check_appendable(path)
    with pytest.raises(AppendError, match="is torn"):
        files.append_line(path, '{"c": 3}')
    assert path.read_text() == '{"a": 1}\n{"b"'


def test_looking_makes_no_file(tmp_path: Path) -> None:
    files.check_appendable(tmp_path / "x.jsonl")
    assert not list(tmp_path.iterdir())


def test_many_writers_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: files.append_line(path, f"{i:04}" * 500), range(80)))
    assert sorted(path.read_text().splitlines()) == [f"{i:04}" * 500 for i in range(80)]
