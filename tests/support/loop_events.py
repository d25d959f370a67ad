"""Following a run of the loop: in silence, or stopping it at an event; and what its tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kda2 import device
from kda2.workbench import ledger as ledgers

FAMILIES = ("random", "one_token")
without_gpu = pytest.mark.skipif(bool(device.gpus()), reason="with a GPU it measures")


def quiet(*_: str) -> None:
    pass


def stopping(at: tuple[str, str, str]) -> Callable[[str, str, str], None]:
    """Ctrl-C at an event; the candidate "*" is any that does not ship."""

    def progress(*event: str) -> None:
        if event[1:] == at[1:] and (event[0] == at[0] or (at[0] == "*" and event[0].startswith("triton "))):
            raise KeyboardInterrupt

    return progress


def kinds(ledger: Path) -> list[str]:
    return [line.kind for line in ledgers.read(ledger)]
