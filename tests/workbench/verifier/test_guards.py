"""What is watched in the process that runs a kernel: what is noticed, and what may go on."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kda2
from kda2 import memory
from kda2.workbench.verifier import runner
from kda2.workbench.verifier.guards import Seal, overlapping, unhooked
from kda2.workbench.verifier.words import reasons

WATCHED = Path(__file__).with_name("watched.py")


@pytest.fixture
def seal() -> Iterator[Seal]:
    """One on a process as it is; settings are put back after the test."""
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):  # pytest's, of a test that failed
        vars(sys).pop(name, None)
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield Seal()
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    unhooked()


# What is other than it was.


def test_nothing_is_broken_where_nobody_did_anything(seal: Seal) -> None:
    x = torch.randn(4, 4) @ torch.randn(4, 4)
    assert torch.isfinite(x).all() and seal.broken() == []


@pytest.mark.parametrize(
    ("owner", "name", "found"),
    [
        (torch, "equal", "torch.equal"),
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.cuda.Event, "elapsed_time", "torch.cuda.streams.Event.elapsed_time"),
        (Tensor, "copy_", "torch.Tensor.copy_"),
        (time, "perf_counter", "time.perf_counter"),
        (memory, "fingerprint", "kda2.memory.fingerprint"),
        (runner.Runner, "tampering", "kda2.workbench.verifier.runner.Runner.tampering"),
        (json, "dumps", "json.dumps"),
        (os, "write", "os.write"),
    ],
)
def test_a_function_that_was_replaced(
    seal: Seal, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, found: str
) -> None:
    was = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: was(*args, **kwargs))
    assert found in seal.broken()
    monkeypatch.undo()
    assert seal.broken() == []


def test_a_module_that_was_replaced(seal: Seal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "torch", type(sys)("torch"))
    assert seal.broken() == ["kda2.workbench.verifier.runner.torch"]


def test_a_function_that_is_gone(seal: Seal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(memory, "fenced_memory")
    assert {x.partition(".__code__")[0] for x in seal.broken()} == {"kda2.memory.fenced_memory"}


def test_torch_compile_is_no_tampering(seal: Seal) -> None:
    importlib.import_module("torch._dynamo")
    assert seal.broken() == []


def test_settings_that_a_file_chooses_on_import_are_its_own(seal: Seal) -> None:
    torch.set_float32_matmul_precision("high")
    assert seal.broken() == ["torch's matmul precision"]
    seal.settle()
    assert seal.broken() == []


def test_other_code_in_the_same_function(seal: Seal, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(kwargs: Any) -> dict[str, str]:
        return {}

    monkeypatch.setattr(memory.fingerprint, "__code__", other.__code__)
    assert "kda2.memory.fingerprint.__code__" in seal.broken()
    assert "kda2.memory.fingerprint" not in seal.broken()


def test_a_default_dtype(seal: Seal) -> None:
    torch.set_default_dtype(torch.float64)
    assert "torch's default dtype" in seal.broken()


def test_the_precision_of_products(seal: Seal) -> None:
    torch.set_float32_matmul_precision("medium")
    assert seal.broken() == ["torch's matmul precision"]


@pytest.mark.parametrize("hook", ["setprofile", "settrace"])
def test_a_hook_on_every_call(seal: Seal, hook: str) -> None:
    before = getattr(sys, hook.replace("set", "get"))()
    getattr(sys, hook)(lambda *_: None)
    try:
        broken = seal.broken()
        assert unhooked() and not unhooked()
    finally:
        getattr(sys, hook)(before)
    assert f"sys.{hook}" in broken


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "kind"), [(Function, "function"), (TorchDispatchMode, "dispatch")])
def test_a_mode_that_is_left_on(seal: Seal, mode: type[Any], kind: str) -> None:
    with mode():
        assert seal.broken() == [f"torch's {kind} modes"]
    assert seal.broken() == []


def test_a_finder_that_was_taken_away(seal: Seal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[1:])
    assert seal.broken() == ["sys.meta_path"]


def test_what_was_added_is_nobodys_loss(seal: Seal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "brand_new", lambda: None, raising=False)
    monkeypatch.setattr(Tensor, "brand_new", lambda self: None, raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, object()])
    assert seal.broken() == []


# What is read.

READ = {
    "import_module": "kda2.testing",
    "__import__": "kda2.testing",
    "a part of it": "kda2.testing",
    "the judge": "kda2.workbench.verifier.questions",
    "runpy": "testing/compare.py",
    "source": "testing/compare.py",
    "source by os.open": "testing/compare.py",
    "source by io": "testing/compare.py",
    "reference": "ops/kda/reference.py",
    "subprocess": "kda2.testing, in a process of its own",
    "subprocess of the judge": "kda2.workbench, in a process of its own",
    "system": "kda2.testing, in a process of its own",
    "spawn": "kda2.testing, in a process of its own",
}
ALLOWED = ("imports", "kda2's call", "a traceback", "torch", "other files", "other processes", "off")
UNSEEN = ("source by bytes", "source by another way", "source from its folder")


@pytest.fixture(scope="module")
def watched() -> dict[str, list[str]]:
    env = {**os.environ, "PYTHONPATH": str(Path(kda2.__file__).parents[1])}
    command = [sys.executable, "-P", str(WATCHED)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    assert set(found) == {*READ, *ALLOWED, *UNSEEN, "bytecode"}
    return found


@pytest.mark.parametrize("act", READ)
def test_what_knows_the_answers_is_noticed(watched: dict[str, list[str]], act: str) -> None:
    assert READ[act] in watched[act]


def test_bytecode_is_noticed(watched: dict[str, list[str]]) -> None:
    assert any(name.startswith("testing/__pycache__/compare.") for name in watched["bytecode"])


@pytest.mark.parametrize("act", ALLOWED)
def test_what_any_file_may_do_is_not(watched: dict[str, list[str]], act: str) -> None:
    assert watched[act] == []


@pytest.mark.parametrize("act", UNSEEN)
def test_a_source_by_whatever_path(watched: dict[str, list[str]], act: str) -> None:
    assert watched[act] == ["testing/compare.py"]


def test_a_kernel_that_formats_tracebacks_passes(shared: Any, plain: str, changed: Callable[..., str]) -> None:
    first = "    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]\n"
    lines = "    try:\n        q.view(7, 11, 13)\n    except RuntimeError:\n" \
        "        import traceback; assert 'line' in traceback.format_exc()\n"  # fmt: skip
    verdict = shared.numerics(shared.file(changed(plain, first, first + lines)), "random", "one_token")
    assert verdict.outcome == "pass", reasons(verdict)


# Whose memory outputs lie in.


def test_views_overlap() -> None:
    x = torch.zeros(4, 8)
    found = overlapping({"o": x[1:], "state": torch.zeros(2)}, {"q": x, "k": torch.zeros(3), "scale": 0.5})
    assert found == ["o in that of q"]
    assert overlapping({"o": x[:2]}, {"q": x[1:], "k": x[3:]}) == ["o in that of q"]
    assert overlapping({"o": x}, {"q": x[3], "k": x[0]}) == ["o in that of q, k"]


def test_disjoint_parts_of_one_storage_do_not() -> None:
    x = torch.zeros(4, 8)
    assert overlapping({"o": x[:2]}, {"q": x[2:]}) == []
    assert overlapping({"o": x[0, :4]}, {"q": x[0, 4:]}) == []


def test_the_last_element_counts() -> None:
    x = torch.zeros(9)
    assert overlapping({"o": x[:5]}, {"q": x[4:]}) == ["o in that of q"]
    assert overlapping({"o": x[:5:2]}, {"q": x[4:]}) == ["o in that of q"]
    assert overlapping({"o": x[:4:2]}, {"q": x[3:]}) == []


def test_empty_tensors_lie_nowhere() -> None:
    x = torch.zeros(4, 8)
    assert overlapping({"o": x[:0]}, {"q": x}) == [] and overlapping({"o": x}, {"q": x[2:2]}) == []


def test_outputs_that_may_be_there() -> None:
    x = torch.zeros(4)
    assert overlapping({"state": x, "o": x}, {"state": x}, may=("state",)) == ["o in that of state"]
