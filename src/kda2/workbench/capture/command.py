"""Running a command with the calls of KDA recorded, in it and in every Python that it starts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda2.errors import InvalidValue
from kda2.workbench import extras
from kda2.workbench.capture.store import LIMIT

_SITE = Path(__file__).parent / "site"


@dataclass(frozen=True)
class Kept:
    """A file that was written: its path, and the facts of the call in it."""

    path: Path
    facts: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """What came of a command. `status` is its own exit code (128 + n if signal n ended it); `skipped` says which calls
    could not be kept and why, `trouble` what went wrong, and why there are no files where there are none."""

    status: int
    files: tuple[Kept, ...]
    skipped: tuple[str, ...]
    trouble: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """The command's, or 1 if nothing was captured."""
        return self.status or (0 if self.files else 1)


def run(
    words: Sequence[str], folder: Path, limit: int = LIMIT, every: bool = False, stdout: int | None = None
) -> Result:
    """Run `words` as a command and keep what it calls in `folder`, which is made; `stdout` is the file descriptor that
    the command prints to, this process's own unless given. Raises `InvalidValue` for a folder
    that is not empty and for a command that cannot be run, `OSError` for a folder that cannot be made."""
    folder = folder.absolute()
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise InvalidValue("OUT", "an empty folder, or a new one", str(folder), "each capture takes one of its own")
    try:
        with tempfile.TemporaryDirectory(prefix="kda2-capture-", ignore_cleanup_errors=True) as control:
            settings = {"folder": str(folder), "limit": limit, "every": every}
            Path(control, "settings.json").write_text(json.dumps(settings), encoding="utf-8")
            status = _status(words, control, stdout)
            return _result(status, folder, Path(control))
    finally:
        if made and not any(folder.iterdir()):
            folder.rmdir()


def _status(words: Sequence[str], control: str, stdout: int | None) -> int:
    paths = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "KDA2_CAPTURE": control}
    try:
        child = subprocess.Popen(list(words), env=env, stdout=stdout)
    except OSError as e:
        raise InvalidValue("COMMAND", "a program that can be run", f"{words[0]!r} ({e.strerror})") from e
    with _passing_on(child):
        status = _wait(child)
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _passing_on(child: subprocess.Popen[Any]) -> Iterator[None]:
    """Inside, a request to end goes to the command, so that it ends first and what it left is reported."""
    if threading.current_thread() is not threading.main_thread():  # no other may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(child: subprocess.Popen[Any]) -> int:
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            if not _terminal_told_it():
                child.send_signal(signal.SIGINT)


def _terminal_told_it() -> bool:
    """Whether Ctrl-C came from a terminal, which interrupts the command as well."""
    try:
        with open("/dev/tty", "rb") as tty:
            return os.tcgetpgrp(tty.fileno()) == os.getpgrp()
    except OSError:
        return False


def _result(status: int, folder: Path, control: Path) -> Result:
    for part in folder.glob(".*.part"):  # of a process that was killed
        part.unlink(missing_ok=True)
    found = {path: _facts(path) for path in sorted(folder.glob("*.safetensors"), key=_age)}
    kept = tuple(Kept(path, facts) for path, facts in found.items() if facts is not None)
    told = _told(control / "told.jsonl")
    skipped = tuple(text for kind, text in told if kind == "skipped")
    trouble = [text for kind, text in told if kind == "failed"]
    trouble += dict.fromkeys(f"calls could not be recorded: {p.read_text()}" for p in control.glob("broken-*"))
    if not kept:
        trouble = [f"nothing was captured: {text}" for text in trouble or [_why_nothing(control, skipped)]]
    return Result(status, kept, skipped, tuple(trouble))


def _why_nothing(control: Path, skipped: Sequence[str]) -> str:
    if skipped:
        return "every call was skipped"
    if not any(control.glob("python-*")):
        return "no Python was started that lets itself be watched (run without -I, -S and -E, PYTHONPATH as it is)"
    if not any(control.glob("imported-*")):
        return "no process imported kda2.kda or fla.ops.kda"
    return "no call was made and returned, outside torch.compile and CUDA graphs"


def _age(path: Path) -> tuple[int, str]:
    return path.stat().st_mtime_ns, path.name


def _told(path: Path) -> list[tuple[str, str]]:
    """What the processes told, each thing once."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return list(dict.fromkeys((told["kind"], told["text"]) for told in map(json.loads, lines)))


def _facts(path: Path) -> dict[str, Any] | None:
    """What a capture says of its call; None for a file that is no capture, which the command may have written."""
    files = extras.load("safetensors", "a capture file")
    try:
        with files.safe_open(path, framework="pt") as f:
            facts: dict[str, Any] = json.loads((f.metadata() or {})["kda2"])["facts"]
    except (KeyError, TypeError, ValueError, OSError, files.SafetensorError):
        return None
    return facts
