"""Where recorded calls go: into a list, or into a folder that several processes may share."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kda2.workbench import files
from kda2.workbench.capture.call import Capture

Tell = Callable[[str, str], None]  # told (kind, text): "skipped" calls and what "failed"
LIMIT = 16


class Sink(Protocol):
    """Takes captures. `open` says whether it takes more; none of its methods raises for want of space."""

    open: bool

    def admits(self, key: str) -> bool:
        """Whether a call with this signature is wanted; where only the first one is, it now has been asked for."""

    def drop(self, key: str) -> None:
        """The call that was asked for came to nothing."""

    def put(self, capture: Capture, name: str) -> None:
        """Keep the call; where there are files, under this name and a number."""

    def tell(self, kind: str, text: str) -> None:
        """Say what was not kept."""


def warn(kind: str, text: str) -> None:
    """Tell a program's user, once for each text."""
    warnings.warn(f"not captured: {text}" if kind == "skipped" else text, stacklevel=2)


class Memory:
    """Keeps every call."""

    def __init__(self) -> None:
        self.open = True
        self.calls: list[Capture] = []
        self.tell: Tell = warn

    def admits(self, key: str) -> bool:
        return True

    def drop(self, key: str) -> None:
        pass

    def put(self, capture: Capture, name: str) -> None:
        self.calls.append(capture)


class Claims:
    """Names that one claimant gets each: of this process, or with a folder of all that are given it."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._refused: set[str] = set()

    def take(self, name: str) -> bool:
        """Whether the name was free. Raises `OSError` if the folder cannot be written."""
        if name in self._refused:
            return False
        self._refused.add(name)
        if self.folder is None:
            return True
        try:
            os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def give_back(self, name: str) -> None:
        self._refused.discard(name)
        if self.folder is not None:
            (self.folder / name).unlink(missing_ok=True)


class Folder:
    """Keeps the first call of each signature (with `every` all of them) as a file, `limit` files at most. After the
    first file that cannot be written it takes no more."""

    def __init__(self, folder: Path, limit: int, every: bool, claims: Claims, tell: Tell) -> None:
        self.folder, self.limit, self.every, self.claims = folder, limit, every, claims
        self.open, self.paths = limit > 0, list[Path]()
        self.tell: Tell = tell
        self._slot = 0

    def admits(self, key: str) -> bool:
        return self.every or self._take(f"call-{key}")

    def drop(self, key: str) -> None:
        if not self.every:
            try:
                self.claims.give_back(f"call-{key}")
            except OSError:
                self.open = False

    def put(self, capture: Capture, name: str) -> None:
        while self._slot < self.limit and not self._take(f"file-{self._slot}"):
            self._slot += 1
        self.open = self.open and self._slot < self.limit
        if not self.open:
            return
        numbered = (self.folder / f"{name}-{n}.safetensors" for n in itertools.count(self._slot))
        path = next(p for p in numbered if not p.exists())  # an earlier recording may have been here
        try:
            capture.save(path)
        except OSError as e:
            self.open = False
            self.tell("failed", f"{e.strerror or e}: {path}")
        else:
            self.paths.append(path)

    def _take(self, name: str) -> bool:
        try:
            return self.claims.take(name)
        except OSError:  # who watched this process is gone
            self.open = False
            return False


def teller(path: Path) -> Tell:
    """Tells by a line in a file, each text once; a disk that has no room for it keeps quiet."""
    told: set[tuple[str, str]] = set()

    def tell(kind: str, text: str) -> None:
        if (kind, text) in told:
            return
        told.add((kind, text))
        try:
            files.append_line(path, json.dumps({"kind": kind, "text": text}))
        except OSError:
            return

    return tell
