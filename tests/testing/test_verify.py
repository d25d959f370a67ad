"""The judge accepts faithful implementations and kills mutants: one wrong idea each, as seen in real kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import kda2
from kda2.ops.kda import transforms
from kda2.ops.kda.spec import KDA
from kda2.ops.kda.torch import stages
from kda2.ops.kda.transforms import first_state, transform
from kda2.testing import (
    FAMILIES,
    Problem,
    checked,
    judge,
    judge_step,
    limits,
    make,
    make_step,
    oracle,
    same_roundings,
    upcast,
    verify,
    verify_call,
)
from kda2.testing.oracle import Outputs
from kda2.testing.verify import trial

PROBLEM = Problem(T=130, H=1, HV=2, K=32, V=32)
torch_kda = partial(kda2.kda, impl="torch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_kernel_with_rounded_operands_passes(family: str, dtype: torch.dtype) -> None:
    operand = None if dtype == torch.float32 else torch.bfloat16

    def run(**kwargs: Any) -> Outputs:
        return same_roundings(kwargs, operand=operand)

    verdict = verify(run, family, replace(PROBLEM, dtype=dtype))
    assert verdict.ok and 0 <= verdict.margin <= 1, verdict.explain()


def test_an_unknown_family_is_refused_with_those_there_are() -> None:
    with pytest.raises(kda2.InvalidValue, match=r"family must be one of random, .*, got 'nosuch'"):
        verify(torch_kda, "nosuch", PROBLEM)


def no_delta(**kwargs: Any) -> Outputs:
    """Gated linear attention: what the state predicts is not subtracted."""
    call = checked(kwargs)
    x = transform(call.q, call.k, call.v, call.g, call.beta, call.options)
    state, o = first_state(call, torch.float32)[0], []
    for q, k, v, g, beta in zip(*(tokens[0] for tokens in x), strict=True):
        state = g.exp()[..., None] * state + beta[:, None, None] * k[..., None] * v[:, None]
        o.append((state * q[..., None]).sum(-2))
    return torch.stack(o)[None].to(call.v.dtype), state[None]


def no_initial_state(**kwargs: Any) -> Outputs:
    initial = kwargs["initial_state"]
    return torch_kda(**{**kwargs, "initial_state": None if initial is None else torch.zeros_like(initial)})


def swapped_layout(**kwargs: Any) -> Outputs:
    o, state = torch_kda(**kwargs)
    return o, None if state is None else state.mT.contiguous()


def late_decay(**kwargs: Any) -> Outputs:
    """Each token decays by the gate of the one before it."""
    return torch_kda(**{**kwargs, "g": kwargs["g"].roll(1, dims=1)})


def joint_norm(**kwargs: Any) -> Outputs:
    """q is divided by k's norm."""
    q, k = kwargs["q"].float(), kwargs["k"].float()
    norm = k.norm(dim=-1, keepdim=True)
    normalised = {"q": (q / norm).to(kwargs["q"].dtype), "k": (k / norm).to(kwargs["k"].dtype)}
    return torch_kda(**{**kwargs, **normalised, "qk_l2norm": False})


def stale_state(**kwargs: Any) -> Outputs:
    """The final state lacks the last token."""
    shorter = {name: kwargs[name][:, :-1] for name in ("q", "k", "v", "g", "beta")}
    o, _ = torch_kda(**kwargs)
    return o, torch_kda(**{**kwargs, **shorter})[1]


def forgotten_state(**kwargs: Any) -> Outputs:
    return torch_kda(**kwargs)[0], None


def wrong_dtype(**kwargs: Any) -> Outputs:
    o, state = torch_kda(**kwargs)
    return o.float(), state


def test_an_implementation_that_spoils_its_inputs_dies() -> None:
    """The oracle must not be given what is left of them."""

    def run(**kwargs: Any) -> Outputs:
        for name in ("v", "initial_state"):
            kwargs[name].zero_()
        return torch.zeros_like(kwargs["v"]), torch.zeros_like(kwargs["initial_state"])

    for verdict in (verify(run, "random", PROBLEM), verify_call(run, "a call", make(PROBLEM))):
        assert not verdict.ok and "inputs: changed: v, initial_state" in verdict.explain()
        assert "o is off: relative L2 1.00e+00" in verdict.explain()


