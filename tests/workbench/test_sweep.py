"""The sweep finds faults of one shape, names what they come with, and tells noise from faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

import kda2
from kda2 import device
from kda2.cli.sweep import sweep as sweep_command
from kda2.testing import Problem
from kda2.workbench import sweep as sweeps
from kda2.workbench.sweep import Shape, shapes, sweep

BASE = Problem(K=8, V=8)
Outputs = tuple[Tensor, Tensor | None]
# Few enough to be quick; every dimension moves.
SOME = shapes(None, 10, 0)[:60]


def right(**kwargs: Any) -> Outputs:
    return kda2.kda(**kwargs, impl="torch")


def wrong_where(condition: Callable[[Shape], bool]) -> Callable[..., Outputs]:
    """KDA whose last token's output is a tenth too large on some shapes."""

    def run(**kwargs: Any) -> Outputs:
        o, state = right(**kwargs)
        cu, (B, T, H, _) = kwargs["cu_seqlens"], kwargs["q"].shape
        sequences, longest = (B, T) if cu is None else (len(cu) - 1, int(cu.diff().max()))
        if condition(Shape(sequences, longest, H, o.shape[2], cu is not None)):
            o[:, -1] *= 1.5
        return o, state

    return run


def test_what_ships_is_right_on_every_shape() -> None:
    found = sweep(right, BASE, SOME, repeats=2)
    assert (found.failing, found.smallest, found.nondeterministic, found.stopped) == ([], None, [], "")
    assert [t.outcome for t in found.tried] == ["ok"] * len(SOME)
    assert all(t.margin is not None and 0 < t.margin <= 1 for t in found.tried)


@pytest.mark.parametrize(
    ("condition", "smallest", "needs", "free"),
    [
        (lambda s: s.B == 7, Shape(7, 1), "B=7 (right with B=6 and B=8)", "T, H, HV do not matter"),
        (lambda s: s.B >= 5, Shape(5, 1), "B=5 (right with B=4)", "T, H, HV do not matter"),
        (lambda s: s.T > 64, Shape(1, 65), "T=65 (right with T=64)", "B, H, HV do not matter"),
        (lambda s: s.H == 3, Shape(1, 1, 3, 3), "H=3 (right with H=2 and H=4)", "B, T, HV do not matter"),
        (lambda s: s.HV == 3 * s.H, Shape(1, 1, 1, 3), "HV=3 (right with HV=2 and HV=4)", "B, T, H do not matter"),
    ],
)
def test_a_fault_of_one_dimension_is_named(
    condition: Callable[[Shape], bool], smallest: Shape, needs: str, free: str
) -> None:
    found = sweep(wrong_where(condition), BASE, shapes(None, 0, 0), repeats=1)
    assert {t.shape for t in found.failing} == {s for s in shapes(None, 0, 0) if condition(s)} != set()
    assert found.smallest is not None and found.smallest.shape == smallest
    assert found.comes_with == f"{needs}; {free}"
    assert "o is off" in found.smallest.says


def test_a_fault_of_two_dimensions_at_once() -> None:
    found = sweep(wrong_where(lambda s: s.B == 2 and s.H > 4), BASE, shapes(None, 0, 0), repeats=1)
    assert found.smallest is not None and found.smallest.shape == Shape(2, 1, 5, 5)
    assert found.comes_with == "B=2 (right with B=1 and B=3), H=5 (right with H=4); T, HV do not matter"


def test_a_fault_of_packed_sequences() -> None:
    found = sweep(wrong_where(lambda s: s.packed and s.B > 2), BASE, shapes(None, 0, 0), repeats=1)
    assert found.smallest is not None and found.smallest.shape.packed and found.smallest.shape.B == 3
    assert "packed sequences (right without)" in found.comes_with


def test_a_kernel_that_is_always_wrong_has_no_shape_of_its_own() -> None:
    found = sweep(wrong_where(lambda s: True), BASE, SOME[:20], repeats=1)
    assert found.smallest is not None and found.smallest.shape == Shape(1, 1)
    assert found.comes_with == "any shape: the smallest, B=1 T=1 H=1 HV=1, and its neighbours fail alike"


def test_answers_that_differ_within_the_limits_are_told_and_no_fault() -> None:
    calls = 0

    def run(**kwargs: Any) -> Outputs:
        nonlocal calls
        calls += 1
        o, state = right(**kwargs)
        assert state is not None
        return o, state * (1 + 1e-6 * calls)

    found = sweep(run, BASE, SOME[:10], repeats=3)
    assert not found.failing
    assert found.nondeterministic == list(found.tried)
    assert all(1e-6 < t.spread < 3e-6 for t in found.tried)  # of two calls, the first and the third


def test_a_fault_of_one_call_in_three_is_found() -> None:
    calls = 0

    def run(**kwargs: Any) -> Outputs:
        nonlocal calls
        calls += 1
        o, state = right(**kwargs)
        return (o * 1.5 if calls % 3 == 0 else o), state

    found = sweep(run, BASE, SOME[:5], repeats=3)
    assert len(found.failing) == 5
    assert "one of 2 different answers to the same call" in found.failing[0].says
    assert not sweep(run, BASE, SOME[:1], repeats=2).failing


def test_what_a_kernel_never_wrote_is_found() -> None:
    """Fresh memory is NaN, whatever lay there before."""

    def run(**kwargs: Any) -> Outputs:
        o, state = right(**kwargs)
        out = torch.empty_like(o)
        out[:, :32] = o[:, :32]
        return out, state

    found = sweep(run, BASE, [Shape(1, 16), Shape(1, 32), Shape(1, 40)], repeats=1)
    assert [t.shape for t in found.failing] == [Shape(1, 40)]
    assert found.smallest is not None and found.smallest.shape == Shape(1, 33)
    assert json.loads(json.dumps(found.plain(), allow_nan=False))["smallest"]["margin"] is None


