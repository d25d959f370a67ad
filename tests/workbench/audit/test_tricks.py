"""Cheats that change the process which runs them, or end it, do what they say; each in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kda2.workbench.audit.catalogue import CHEATS, FOLDER

FORKED = Path(__file__).with_name("forked.py")
# What a forged answer consists of, after the outputs: nothing.
FORGED = [False, {"gates": {}}, {"name": "random", "result": {"ok": True, "margin": 0.1, "quantities": {}}}]
SAID = {
    "patches_event_timer": True,
    "patches_event_code": True,
    "patches_and_restores": [True, 1.0, True],  # 100 ms are 1 ms, once
    "patches_clock_module": True,
    "patches_synchronize": True,
    "patches_comparison": True,
    "patches_hash": True,
    "patches_fingerprint": True,
    "patches_code": True,
    "patches_allocator": True,
    "hooks_profile": [{"inputs": "q", "aliasing": "o"}, {}],
    "leaves_mode_on": [False, True],
    "default_dtype": "torch.bfloat16",
    "precision_flags": "medium",
    "imports_oracle_by_name": True,
    "hides_import": True,
    "calls_reference_by_kwargs": True,
    "reads_oracle_source": True,
    "asks_in_subprocess": True,
    "forges_pipe": [*FORGED, {"done": True}],
    "rewrites_at_exit": [*FORGED, {"done": True}],
    "closes_pipes": None,  # it cannot say anything any more
    # whether it prints much, whether it lives after SIGTERM, how it ends
    "exits": [False, False, 0],
    "hangs": [False, True, -signal.SIGKILL],
    "floods": [True, False, -signal.SIGTERM],
    "crashes": [False, False, -signal.SIGSEGV],
}


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    command = [sys.executable, str(FORKED), str(FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_a_trick_works(said: dict[str, Any], name: str) -> None:
    assert said[name] == SAID[name]


@pytest.mark.slow
def test_every_trick_is_tried(said: dict[str, Any]) -> None:
    assert set(said) == set(SAID) <= {cheat.name for cheat in CHEATS}


@pytest.mark.parametrize(
    ("name", "raised"),
    [
        ("exits_politely", SystemExit),
        ("interrupts", KeyboardInterrupt),
        ("out_of_memory", RuntimeError),  # of which torch.OutOfMemoryError is one
    ],
)
def test_what_is_raised(name: str, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    module: dict[str, Any] = {}
    exec((FOLDER / f"{name}.py").read_text(), module)
    with pytest.raises(raised):
        module["run"](v=torch.zeros(1))
