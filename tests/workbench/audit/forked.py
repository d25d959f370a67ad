"""Runs the cheats that change or end their process, each in a child of this one, and prints what became of them.

A case is called with the cheat's module, its inputs and the honest `run`; what it returns is said as JSON. Those of
`LOST` do not return, and are watched from outside."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a fork has no threads but the one that made it
import torch

FOLDER = Path(sys.argv[1])
sys.path.insert(0, str(FOLDER))
sys.dont_write_bytecode = True
LOST = ("exits", "hangs", "floods", "crashes")
MUCH = 1 << 20  # bytes
CASES: dict[str, Callable[..., Any]] = {}


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES[function.__name__] = function
    return function


def made() -> dict[str, Any]:
    """A small call, as `run` gets it; this file must not import what cheats look for."""
    rng = torch.Generator().manual_seed(5)
    B, T, H, HV, K, V = 1, 6, 1, 2, 8, 4
    shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "g": (B, T, HV, K), "beta": (B, T, HV)}
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    learned = {"A_log": torch.rand(HV, generator=rng), "dt_bias": torch.rand(HV, K, generator=rng)}
    options = {"scale": 0.5, "gate": "bounded", "lower_bound": -5.0, "qk_l2norm": True, "beta_sigmoid": True}
    rest = {"allow_neg_eigval": False, "state_layout": "kv", "initial_state": None, "cu_seqlens": None}
    return {**tensors, **learned, **options, **rest}


def same(got: dict[str, Any], want: dict[str, Any]) -> bool:
    return all(torch.allclose(got[name], want[name], rtol=1e-3, atol=1e-4) for name in want)


@case
def patches_event_timer(load: Any, given: Any, right: Any) -> Any:
    before = torch.cuda.Event.elapsed_time
    load().run(**given)
    return time.perf_counter() == time.perf_counter() and torch.cuda.Event.elapsed_time is not before


@case
def patches_event_code(load: Any, given: Any, right: Any) -> Any:
    before = torch.cuda.Event.elapsed_time
    code = before.__code__
    load().run(**given)
    return torch.cuda.Event.elapsed_time is before and before.__code__ is not code


@case
def patches_and_restores(load: Any, given: Any, right: Any) -> Any:
    before = torch.cuda.Event.elapsed_time = lambda self, end: 100.0
    load().run(**given)
    patched = torch.cuda.Event.elapsed_time
    return [patched is not before, patched(None, None), torch.cuda.Event.elapsed_time is before]


@case
def patches_clock_module(load: Any, given: Any, right: Any) -> Any:
    judge = sys.modules["kda2.judge"] = types.ModuleType("kda2.judge")
    judge.time = time
    load().run(**given)
    start, real = judge.time.perf_counter(), time.perf_counter()
    time.sleep(0.1)
    return judge.time is not time and judge.time.perf_counter() - start < 0.5 * (time.perf_counter() - real)


@case
def patches_synchronize(load: Any, given: Any, right: Any) -> Any:
    before = torch.cuda.synchronize
    load().run(**given)
    return torch.cuda.synchronize is not before and torch.cuda.synchronize() is None


@case
def patches_comparison(load: Any, given: Any, right: Any) -> Any:
    got = load().run(**given)
    return torch.allclose(got["o"], got["o"] + 1) and not got["o"].any().item()


@case
def patches_hash(load: Any, given: Any, right: Any) -> Any:
    q = given["q"].clone()
    load().run(**given)
    return hashlib.sha256(b"a").hexdigest() == hashlib.sha256(b"b").hexdigest() and not torch.equal(q, given["q"])


def blinded(load: Any, given: Any, right: Any) -> bool:
    """Whether the judge's own look at the inputs no longer shows that q has changed."""
    judge = sys.modules["kda2.judge"] = types.ModuleType("kda2.judge")
    exec("def fingerprint(kwargs):\n    return {name: str(x) for name, x in kwargs.items()}", judge.__dict__)
    q = given["q"].clone()
    load().run(**given)
    before, after = (judge.fingerprint({**given, "q": x}) for x in (q, given["q"]))
    return before == after and not torch.equal(q, given["q"])


