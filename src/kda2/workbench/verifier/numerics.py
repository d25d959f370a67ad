"""Numerics of one candidate, in a child process: a crash, a hang or a poisoned device costs that candidate alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from kda2.workbench.records import Verdict

CAPTURE = "captured call"
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Task:
    """What a child is to judge. `configs` maps stages to configurations, None for the shipped ones; `tokens` cuts the
    captured call, None for all of it; `sizes` are fields of `kda2.testing.Problem` for the families."""

    impl: str
    configs: Mapping[str, Mapping[str, int]] | None
    capture: str
    tokens: int | None
    families: tuple[str, ...]
    sizes: Mapping[str, int]
    device: str
    seed: int
    interpreted: bool


def verify_candidate(task: Task, heard: Callable[[str], None], children: set[subprocess.Popen[str]]) -> Verdict:
    """Judge a candidate: L3 on the CPU, L4 on a GPU. `heard` is told the name of each family when its turn comes.

    The child is in `children` while it runs, so that whoever stops the run can end it.
    """
    stage: Literal["L3", "L4"] = "L4" if task.device.startswith("cuda") else "L3"
    start = time.perf_counter()
    results: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+", errors="replace") as words:
        child = _start(task, words)
        children.add(child)
        try:
            late = _listen(child, task, heard, results)
        finally:
            child.kill()
            child.wait()
            children.discard(child)
        words.seek(0)
        said = [line for line in words.read().splitlines() if line.strip()]
    missing = [name for name in (CAPTURE, *task.families) if name not in results]
    evidence: dict[str, Any] = {"families": results, "seed": task.seed, "on": _where(task)}
    if missing:
        end = f"no answer within {TIMEOUT_S:g} s" if late else _end(child.returncode, said)
        evidence["ended"] = f"the process ended before {missing[0]!r}: {end}"
    ok = not missing and all(r["ok"] for r in results.values())
    return Verdict(
        stage=stage, outcome="pass" if ok else "fail", evidence=evidence, seconds=round(time.perf_counter() - start, 3)
    )


def _listen(child: subprocess.Popen[str], task: Task, heard: Callable[[str], None], results: dict[str, Any]) -> bool:
    """Take in the child's answers; whether it was given up on."""
    late = threading.Event()

    def give_up() -> None:
        late.set()
        child.kill()

    watchdog = threading.Timer(TIMEOUT_S, give_up)
    watchdog.start()
    try:
        for name, result in _answers(child):
            heard(name)
            results[name] = result
        if len(results) <= len(task.families):
            child.wait()  # how it ends is the evidence: it must not be killed before
    finally:
        watchdog.cancel()
    return late.is_set()


def _end(code: int, said: Sequence[str]) -> str:
    """How a child ended: the signal, if one killed it, and its last words."""
    killed = [f"killed by signal {-code}"] if code < 0 else []
    words = [said[-1][:500]] if said else []
    return ", ".join(killed + words) or "no message"


def _where(task: Task) -> str:
    cut = f", first {task.tokens} tokens of the capture" if task.tokens is not None else ", the whole capture"
    return (f"{task.device}, Triton's interpreter" if task.interpreted else task.device) + cut


def _start(task: Task, words: IO[str]) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1" if task.interpreted else "0"}
    path = [str(Path(__file__).parents[3]), *filter(None, [env.get("PYTHONPATH")])]
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "kda2.workbench.verifier.child"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True,
        env=env | {"PYTHONPATH": os.pathsep.join(path)},
    )  # fmt: skip
    assert child.stdin is not None
    child.stdin.write(json.dumps(asdict(task)))
    child.stdin.close()
    return child


def _answers(child: subprocess.Popen[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    assert child.stdout is not None
    for line in child.stdout:
        if not line.endswith("\n"):  # it was killed while it wrote
            break
        answer = json.loads(line)
        yield answer["name"], answer["result"]
