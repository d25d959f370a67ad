"""Every mutant dies: `verify` refuses it by more than three times a limit, in fp32 and in bf16, and what does not apply
to a call changes nothing in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import kda2
from kda2.testing import FAMILIES, MUTANTS, fingerprint, judge_step, make, make_step, oracle, rms, upcast, verify
from kda2.testing.mutants import STEP_MUTANTS
from kda2.testing.mutants.table import PROBLEM, STEP_PROBLEM
from kda2.testing.recurrence import evaluate, evaluate_step, lengths

DTYPES = [torch.bfloat16, torch.float32]


def test_the_tables_name_every_mutant() -> None:
    assert all(name == mutant.name for table in (MUTANTS, STEP_MUTANTS) for name, mutant in table.items())
    assert len({mutant.says for mutant in MUTANTS.values()}) == len(MUTANTS)
    assert len({mutant.says for mutant in STEP_MUTANTS.values()}) == len(STEP_MUTANTS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_die(name: str, dtype: torch.dtype) -> None:
    mutant = MUTANTS[name]
    problem = mutant.problem(dtype=dtype)
    assert mutant.applies(FAMILIES[mutant.family].build(problem))
    verdict = verify(mutant.run, mutant.family, problem)
    assert not verdict.ok and verdict.margin > 3, f"{verdict.margin:.2f} times its limit\n{verdict.explain()}"
    assert [c.mismatch for c in verdict.comparisons] == ["", ""]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STEP_MUTANTS)
def test_mutants_of_the_step_die(name: str, dtype: torch.dtype) -> None:
    kwargs = STEP_MUTANTS[name].call(dtype=dtype)
    before = fingerprint(kwargs)
    found = judge_step(STEP_MUTANTS[name].run(**kwargs), kwargs)
    assert fingerprint(kwargs) == before
    assert max(c.margin for c in found) > 3, "\n".join(c.explain() for c in found)
    assert [c.mismatch for c in found] == ["", ""]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("indices", [None, (4, -1, 0, 5, 2)])
@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_without_a_change_it_is_the_step(layout: str, indices: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    problem = replace(STEP_PROBLEM, dtype=torch.float32, layout=layout, V=16, state=dtype)
    kwargs = make_step(problem, slots=7, indices=indices)
    got = evaluate_step(kwargs)
    want = kda2.kda_step(**upcast(kwargs), inplace=False, impl="reference")
    for x, ref, stored in zip(got, want, (torch.float32, dtype), strict=True):
        assert x.dtype == stored
        torch.testing.assert_close(x, ref.to(stored), rtol=1e-6, atol=1e-7)


CALLS = {
    "dense": make(replace(PROBLEM, B=2, T=19, K=8, V=16)),
    "packed": make(replace(PROBLEM, lengths=(5, 0, 17), tail=2, K=8, V=16, H=1, layout="vk")),
    "one token": make(replace(PROBLEM, T=1, K=1, V=4, H=4, gate="log", qk_l2norm=False, beta_sigmoid=False)),
    "no gate": make(replace(PROBLEM, T=18, K=8, V=8, regime="none", dt_bias=False, gate="softplus", state=None)),
    "own scale": make(replace(PROBLEM, T=18, K=8, V=8, HV=2, H=1, scale=1.0, final_state=False, neg_eigval=True)),
    "no tokens": make(replace(PROBLEM, lengths=(0, 0), K=8, V=8)),
    "no sequences": make(replace(PROBLEM, lengths=(), K=8, V=8)),
}


def pairs(kwargs: dict[str, Any], name: str | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(got, want) of each output: of the mutant, or of the recurrence without a change."""
    got = evaluate(kwargs) if name is None else MUTANTS[name].run(**kwargs)
    for x, want in zip(got, oracle(kwargs), strict=True):
        assert (x is None) == (want is None)
        if x is not None and want is not None:
            yield x, want


@pytest.mark.parametrize("call", CALLS)
def test_without_a_change_it_is_the_oracle(call: str) -> None:
    ran = kda2.kda(**CALLS[call], impl="torch")
    for (got, want), other in zip(pairs(CALLS[call]), ran, strict=False):
        assert other is not None and got.dtype == other.dtype
        assert torch.equal(got, want.to(got.dtype))


@pytest.mark.parametrize("call", CALLS)
def test_what_does_not_apply_changes_nothing(call: str) -> None:
    kwargs = {**CALLS[call], **{name: CALLS[call][name].float() for name in ("q", "k", "v")}}
    needs = (  # they cannot run without what they change, or suppose that it is there
        "A_log", "dt_bias", "initial_state", "final_state_is_initial", "printed_step", "lower_bound", "tail_owned",
        "beta_sigmoid_twice", "l2norm_of_both", "constant_norm",
    )  # fmt: skip
    for name, mutant in MUTANTS.items():
        if mutant.applies(kwargs):
            changed = [not torch.equal(got, want.to(got.dtype)) for got, want in pairs(kwargs, name)]
            assert any(changed), f"{name} applies and changes nothing"
        elif not any(word in name for word in needs):
            for got, want in pairs(kwargs, name):
                assert rms(got.double() - want) <= 1e-3 * rms(want), f"{name} does not apply and changes something"


