"""Files that are there whole or not at all: lines that are only ever appended, whoever else writes, and whole files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kda2.errors import KDA2Error

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_MODE = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)


class AppendError(KDA2Error, OSError):
    """A line could not be appended (full disk, no permission, a torn line before it); the file is as it was."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to append to `path` with, made if absent; no other process is inside for the same file."""
    try:
        fd = os.open(path, _MODE, 0o644)
    except OSError as e:
        raise AppendError(f"cannot open {path}: {e.strerror}") from e
    try:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)  # also unlocks


def write_whole(fd: int, data: bytes, path: Path) -> None:
    """Append `data` and wait until the disk has it. Whatever stops it on the way, nothing of it stays."""
    size = os.fstat(fd).st_size
    try:
        written = os.write(fd, data)
        if written != len(data):
            raise OSError(None, f"only {written} of {len(data)} bytes fitted")
        os.fsync(fd)
    except BaseException as e:
        with contextlib.suppress(OSError):  # then a torn line stays, which the next to append reports
            os.ftruncate(fd, size)
        if isinstance(e, OSError):
            raise AppendError(f"cannot write {path}: {e.strerror}") from e
        raise


def append_line(path: Path, line: str) -> None:
    """Append one line, without its line end. Raises `AppendError`."""
    with opened(path) as fd:
        _check_end(fd, path)
        write_whole(fd, line.encode() + b"\n", path)


def replace_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all. Raises `OSError`."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_appendable(path: Path) -> None:
    """Raise `AppendError` if a line could not be appended; a file that is absent stays so."""
    if path.exists():
        with opened(path) as fd:
            _check_end(fd, path)


def _check_end(fd: int, path: Path) -> None:
    size = os.fstat(fd).st_size
    if not size:
        return
    os.lseek(fd, -1, os.SEEK_END)
    if os.read(fd, 1) != b"\n":
        raise AppendError(f"the last line of {path} is torn, from an interrupted write: complete or remove it")