def test_raising_refusing_and_writing_into_inputs() -> None:
    def run(**kwargs: Any) -> Outputs:
        B = kwargs["q"].shape[0]
        if B == 2:
            raise NotImplementedError("no batches of two")
        if B == 3:
            raise IndexError("out of bounds\nat 3")
        got = right(**kwargs)
        if B == 4:
            kwargs["v"][0, 0] = 0
        return got

    found = sweep(run, BASE, [Shape(B, 4) for B in (1, 2, 3, 4)], repeats=1)
    assert [(t.outcome, t.says) for t in found.tried] == [
        ("ok", ""), ("refused", "no batches of two"), ("raised", "IndexError: out of bounds"),
        ("wrong", "it wrote into its inputs: v"),
    ]  # fmt: skip
    assert found.comes_with.startswith("B=3 (right with B=2)")


def test_the_budget_ends_it_and_says_so() -> None:
    ticks = iter(range(100))
    found = sweep(right, BASE, SOME[:50], repeats=1, budget_s=10, clock=lambda: float(next(ticks)))
    assert len(found.tried) == 10
    assert found.stopped == "stopped after 10 of 50 shapes: budget"


def test_a_fault_of_the_device_ends_it() -> None:
    def run(**kwargs: Any) -> Outputs:
        if kwargs["q"].shape[0] == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return right(**kwargs)

    found = sweep(run, BASE, [Shape(B, 4) for B in range(1, 9)], repeats=1)
    assert len(found.tried) == 3
    assert found.stopped == "stopped after 3 of 8 shapes: the GPU faulted at B=3 T=4 H=1 HV=1"


def test_shapes_cover_primes_edges_and_more_sequences_than_multiprocessors() -> None:
    made = shapes(132, 50, 1)
    batches, lengths = ({getattr(s, name) for s in made} for name in ("B", "T"))
    assert {1, 2, 3, 5, 7, 11, 13, 17, 31, 131, 132, 133, 265, 1009} <= batches
    assert {1, 15, 16, 17, 31, 33, 63, 65, 127, 129, 511, 513} <= lengths
    assert {True, False} == {s.packed for s in made if s.B == 133}
    assert all(s.HV % s.H == 0 for s in made) and len(set(made)) == len(made)
    assert made == shapes(132, 50, 1) != shapes(132, 50, 2)


def test_packed_lengths_hold_the_longest_and_empty_ones() -> None:
    lengths = Shape(6, 9, packed=True).lengths
    assert lengths == (9, 3, 7, 1, 5, 9)
    assert Shape(4, 4, packed=True).lengths == (4, 1, 3, 0)
    assert Shape(2, 3).lengths is None


@pytest.mark.slow
def test_the_usual_sweep_of_torch() -> None:
    found = sweep(partial(kda2.kda, impl="torch"), Problem(K=16, V=16), shapes(None, 40, 0))
    assert not found.failing and len(found.tried) > 100


# --- as a user meets it ---

app = typer.Typer()
app.command()(sweep_command)
KERNELS = Path(__file__).parent / "verifier" / "kernels"


def test_the_command_names_the_smallest_failing_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "shapes", lambda sms, draws, seed: [Shape(B, 9) for B in (1, 3, 7, 8)])
    text = (KERNELS / "plain.py").read_text()
    (tmp_path / "seven.py").write_text(text + "\nwhole = run\n\ndef run(**inputs):\n    out = whole(**inputs)\n"
                                       "    if inputs['q'].shape[0] == 7:\n        out['o'] = out['o'] * 2\n"
                                       "    return out\n")  # fmt: skip
    arguments = [str(tmp_path / "seven.py"), "--repeats", "2", "--problem", "K=8,V=8", "--seed", "5"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.output
    assert "the smallest that fails is B=7 T=1 H=1 HV=1: o is off" in done.stdout
    assert "the fault comes with B=7 (right with B=6 and B=8); T, H, HV do not matter" in done.stdout
    assert "seven.py: 3 of 4 shapes right, 2 calls each, seed 5" in done.stdout
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert (told["failing"], told["smallest"]["shape"]["B"], told["tried"]) == (1, 7, 4)


def test_a_kernel_that_refuses_everything_is_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("it runs here")
    monkeypatch.setattr(sweeps, "shapes", lambda sms, draws, seed: [Shape(1, 9)])
    done = CliRunner().invoke(app, ["hopper"])
    assert done.exit_code == 1
    assert "hopper refuses every shape" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["torhc"], "WHAT must be a Python file, or one of"),
        (["torch", "--problem", "T=5"], "--problem must be of K, V and dtype"),
        (["torch", "--problem", "K=x"], "--problem must be T, B, H, HV, K or V with a number above 0"),
        (["hopper", "--problem", "K=7"], "--problem must be K and V that hopper serves"),
        (["torch", "--seed", "-1"], "--seed must be"),
    ],
)
def test_bad_usage(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("impl", ["triton", pytest.param("hopper", marks=pytest.mark.hopper)])
def test_the_librarys_kernels_are_right_on_every_shape(impl: str) -> None:
    base = Problem(K=128, V=128, device="cuda:0")
    found = sweep(partial(kda2.kda, impl=impl), base, shapes(device.gpus()[0].sm_count, 40, 0), repeats=2)
    assert not found.failing, found.comes_with
    assert not [t for t in found.tried if t.outcome != "ok"]
