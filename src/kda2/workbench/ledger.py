"""The ledger: what was tried and what was found, one hash-chained JSON line each, only ever appended.

A line's hash covers the hash of the line before it, so nothing earlier can be changed, dropped or inserted without
every later line showing it. A line is written with one call under a lock and synced: a crash leaves at most one torn
line, the last, which is reported and never silently dropped; opening such a ledger to append refuses until it has been
looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kda2.errors import InvalidValue, KDA2Error
from kda2.workbench import files
from kda2.workbench.profiler.environment import utc_now
from kda2.workbench.records import LedgerLine

GENESIS = "0" * 64


class LedgerError(KDA2Error, RuntimeError):
    """A ledger cannot be read as an unbroken chain."""


class LedgerWriteError(KDA2Error, OSError):
    """A line could not be written (full disk, no permission); every earlier line stands."""


@dataclass(frozen=True)
class Check:
    """What `verify` found: how many lines hold, the hash of the last of them, and the first thing wrong ("" if
    nothing)."""

    lines: int
    head: str
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem


def chained(seq: int, prev: str, utc: str, kind: str, payload: Mapping[str, Any]) -> LedgerLine:
    """The line with these contents and the hash that seals them. The payload must be JSON without NaN or infinity."""
    plain = json.loads(json.dumps(dict(payload), allow_nan=False))
    body = {"schema": 1, "seq": seq, "prev": prev, "utc": utc, "kind": kind, "payload": plain}
    return LedgerLine.model_validate({**body, "hash": _hash(body)})


def _hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _bytes(line: LedgerLine) -> bytes:
    """The one way to write a line."""
    return (json.dumps(line.model_dump(mode="json")) + "\n").encode()


class Ledger:
    """A ledger open for appending. A new file starts a new chain; an existing one is verified and continued."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        found = verify(path) if path.exists() else Check(0, GENESIS)
        if not found.ok:
            raise LedgerError(f"{path} cannot be continued: {found.problem}; keep it and start another file")
        self.seq, self.head = found.lines, found.head
        self.size = path.stat().st_size if path.exists() else 0

    def append(self, kind: str, payload: BaseModel | Mapping[str, Any]) -> LedgerLine:
        """Write one line and wait until the disk has it. Raises `LedgerWriteError`; then the file is as it was, as it
        is after any other exception."""
        plain = payload.model_dump(mode="json") if isinstance(payload, BaseModel) else payload
        line = chained(self.seq, self.head, utc_now(), kind, plain)
        data = _bytes(line)
        _check_readable(data)
        try:
            with files.opened(self.path) as fd:
                if os.fstat(fd).st_size != self.size:
                    raise files.AppendError(f"{self.path} was changed by another writer; write to another file")
                files.write_whole(fd, data, self.path)
                self.seq, self.head, self.size = self.seq + 1, line.hash, self.size + len(data)
        except files.AppendError as e:
            raise LedgerWriteError(f"{e}; its {self.seq} lines stand") from e
        return line


def _check_readable(data: bytes) -> None:
    try:
        _parsed(data, "it")
    except LedgerError as e:
        raise InvalidValue("payload", "JSON that can be read back", str(e.__cause__)) from e


def verify(path: Path) -> Check:
    """Walk the chain. Raises `LedgerError` if the file cannot be read at all."""
    lines, head = 0, GENESIS
    try:
        for line in read(path):
            lines, head = lines + 1, line.hash
    except LedgerError as e:
        return Check(lines, head, str(e))
    except OSError as e:
        raise LedgerError(f"cannot read {path}: {e.strerror}") from e
    return Check(lines, head)


def read(path: Path) -> Iterator[LedgerLine]:
    """The lines, each checked against the one before. Raises `LedgerError` at the first that does not hold."""
    prev = GENESIS
    for number, raw in enumerate(path.read_bytes().splitlines(keepends=True)):
        where = f"line {number + 1}"
        if not raw.endswith(b"\n"):
            raise LedgerError(f"{where} is torn: {len(raw)} bytes without a line end, from an interrupted write")
        line = _parsed(raw, where)
        body = line.model_dump(mode="json", exclude={"hash"})
        if line.seq != number or line.prev != prev:
            raise LedgerError(f"{where} does not follow the one before it: a line was changed, dropped or inserted")
        if _hash(body) != line.hash:
            raise LedgerError(f"{where} was changed: its contents do not give its hash")
        if raw != _bytes(line):  # a key given twice, say, which readers may take either way
            raise LedgerError(f"{where} was changed: it is not written as a ledger writes it")
        prev = line.hash
        yield line


def _parsed(raw: bytes, where: str) -> LedgerLine:
    try:
        return LedgerLine.model_validate_json(raw)
    except ValueError as e:
        raise LedgerError(f"{where} is not a ledger line: {e}") from e