@pytest.mark.parametrize(
    ("mutant", "family"),
    [
        (no_delta, "random"),
        (no_initial_state, "random"),
        (swapped_layout, "random"),
        (late_decay, "random_depth_gate"),
        (joint_norm, "random"),
        (stale_state, "random"),
        (forgotten_state, "random"),
        (wrong_dtype, "random"),
    ],
)
def test_mutants_of_the_formula_die(mutant: Callable[..., Outputs], family: str) -> None:
    verdict = verify(mutant, family, PROBLEM)
    assert not verdict.ok and verdict.margin > 3, verdict.explain()


def test_a_mutant_in_one_head_and_one_chunk_dies() -> None:
    def run(**kwargs: Any) -> Outputs:
        o, state = torch_kda(**kwargs)
        o[:, 64:66, 1, 3] *= 1.5
        return o, state

    verdict = verify(run, "random", PROBLEM)
    assert not verdict.ok and "head 1, channel 3" in verdict.explain()


def with_mutated(module: Any, name: str, mutant: object) -> Callable[..., Outputs]:
    """The torch implementation with one function or constant replaced, while it runs."""

    def run(**kwargs: Any) -> Outputs:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, mutant)
            return torch_kda(**kwargs)

    return run


def test_differences_of_prefix_sums_die() -> None:
    """exp(G_C - G) from two sums that cancel beside log decays of -1000, or are both infinite at a reset."""

    def from_prefix_sums(g: torch.Tensor) -> torch.Tensor:
        G = g.cumsum(-2)
        return G[..., -1:, :] - G

    run = with_mutated(stages, "suffix_sum", from_prefix_sums)
    fp32 = replace(PROBLEM, dtype=torch.float32)
    assert not verify(run, "deep_gate", fp32).ok and not verify(run, "reset_log", fp32).ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_softplus_that_bends_in_the_wrong_place_dies(dtype: torch.dtype) -> None:
    softplus = torch.nn.functional.softplus
    for mutant in (lambda x: torch.where(x > 0.8, x, softplus(x)), lambda x: softplus(x.clamp(max=20.0))):
        run = with_mutated(torch.nn.functional, "softplus", mutant)
        verdict = verify(run, "open_gate", replace(PROBLEM, dtype=dtype))
        assert not verdict.ok and verdict.margin > 1.5, verdict.explain()


@pytest.mark.parametrize("eps", [1e-12, 1e-7, 1e-5])
def test_another_epsilon_beneath_the_root_dies(eps: float) -> None:
    run = with_mutated(transforms, "L2NORM_EPS", eps)
    verdict = verify(run, "tiny_rows", PROBLEM)
    assert not verdict.ok and verdict.margin > 10, verdict.explain()


def test_truncated_neumann_series_dies_on_repeated_keys() -> None:
    """(I + A)^-1 as a series of 16 terms in place of substitution."""

    def series(A: torch.Tensor, B: torch.Tensor, **_: Any) -> torch.Tensor:
        total, power = torch.zeros_like(A), torch.eye(A.shape[-1]).expand_as(A)
        for _ in range(16):
            total, power = total + power, -power @ A
        return total @ B

    assert not verify(with_mutated(torch.linalg, "solve_triangular", series), "repeated_keys", PROBLEM).ok


