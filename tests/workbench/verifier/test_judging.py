"""A run goes on after what it refused: files that hang, are wrong and are right, judged together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kda2.testing import Problem, make
from kda2.workbench import candidates, ledger
from kda2.workbench.capture import Capture
from kda2.workbench.journal import Journal
from kda2.workbench.judge import Judge
from kda2.workbench.verifier import Children, Limits, Subject, timed
from kda2.workbench.verifier.words import reasons

FIRST = "    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]\n"


def test_a_run_goes_on_after_what_it_refused(
    tmp_path: Path, plain: str, changed: Callable[..., str], conditions: Callable[..., Any]
) -> None:
    texts = {
        "hangs.py": changed(plain, FIRST, f"{FIRST}    while True: pass\n"),
        "wrong.py": changed(plain, "scale * (S", "(S"),
        "right.py": plain,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    journal = Journal(tmp_path / "ledger.jsonl")
    journal.begin({"op": "kda", "environment": {}})
    judge = Judge(journal, conditions(limits=Limits(6.0)), lambda *_: None)
    try:
        judge.judge([candidates.of_file(tmp_path / name) for name in texts])
        judge.finish(list(texts))
    finally:
        judge.close()

    read = Journal.reading(tmp_path / "ledger.jsonl")
    found = {name: {v.stage: v for v in read.candidate(name).verdicts} for name in texts}
    assert {name: (v["L3"].outcome, read.candidate(name).correct) for name, v in found.items()} == {
        "hangs.py": ("fail", False), "wrong.py": ("fail", False), "right.py": ("pass", True),
    }  # fmt: skip
    assert "no answer within 6 s, at hangs.py, line 13 in run; it hangs" in reasons(found["hangs.py"]["L3"])[0]
    assert "the scale K^-0.5 is missing" in reasons(found["wrong.py"]["L3"])[0]
    assert found["right.py"]["L4"].outcome == "not_run(no CUDA device)"
    assert len(list(ledger.read(tmp_path / "ledger.jsonl"))) == 1 + 3 + 3 * 8 + 3


@pytest.mark.parametrize(("impl", "K", "V"), [("hopper", 128, 64), ("triton", 100, 20), ("file", 100, 20)])
def test_an_implementation_is_probed_in_sizes_that_it_serves(
    conditions: Callable[..., Any], impl: str, K: int, V: int
) -> None:
    own = conditions(sizes={"K": 100, "V": 20, "T": 9}).of(Subject(impl), derived=False)
    assert own.sizes == {"K": K, "V": V, "T": 9}


def test_one_that_ends_the_timing_does_not_take_the_others_with_it(
    tmp_path: Path, plain: str, changed: Callable[..., str], conditions: Callable[..., Any]
) -> None:
    capture = tmp_path / "call.safetensors"
    Capture(make(Problem(T=4, H=1, HV=1, K=8, V=8)), {}).save(capture)
    texts = {"right.py": plain, "ends.py": changed(plain, FIRST, f"{FIRST}    import os; os._exit(4)\n")}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    subjects = {"torch": Subject("torch")} | {name: Subject.of_file(tmp_path / name) for name in texts}
    verdicts, timings = timed.latency(Children(), subjects, "torch", conditions(capture=str(capture)))
    assert {name: v.outcome for name, v in verdicts.items()} == {"torch": "pass", "right.py": "pass", "ends.py": "fail"}
    assert reasons(verdicts["ends.py"]) == ["the process that timed it ended: it left with exit code 4"]
    assert set(timings) == {"torch", "right.py"}
    assert verdicts["right.py"].evidence["against"] == "torch"


# Answers by the address of q: what the clock times is a dictionary, and other contents get the same answer.
KEEPS = """
KEPT = {}


def run(**x):
    key = x["q"].data_ptr()
    if key not in KEPT:
        KEPT[key] = compute(**x)
    return KEPT[key]
"""


@pytest.mark.parametrize("kept", [True, False])
def test_an_answer_kept_from_the_timed_calls_is_invalid(
    tmp_path: Path, plain: str, changed: Callable[..., str], conditions: Callable[..., Any], kept: bool
) -> None:
    capture, path = tmp_path / "call.safetensors", tmp_path / "kernel.py"
    Capture(make(Problem(T=4, H=1, HV=1, K=8, V=8)), {}).save(capture)
    path.write_text(f"{changed(plain, 'def run(', 'def compute(')}\n{KEEPS}" if kept else plain)
    verdicts, _ = timed.latency(
        Children(), {"kernel.py": Subject.of_file(path)}, "kernel.py", conditions(capture=str(capture))
    )
    evidence = verdicts["kernel.py"].evidence
    assert verdicts["kernel.py"].outcome == ("invalid" if kept else "pass"), evidence
    assert evidence["timed_outputs"]["checked"] > 0
    if kept:
        assert {"timed outputs", "repeat"} <= evidence["gates"].keys()
        assert evidence["gates"]["repeat"].startswith(
            "after the timing, with other contents in the same tensors, its answer was wrong: "
        )
        assert reasons(verdicts["kernel.py"])[0].startswith("what it returned while it was timed is wrong: ")
