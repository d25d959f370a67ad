"""Every mutant dies: `verify` refuses it by more than three times a limit, in fp32 and in bf16, and what does not apply
to a call changes nothing in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import kda2
from kda2.testing import FAMILIES, MUTANTS, Problem, make, oracle, rms, verify
from kda2.testing.recurrence import evaluate, lengths

PROBLEM = Problem(T=40, H=2, HV=4, K=32, V=32)
# (family, what differs from PROBLEM): where each mutant shows. Of the gate's slips most show only where much decays.
WHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "no_delta": ("random", {}),
    "decay_after_correction": ("saturated_gate", {}),
    "decay_after_update": ("random_depth_gate", {}),
    "output_before_update": ("random", {}),
    "output_before_token": ("random", {}),
    "printed_step": ("random", {}),
    # what is rounded away is forgotten after K / beta tokens: it takes many channels to pile up
    "bf16_state": ("no_decay", {"T": 600, "H": 1, "HV": 1, "K": 256, "V": 16}),
    "no_gate": ("random", {"regime": "strong"}),
    "gate_base_2": ("random_depth_gate", {}),
    "gate_log2e_twice": ("random_depth_gate", {}),
    "gate_of_previous_token": ("random", {"regime": "strong"}),
    "gate_of_next_token": ("random", {"regime": "strong"}),
    "gate_per_head": ("random_depth_gate", {}),
    "no_dt_bias": ("random", {"regime": "strong"}),
    "no_A_log": ("random", {}),
    "A_log_of_head_0": ("random", {"regime": "strong"}),
    "no_scale": ("random", {}),
    "own_scale": ("random", {"scale": 0.2}),
    "no_beta": ("random", {}),
    "beta_twice": ("random", {}),
    "no_beta_sigmoid": ("random", {}),
    "no_neg_eigval": ("random", {"neg_eigval": True}),
    "no_l2norm": ("random", {}),
    "joint_l2norm": ("random", {}),
    "l2norm_eps_1e-12": ("tiny_rows", {}),
    "l2norm_eps_1e-05": ("tiny_rows", {}),
    "last_head_reads_head_0": ("random", {}),
    "keys_of_neighbour": ("random", {}),
    "heads_interleaved": ("random", {}),
    "no_initial_state": ("random", {}),
    "initial_state_transposed": ("random", {}),
    "initial_state_of_sequence_0": ("chunk_edges", {}),
    "initial_state_halved": ("random", {}),
    "sequences_joined": ("ragged", {}),
    "final_state_early": ("random", {}),
    "final_state_transposed": ("random", {}),
    "final_state_is_initial": ("random", {}),
    **{f"{name}_16": ("random", {}) for name in ("state_lost", "no_solve", "tail_skipped", "tail_state")},
    **{f"{name}_32": ("random", {}) for name in ("state_lost", "no_solve", "tail_skipped", "tail_state")},
    **{f"{name}_64": ("random", {"T": 70}) for name in ("state_lost", "no_solve", "tail_skipped", "tail_state")},
    **{f"{name}_128": ("random", {"T": 140}) for name in ("state_lost", "no_solve", "tail_skipped", "tail_state")},
}


def test_the_table_names_every_mutant() -> None:
    assert set(WHERE) == set(MUTANTS)
    assert all(name == mutant.name for name, mutant in MUTANTS.items())


def case(name: str) -> tuple[str, Problem]:
    family, changes = WHERE[name]
    return family, replace(PROBLEM, **changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", WHERE)
def test_mutants_die(name: str, dtype: torch.dtype) -> None:
    family, problem = case(name)
    problem = replace(problem, dtype=dtype)
    assert MUTANTS[name].applies(FAMILIES[family].build(problem))
    verdict = verify(MUTANTS[name].run, family, problem)
    assert not verdict.ok and verdict.margin > 3, f"{verdict.margin:.2f} times its limit\n{verdict.explain()}"
    assert [c.mismatch for c in verdict.comparisons] == ["", ""]


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
    needs = ("A_log", "dt_bias", "initial_state", "final_state_is_initial", "printed_step")  # cannot run without
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
        "final_state_transposed", "sequences_joined",
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