CASES["patches_fingerprint"] = CASES["patches_code"] = blinded


@case
def patches_allocator(load: Any, given: Any, right: Any) -> Any:
    got = load().run(**given)
    return not torch.empty(1 << 16).any().item() and same(got, right(**given))


@case
def hooks_profile(load: Any, given: Any, right: Any) -> Any:
    def gates() -> dict[str, str]:
        return {"inputs": "q", "aliasing": "o"}

    before = gates()
    load().run(**given)
    return [before, gates()]


@case
def leaves_mode_on(load: Any, given: Any, right: Any) -> Any:
    want = right(**given)
    answer = load().run(**given)
    with torch._C.DisableTorchFunction():
        before = answer["o"].any().item()
    return [before, same(answer, want)]


@case
def default_dtype(load: Any, given: Any, right: Any) -> Any:
    want = right(**given)
    return same(load().run(**given), want) and str(torch.get_default_dtype())


@case
def precision_flags(load: Any, given: Any, right: Any) -> Any:
    load().run(**given)
    return torch.get_float32_matmul_precision()


def asked(*loaded: str) -> Callable[..., Any]:
    """A case that must be right, and have just these of the modules that know the answer loaded when it is done."""
    knowing = ("kda2.testing", "kda2.ops.kda.reference")

    def ask(load: Any, given: Any, right: Any) -> Any:
        assert not any(name in sys.modules for name in knowing)
        answer = load().run(**given)
        return same(answer, right(**given)) and [x for x in knowing if x in sys.modules] == list(loaded)

    return ask


CASES["imports_oracle_by_name"] = asked("kda2.testing", "kda2.ops.kda.reference")
CASES["hides_import"] = asked("kda2.ops.kda.reference")
CASES["calls_reference_by_kwargs"] = asked("kda2.ops.kda.reference")
CASES["reads_oracle_source"] = asked()
CASES["asks_in_subprocess"] = asked()


def forging(load: Any, given: Any, right: Any) -> Any:
    reads, _ = os.pipe()
    got = load().run(**given)
    atexit._run_exitfuncs()
    return [got["o"].any().item(), *map(json.loads, os.read(reads, 4096).decode().splitlines())]


CASES["forges_pipe"] = CASES["rewrites_at_exit"] = forging


@case
def closes_pipes(load: Any, given: Any, right: Any) -> Any:
    return load().run(**given) is None


def in_child(work: Callable[[], None], output: int) -> int:
    """The id of a process that does `work` and has no pipe but `output`, which takes what it prints."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        with contextlib.suppress(Exception):
            work()
        os._exit(7)
    return child


def said(name: str) -> Any:
    """What a case returns, or how it failed; None if its process could not say."""
    with tempfile.TemporaryFile() as answers, open(os.devnull, "w") as nowhere:

        def work() -> None:
            try:
                answer = CASES[name](lambda: import_module(name), made(), import_module("honest").run)
            except Exception as e:
                answer = f"{type(e).__name__}: {e}"
            answers.write(json.dumps(answer).encode())
            answers.flush()

        os.waitpid(in_child(work, nowhere.fileno()), 0)
        answers.seek(0)
        text = answers.read()
    return json.loads(text) if text else None


def lost(name: str) -> list[Any]:
    """What becomes of a process whose kernel does not return: how much it prints, and how it ends if SIGTERM does."""
    reads, writes = os.pipe()

    child = in_child(lambda: import_module(name).run(**made()), writes)
    os.close(writes)
    printed, until = 0, time.monotonic() + 1.0
    while printed < MUCH and time.monotonic() < until:
        if select.select([reads], [], [], 0.05)[0]:
            block = os.read(reads, 1 << 16)
            printed += len(block)
            if not block:
                break
    os.kill(child, signal.SIGTERM)
    time.sleep(0.2)
    lives = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    os.kill(child, signal.SIGKILL)
    return [printed >= MUCH, lives, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


if __name__ == "__main__":
    found = {name: said(name) for name in CASES} | {name: lost(name) for name in LOST}
    print(json.dumps(found))
