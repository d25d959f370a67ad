"""Error growth: a known law is found, told apart from others, and left open where the points do not decide."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

import kda2
from kda2.cli.growth import growth as growth_command
from kda2.errors import InvalidValue, UnsupportedTarget
from kda2.testing import Problem, oracle
from kda2.workbench import growth
from kda2.workbench import ledger as ledgers
from kda2.workbench.growth import Growth, Plan, doublings, fit, measure
from kda2.workbench.journal import Journal

TOKENS = doublings("64:65536")
SMALL = Problem(H=1, HV=1, K=8, V=8, dtype=torch.float32)
Law = Callable[[int], float]


def with_noise(law: Law, noise: float, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return [law(t) * math.exp(noise * rng.standard_normal()) for t in TOKENS]


@pytest.mark.parametrize(
    ("law", "named", "order"),
    [
        (lambda t: 1.7e-3, "flat", 0.0),
        (lambda t: 1e-4 * t**0.5, "sqrt", 0.5),
        (lambda t: 1e-6 * t, "linear", 1.0),
        (lambda t: 1e-5 * t**0.75, "power", 0.75),
        (lambda t: 1e-4 * t**0.25, "power", 0.25),
        (lambda t: t**-0.5, "falling", -0.5),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_a_known_power_is_found_with_its_standard_error(law: Law, named: str, order: float, seed: int) -> None:
    found = fit(TOKENS, with_noise(law, 0.03, seed))
    assert found.law == named
    assert found.order is not None and found.order_error is not None
    # five standard errors: one in a million
    assert abs(found.order - order) < 5 * found.order_error < 0.1


@pytest.mark.parametrize("slope", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_logarithm_is_told_from_a_power(slope: float, seed: int) -> None:
    found = fit(TOKENS, with_noise(lambda t: 1e-3 * (1 + slope * math.log2(t / 64)), 0.01, seed))
    assert found.law == "logarithmic"
    assert found.log_residual is not None and found.power_residual is not None
    assert found.log_residual < 0.5 * found.power_residual


def test_what_the_points_do_not_decide_stays_open() -> None:
    """Over so few lengths a small power and a logarithm look alike."""
    found = fit(TOKENS[:6], [1e-3 * t**0.05 for t in TOKENS[:6]])
    assert found.law == "inconclusive"
    assert "fit equally well" in found.says


def test_scatter_names_no_law() -> None:
    rng = np.random.default_rng(0)
    found = fit(TOKENS, [1e-3 * t**0.3 * math.exp(1.2 * rng.standard_normal()) for t in TOKENS])
    assert found.law == "inconclusive"


def test_a_rounding_of_the_output_hides_the_law_of_short_sequences() -> None:
    """A floor of 1.7e-3, as bf16 outputs have it, and linear growth that passes it at 256 tokens."""
    found = fit(TOKENS, [1.7e-3 * math.hypot(1, t / 256) for t in TOKENS])
    assert found.law == "linear"
    assert found.from_tokens is not None and found.from_tokens >= 512


@pytest.mark.parametrize(
    ("errors", "law"),
    [([0.0] * 11, "exact"), ([0.0] * 8 + [1e-7] * 3, "inconclusive"), ([1e-7] * 4 + [0.0] * 7, "inconclusive")],
)
def test_errors_of_nothing(errors: list[float], law: str) -> None:
    assert fit(TOKENS, errors).law == law


@pytest.mark.parametrize("text", ["64", "0:64", "128:64", "a:b", "64:", "-1:5"])
def test_ranges_that_are_none(text: str) -> None:
    with pytest.raises(InvalidValue, match="64:65536"):
        doublings(text)


def test_lengths_double_up_to_the_last() -> None:
    assert doublings("64:1000") == (64, 128, 256, 512)
    assert doublings("7:7") == (7,)


@pytest.mark.parametrize(
    ("gates", "tokens"), [(("weird",), (64,)), ((), (64,)), (("none",), (64, 64)), (("none",), ())]
)
def test_a_plan_that_is_none(gates: tuple[Any, ...], tokens: tuple[int, ...]) -> None:
    with pytest.raises(InvalidValue):
        Plan(SMALL, gates, tokens)


# --- measuring ---


def drifting(law: Law) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """KDA in fp64 whose outputs are off by `law` of the token's position, relative to the output's own size; its state
    by the law of the last."""

    def run(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
        o, state = oracle(kwargs, impl="torch")
        T = o.shape[1]
        off = torch.tensor([law(t + 1) for t in range(T)], dtype=torch.float64)
        signs = torch.ones(T).double()
        signs[::2] = -1
        assert state is not None
        return o * (1 + (signs * off)[None, :, None, None]), state * (1 + law(T))

    return run


def plan(budget_s: float = math.inf, last: int = 4096) -> Plan:
    return Plan(SMALL, ("weak",), doublings(f"64:{last}"), budget_s)


def quiet(text: str) -> None:
    pass


@pytest.mark.parametrize(
    ("law", "named"),
    [
        (lambda t: 1e-6 * t**0.5, "sqrt"),
        (lambda t: 1e-8 * t, "linear"),
        (lambda t: 1e-5 * math.log2(t), "logarithmic"),
        (lambda t: 1e-5, "flat"),
    ],
)
def test_the_law_of_a_kernel_is_found(law: Law, named: str) -> None:
    (curve,) = measure(drifting(law), "drifting", plan(), quiet).curves
    assert [p.tokens for p in curve.points] == [64, 128, 256, 512, 1024, 2048, 4096]
    assert curve.fits["final state"].law == named
    # 4 hundredths of the error: the injected law differs across the last 64 tokens of a short sequence
    last = curve.points[-1].errors[f"o, last {growth.TAIL} tokens"]
    assert last == pytest.approx(law(4096), rel=0.04)


def test_the_last_tokens_show_what_the_whole_hides() -> None:
    """Linear growth averages to the same order over the whole, but a fault of the end does not."""
    (curve,) = measure(drifting(lambda t: 1e-9 if t <= 4032 else 1e-3), "late", plan(), quiet).curves
    errors = curve.points[-1].errors
    whole, last = errors["o"], errors[f"o, last {growth.TAIL} tokens"]
    assert whole is not None and last == pytest.approx(1e-3, rel=1e-6) and whole < 0.2 * last


def test_the_oracle_in_parts_is_the_oracle() -> None:
    """Walked in parts, its state handed on, it agrees with the token recurrence over the whole."""
    (curve,) = measure(lambda **kwargs: oracle(kwargs), "fp64", plan(last=512), quiet).curves
    assert all(x is not None and x < 1e-12 for p in curve.points for x in p.errors.values())


def test_what_ships_is_flat() -> None:
    """In bf16 the rounding of the output is all that there is."""
    wanted = Plan(replace(SMALL, dtype=torch.bfloat16), ("weak",), doublings("64:4096"))
    (curve,) = measure(partial(kda2.kda, impl="torch"), "torch", wanted, quiet).curves
    assert {name: f.law for name, f in curve.fits.items()}["o"] == "flat"
    assert not curve.failed and not curve.ended


def test_the_budget_ends_a_curve_and_says_where() -> None:
    """By a clock that takes a second for a token."""
    now = 0.0

    def run(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
        nonlocal now
        now += kwargs["q"].shape[1]
        return kda2.kda(**kwargs, impl="torch")

    (curve,) = measure(run, "slow", plan(budget_s=600), quiet, clock=lambda: now).curves
    # 64 to warm up, then 64 + 128 + 256 = 512 s; 512 more would be 424 s too late
    assert curve.points[-1].tokens == 256
    assert curve.ended == "stopped at T=256: budget, which T=512 would exceed by about 424 s"
    assert not curve.failed


def test_gates_share_the_budget() -> None:
    now = 0.0

    def run(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
        nonlocal now
        now += kwargs["q"].shape[1]
        return kda2.kda(**kwargs, impl="torch")

    wanted = Plan(SMALL, ("weak", "none"), doublings("64:512"), 600.0)
    first, second = measure(run, "slow", wanted, quiet, clock=lambda: now).curves
    assert (first.points[-1].tokens, second.points[-1].tokens) == (128, 128)


def test_a_kernel_that_breaks_at_some_length(tmp_path: Path) -> None:
    def run(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if kwargs["q"].shape[1] > 512:
            raise RuntimeError("too long\nfor me")
        return kda2.kda(**kwargs, impl="torch")

    found = measure(run, "breaks", plan(), quiet, Journal(tmp_path / "ledger.jsonl"))
    (curve,) = found.curves
    assert found.failed
    assert curve.ended == "stopped before T=1024: it raised RuntimeError: too long"
    assert curve.points[-1].tokens == 512
    (line,) = ledgers.read(tmp_path / "ledger.jsonl")
    assert line.kind == "growth"
    assert Growth.model_validate(line.payload) == found


def test_what_is_not_finite_is_told_as_such(tmp_path: Path) -> None:
    def run(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
        o, state = kda2.kda(**kwargs, impl="torch")
        return (o * torch.nan if o.shape[1] > 256 else o), state

    found = measure(run, "nan", plan(), quiet, Journal(tmp_path / "ledger.jsonl"))
    (curve,) = found.curves
    assert curve.failed and curve.ended == "stopped at T=512: not finite"
    assert curve.points[-1].errors["o"] is None
    (line,) = ledgers.read(tmp_path / "ledger.jsonl")
    json.dumps(line.payload, allow_nan=False)


def test_an_implementation_that_does_not_run_here_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("it runs here")
    with pytest.raises(UnsupportedTarget):
        measure(partial(kda2.kda, impl="hopper"), "hopper", plan(), quiet)


# --- as a user meets it ---

app = typer.Typer()
app.command()(growth_command)
KERNELS = Path(__file__).parent / "verifier" / "kernels"


def test_the_command_appends_to_a_ledger_and_tells_the_law(tmp_path: Path) -> None:
    path = tmp_path / "curves" / "ledger.jsonl"
    arguments = ["--tokens", "64:1024", "--gates", "weak,none", "--channels", "8", "--out", str(path)]
    done = CliRunner().invoke(app, ["torch", *arguments])
    assert done.exit_code == 0, done.output
    assert "flat; order" in done.stdout
    done = CliRunner().invoke(app, [str(KERNELS / "plain.py"), *arguments, "--json", "--seed", "3"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["growth"]["name"], told["growth"]["seed"]) == ("plain.py", 3)
    assert [curve["gate"] for curve in told["growth"]["curves"]] == ["weak", "none"]
    assert [line.payload["name"] for line in ledgers.read(path)] == ["torch", "plain.py"]


def test_a_kernel_that_fails_somewhere_fails_the_command(tmp_path: Path) -> None:
    text = (KERNELS / "plain.py").read_text()
    only_short = "    assert inputs['q'].shape[1] < 200\n    return whole(**inputs)\n"
    (tmp_path / "short.py").write_text(f"{text}\nwhole = run\n\ndef run(**inputs):\n{only_short}")
    arguments = ["--tokens", "64:512", "--gates", "weak", "--channels", "8", "--out", str(tmp_path / "ledger.jsonl")]
    done = CliRunner().invoke(app, [str(tmp_path / "short.py"), *arguments])
    assert done.exit_code == 1
    assert "weak: stopped before T=256: it raised KDA2Error: it raised AssertionError (short.py, line " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["torhc"], "WHAT must be a Python file, or one of"),
        (["none.py"], "that can be read"),
        (["torch", "--gates", "odd"], "--gates must be among strong, weak, mixed, none, got 'odd'"),
        (["torch", "--tokens", "5"], "--tokens must be a range"),
        (["torch", "--dtype", "fp8"], "--dtype must be one of bf16, fp16, fp32"),
        (["torch", "--budget", "soon"], "--budget must be a time"),
        (["hopper", "--channels", "7"], "--channels must be a number that hopper serves, got 7"),
    ],
)
def test_bad_usage(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "ledger.jsonl")])
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", pytest.param("hopper", marks=pytest.mark.hopper)])
def test_the_librarys_kernels_do_not_grow(impl: str) -> None:
    """Errors of whole sequences, final states among them, are at no length beyond the kernels' own limit."""
    problem = Problem(H=2, HV=2, K=128, V=128, device="cuda:0")
    wanted = Plan(problem, ("weak", "none"), doublings("64:16384"))
    for curve in measure(partial(kda2.kda, impl=impl), impl, wanted, quiet).curves:
        assert not curve.failed and len(curve.points) == 9
        assert all(x is not None and x < 6e-3 for p in curve.points for x in p.errors.values())
        assert all(f.law != "linear" for f in curve.fits.values())