def test_limits_have_a_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that diverges must not excuse a kernel that does."""
    monkeypatch.setattr(limits, "same_roundings", lambda kwargs, *_: tuple(1e9 * x for x in oracle(kwargs)))
    verdict = verify(torch_kda, "repeated_keys", PROBLEM)
    assert [c.limit for c in verdict.comparisons] == [0.2, 0.2]


def test_nan_in_another_sequence_is_excused_only_there() -> None:
    def leaks(**kwargs: Any) -> Outputs:
        o, state = torch_kda(**kwargs)
        o[:, 60] = torch.nan  # the sequence after the spoilt one
        return o, state

    assert verify(torch_kda, "nan_neighbour", PROBLEM).ok
    verdict = verify(leaks, "nan_neighbour", PROBLEM)
    assert not verdict.ok and "sequence 1, token 2" in verdict.explain()


def test_state_that_nobody_asked_for() -> None:
    kwargs = make(replace(PROBLEM, final_state=False))
    o, none = oracle(kwargs)
    assert none is None
    extra = judge((o.bfloat16(), torch.zeros(1)), (o, None), kwargs)
    assert [c.ok for c in extra] == [True, False] and "none was asked for" in extra[1].explain()


def test_limits_of_ill_conditioned_families_come_from_the_roundings() -> None:
    verdict = verify(torch_kda, "repeated_keys_neg_eigval", PROBLEM)
    assert verdict.comparisons[0].limit > KDA.tolerance("bf16").relative_l2 and verdict.ok
    assert verdict.comparisons[0].provenance == "2 times the error of the reference with the same roundings"


def test_oracle_starts_from_the_state_as_stored() -> None:
    kwargs = make(replace(PROBLEM, T=0, state=torch.bfloat16))
    _, state = oracle(kwargs)
    assert state is not None and state.dtype == torch.float64
    assert torch.equal(state, kwargs["initial_state"].double())


def test_upcast_reaches_the_gate_and_leaves_the_rest() -> None:
    up = upcast(make(replace(PROBLEM, lengths=(3,), gate="softplus")))
    assert up["gate"].A_log.dtype == torch.float64 and up["cu_seqlens"].dtype == torch.int64
    assert up["scale"] is None and up["state_layout"] == "kv"


def test_checked_fills_in_the_defaults_of_the_call() -> None:
    kwargs = make(replace(PROBLEM, gate="log"))
    call = checked({name: kwargs[name] for name in ("q", "k", "v", "g", "beta")})
    assert call.options.scale == 32**-0.5 and call.initial_state is None and call.options.gate.kind == "log"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", ["saturated_gate", "no_decay"])
def test_a_family_has_limits_of_its_own_for_each_output(family: str, dtype: str) -> None:
    found = verify(torch_kda, family, replace(PROBLEM, dtype=DTYPES[dtype])).comparisons
    for c, output in zip(found, ("o", "final_state"), strict=True):
        own = KDA.tolerance(dtype, family, output)
        assert (own.family, own.output) == (family, output)
        assert (c.limit, c.element_limit, c.provenance) == (own.relative_l2, own.element_rms, own.provenance)


def test_a_call_of_no_family_has_the_limits_of_any() -> None:
    (o, _) = verify_call(torch_kda, "a call", make(PROBLEM)).comparisons
    assert o.limit == KDA.tolerance("bf16").relative_l2
    assert o.limit == max(t.relative_l2 for t in KDA.tolerances if t.dtype == "bf16")


def test_a_state_of_fewer_digits_is_held_to_its_own_dtype() -> None:
    kwargs = make(replace(PROBLEM, dtype=torch.float32, state=torch.bfloat16))
    o, state = verify_call(torch_kda, "a call", kwargs).comparisons
    assert o.limit == KDA.tolerance("fp32").relative_l2 and state.limit == KDA.tolerance("bf16").relative_l2


# Few numbers.

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FEW = [
    {"T": 1, "K": 20, "V": 1, "state": None},
    {"T": 1, "K": 1, "V": 1, "neg_eigval": True},
    {"T": 2, "K": 2, "V": 2, "gate": "log", "qk_l2norm": False},
    {"T": 3, "K": 8, "V": 20, "gate": "softplus", "beta_sigmoid": False},
    {"T": 4, "K": 20, "V": 8, "regime": "none", "state": torch.bfloat16},
    {"T": 70, "K": 1, "V": 1},
    {"lengths": (1, 0, 2), "K": 2, "V": 20},
]


def few(changes: dict[str, Any], dtype: str, seed: int) -> Problem:
    return Problem(H=1, HV=1, dtype=DTYPES[dtype], seed=seed, **changes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", FEW, ids=str)
def test_faithful_kernels_pass_on_few_numbers_whatever_the_seed(changes: dict[str, Any], dtype: str) -> None:
    """o = scale S^T q may be nearly zero by chance, and then any rounding is large beside it."""
    operand = None if dtype == "fp32" else torch.bfloat16
    for seed in range(20):
        on = trial("random", few(changes, dtype, seed))
        answers = [kda2.kda(**on.kwargs, impl="reference")]
        answers += [same_roundings(on.kwargs, chunk, operand) for chunk in (16, 64)]
        for got in answers:
            verdict = on.judge(got)
            assert verdict.ok, f"seed {seed}: {verdict.explain()}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(5))
def test_mutants_die_on_few_numbers(seed: int, dtype: str) -> None:
    for mutant in (no_initial_state, no_scale):
        verdict = verify(mutant, "one_token", few({"K": 20, "V": 20}, dtype, seed))
        assert not verdict.ok and verdict.margin > 3, verdict.explain()


def no_scale(**kwargs: Any) -> Outputs:
    return torch_kda(**{**kwargs, "scale": 1.0})


def test_an_output_that_is_zero_by_chance_counts_as_large_as_its_terms() -> None:
    """q . k = 1 - 1, so o = 0; with other signs it is 6, 0 or -6: 3 sqrt(2) on the average."""
    ones = torch.ones(1, 1, 1, 2)
    kwargs = {
        "q": ones, "k": torch.tensor([1.0, -1.0]).view(1, 1, 1, 2), "v": 3 * ones[..., :1], "g": 0 * ones,
        "beta": ones[..., 0], "scale": 1.0,
    }  # fmt: skip
    want = oracle(kwargs)
    assert want[0].item() == 0.0
    by = limits.yardstick(kwargs, want)
    assert 3.5 < by.floors[0] < 5.0
    (o,) = judge((torch.full((1, 1, 1, 1), 1e-6), None), want, kwargs)
    assert o.ok and o.relative_l2 == pytest.approx(1e-6 / by.floors[0])


@pytest.mark.parametrize("changes", [{"B": 2, "T": 3}, {"lengths": (2, 0, 1), "layout": "vk"}, {"gate": "softplus"}])
def test_copies_are_calls_of_their_own(changes: dict[str, Any]) -> None:
    kwargs = make(Problem(**{"T": 4, "H": 2, "HV": 4, "K": 8, "V": 4, "dtype": torch.float32, **changes}))
    copies = limits.with_signs(kwargs, 3)
    o, state = oracle(copies)
    for i in range(3):
        q, v = (copies[name].chunk(3, 2)[i] for name in ("q", "v"))
        assert torch.equal(q.abs(), kwargs["q"].abs()) and torch.equal(v.abs(), kwargs["v"].abs())
        want = oracle({**kwargs, "q": q, "v": v})
        assert state is not None and want[1] is not None
        torch.testing.assert_close(o.chunk(3, 2)[i], want[0])
        torch.testing.assert_close(state.chunk(3, 1)[i], want[1])
    assert not torch.equal(*(copies["q"].chunk(3, 2)[:2]))


def test_a_call_of_many_numbers_needs_no_copies() -> None:
    for changes, count in (({"T": 64}, 0), ({"T": 63}, 2), ({"T": 1}, 64), ({"T": 0}, 0), ({"T": 64, "K": 8}, 8)):
        kwargs = make(Problem(**{"H": 1, "HV": 1, **changes}))
        assert limits.copies_needed(kwargs, oracle(kwargs)) == count


def test_a_step_that_is_zero_by_chance() -> None:
    """One row in fp32, a rounding away from the truth."""
    for seed in range(20):
        kwargs = make_step(Problem(B=1, H=1, HV=1, K=24, V=1, dtype=torch.float32, seed=seed))
        o, state = kda2.kda_step(**{**kwargs, "inplace": False}, impl="torch")
        assert all(c.ok for c in judge_step((o, state), kwargs)), seed
        assert not all(c.ok for c in judge_step((o + 1e-2 * state.square().mean().sqrt(), state), kwargs)), seed