def test_no_tokens_no_mutant_but_of_states() -> None:
    applies = {name for name, mutant in MUTANTS.items() if mutant.applies(CALLS["no tokens"])}
    assert applies == {
        "no_initial_state", "initial_state_transposed", "initial_state_of_sequence_0", "initial_state_halved",
        "initial_state_of_neighbour", "empty_sequence_zero", "final_state_transposed", "sequences_joined",
    }  # fmt: skip
    assert lengths(CALLS["no tokens"]) == [0, 0] and lengths(CALLS["dense"]) == [19, 19]


def one_head(**changes: Any) -> dict[str, Any]:
    """Two tokens, K = V = 2, S_0 = 0, no decay, scale 1; k = e0 then (e0 + e1), q = (1, 2), v = (1, 0) then (0, 4)."""
    tokens = {
        "q": torch.tensor([[1.0, 2.0], [1.0, 2.0]]),
        "k": torch.tensor([[1.0, 0.0], [1.0, 1.0]]),
        "v": torch.tensor([[1.0, 0.0], [0.0, 4.0]]),
        "g": torch.zeros(2, 2),
    }
    shaped = {name: x[None, :, None] for name, x in tokens.items()}
    return {**shaped, "beta": torch.full((1, 2, 1), 0.5), "scale": 1.0, "output_final_state": True, **changes}


@pytest.mark.parametrize(
    ("name", "state", "o"),
    [
        # S_1 = e0 (.5, 0); e_2 = (0, 4) - (.5, 0); S_2 = S_1 + .5 (1, 1)^T (-.5, 4)
        (None, [[0.25, 2.0], [-0.25, 2.0]], [[0.5, 0.0], [-0.25, 6.0]]),
        ("no_delta", [[0.5, 2.0], [0.0, 2.0]], [[0.5, 0.0], [0.5, 6.0]]),
        ("no_solve_16", [[0.5, 2.0], [0.0, 2.0]], [[0.5, 0.0], [0.5, 6.0]]),
        ("no_beta", [[0.0, 4.0], [-1.0, 4.0]], [[1.0, 0.0], [-2.0, 12.0]]),
        ("output_before_update", [[0.25, 2.0], [-0.25, 2.0]], [[0.0, 0.0], [0.5, 0.0]]),
        ("final_state_early", [[0.5, 0.0], [0.0, 0.0]], [[0.5, 0.0], [-0.25, 6.0]]),
        ("final_state_transposed", [[0.25, -0.25], [2.0, 2.0]], [[0.5, 0.0], [-0.25, 6.0]]),
        # S_1 = e0 (1, 0); S_1 k_2 = (1, 0); S_2 = S_1 - .5 (1, 0)^T (0, 4) + (1, 1)^T (0, 4)
        ("printed_step", [[1.0, 2.0], [0.0, 4.0]], [[1.0, 0.0], [1.0, 10.0]]),
    ],
)
def test_by_hand(name: str | None, state: list[list[float]], o: list[list[float]]) -> None:
    kwargs = one_head()
    got_o, got_state = evaluate(kwargs) if name is None else MUTANTS[name].run(**kwargs)
    assert got_state is not None
    assert got_o[0, :, 0].tolist() == o and got_state[0, 0].tolist() == state


def test_decays_by_hand() -> None:
    """g = ln(1/4) at the second token: a factor of 1/4; read as base 2 one of 2^ln(1/4)."""
    kwargs = one_head(g=torch.tensor([[0.0, 0.0], [1.0, 1.0]])[None, :, None] * torch.tensor(0.25).log())
    factor = 2.0 ** torch.tensor(0.25).log()
    expected = {
        # S = f (.5, 0) e0 + .5 (1, 1)^T ((0, 4) - f' (.5, 0)): (f decays the state, f' what is predicted)
        "gate_base_2": (factor, factor),
        "gate_of_previous_token": (1.0, 1.0),
        "no_gate": (1.0, 1.0),
        "decay_after_correction": (0.25, 1.0),
    }
    for name, (f, predicted) in expected.items():
        state = MUTANTS[name].run(**kwargs)[1]
        assert state is not None
        want = torch.tensor([[0.5 * f - 0.25 * predicted, 2.0], [-0.25 * predicted, 2.0]])
        torch.testing.assert_close(state[0, 0], want, msg=name)
