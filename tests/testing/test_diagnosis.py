"""What is said of a failed (o, final state): the mutant that computes the same, and where else it is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kda2.testing import FAMILIES, MUTANTS, Problem, diagnose, judge, make, oracle, same_roundings
from kda2.testing.verify import expected

PROBLEM = Problem(T=70, H=2, HV=4, K=32, V=16)
RANDOM = "The family random probes the formula itself."
# What differs from where a mutant shows, where that also shows another: chunks of 16 and 32 tokens, T = 600.
ELSEWHERE: dict[str, dict[str, Any]] = {
    "bf16_state": {"T": 250, "K": 128},
    "tail_skipped_32": {"T": 48},
    "tail_state_32": {"T": 48},
}
# The partial chunk is the same for several lengths: 40 = 2 * 16 + 8 = 32 + 8, 70 = 4 * 16 + 6 = ...
ALIKE = {16: "16 or 32", 64: "16, 32 or 64", 128: "16, 32, 64 or 128"}
SAID = {
    f"{name}_{C}": MUTANTS[f"{name}_{C}"].says.replace(f"{C} tokens", f"{alike} tokens")
    for name in ("tail_skipped", "tail_state")
    for C, alike in ALIKE.items()
}


# They leave NaN nearly everywhere, where nothing is left to compare.
NAMELESS = {"nan_after_reset", "factors_infinite_64"}


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in NAMELESS])
def test_the_mutant_that_computes_the_same_is_told(name: str) -> None:
    mutant = MUTANTS[name]
    family = mutant.family
    kwargs = FAMILIES[family].build(mutant.problem(**ELSEWHERE.get(name, {})))
    said = diagnose(mutant.run(**kwargs), expected(kwargs), kwargs, family)
    assert f"It computes KDA {SAID.get(name, mutant.says)} (agrees with that exactly)." in said
    assert said.endswith(f"The family {family} probes {FAMILIES[family].probes}.")


def test_a_rounded_mutant_is_told_with_the_distance() -> None:
    """A kernel without the correction rounds otherwise than the mutant."""
    kwargs = make(replace(PROBLEM, T=20))
    o, state = MUTANTS["no_delta"].run(**{**kwargs, "q": kwargs["q"] * 1.002})
    said = diagnose((o, state), oracle(kwargs), kwargs, "random")
    assert re.search(r"without the delta correction: .* \(agrees with that to 1\.\de-03\)", said)


def test_nothing_is_told_of_what_no_mutant_computes() -> None:
    kwargs = make(replace(PROBLEM, T=20))
    o, state = oracle(kwargs)
    got = (torch.randn(o.shape).bfloat16(), torch.randn(PROBLEM.HV, 32, 16)[None])
    assert "It computes KDA" not in diagnose(got, (o, state), kwargs, "random")


def test_long_calls_are_not_held_to_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = make(replace(PROBLEM, T=20))
    got, want = MUTANTS["no_beta"].run(**kwargs), oracle(kwargs)
    monkeypatch.setattr("kda2.testing.diagnosis.MUTANT_TOKENS", 20)
    assert "without beta" in diagnose(got, want, kwargs, "random")
    monkeypatch.setattr("kda2.testing.diagnosis.MUTANT_TOKENS", 19)
    assert "without beta" not in diagnose(got, want, kwargs, "random")


def spoil(change: Callable[[torch.Tensor, torch.Tensor], None], **changes: Any) -> str:
    """The words for rounded right outputs that `change(o, state)` has written to, without the mutants' sentence."""
    kwargs = make(replace(PROBLEM, **changes))
    want = oracle(kwargs)
    o, state = same_roundings(kwargs)
    assert state is not None
    change(o, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kda2.testing.diagnosis.MUTANT_TOKENS", -1)
        return diagnose((o, state), want, kwargs, "random")


def scaled(o: torch.Tensor, *where: Any) -> None:
    o[where] *= 1.5


@pytest.mark.parametrize(
    ("change", "changes", "says"),
    [
        (lambda o, s: scaled(o, 0, slice(None), 1), {}, "Only head 1 of 4 is wrong."),
        (lambda o, s: scaled(o, 0, slice(None), [0, 2]), {}, "Only heads 0 and 2 of 4 are wrong."),
        (lambda o, s: scaled(o, 0, slice(64, None)), {},
         "Only the last 6 tokens are wrong: the partial chunk, if chunks have 16, 32 or 64 tokens."),
        (lambda o, s: scaled(o, 0, slice(48, None)), {},
         "Tokens from 48 on are wrong, earlier ones are not: an edge of chunks, if they have 16 tokens."),
        (lambda o, s: scaled(o, 0, slice(33, None)), {}, "Tokens from 33 on are wrong, earlier ones are not. Final"),
        (lambda o, s: scaled(o, 0, 37), {}, "Only token 37 of a sequence is wrong."),
        (lambda o, s: scaled(o, 0, slice(32, 48), 3), {},
         "Only head 3 of 4 is wrong. Only tokens 32 to 47 of a sequence are wrong."),
        (lambda o, s: scaled(o, ..., slice(8, None)), {}, "Only channels 8 to 15 of 16 are wrong."),
        (lambda o, s: scaled(o, 1), {"B": 3, "T": 20}, "Only sequence 1 of 3 is wrong."),
        (lambda o, s: scaled(o, 0, slice(5, 9)), {"lengths": (5, 0, 4, 7)}, "Only sequence 2 of 4 is wrong. Final"),
        # sequences of 20 tokens and fewer have none from 32 on
        (lambda o, s: scaled(o, 0, slice(52, None)), {"lengths": (20, 0, 70)},
         "worst element at sequence 2"),
        (lambda o, s: scaled(o, 0, slice(52, None)), {"lengths": (20, 0, 64)},
         "Tokens from 32 on are wrong, earlier ones are not: an edge of chunks, if they have 16 or 32 tokens."),
        (lambda o, s: o[0, 40:].fill_(0.0), {}, "It is 0 there: never written, or skipped."),
        (lambda o, s: o.fill_(0.0), {}, "o is 0 everywhere: never written, or skipped."),
        (lambda o, s: o[0, -2:].fill_(1.0), {"lengths": (9, 7), "tail": 2},
         "Only tokens past the last sequence are wrong."),
        (lambda o, s: o[0, 64:].fill_(torch.nan), {},
         "Only the last 6 tokens have NaN or inf: the partial chunk, if chunks have 16, 32 or 64 tokens."),
        (lambda o, s: o[0, 48:, 2].fill_(torch.inf), {},
         "Only head 2 of 4 has NaN or inf. Tokens from 48 on have NaN or inf, earlier ones have not: an edge"),
        (lambda o, s: s[:, 1].fill_(torch.nan), {}, "o agrees. Final state: 512 elements are NaN or inf"),
        (lambda o, s: s[:, 1].fill_(torch.nan), {}, "Only head 1 of 4 has NaN or inf in the final state."),
        (lambda o, s: s[2].fill_(0.0), {"B": 3, "T": 9},
         "Only sequence 2 of 3 is wrong in the final state. It is 0 there: never written, or skipped."),
        (lambda o, s: o.mul_(32**0.5), {}, "o is 5.66 times what is wanted, everywhere: the scale K^-0.5 is missing."),
        (lambda o, s: o.mul_(0.25), {"scale": 0.25}, "everywhere: the scale 0.25 is applied twice."),
        (lambda o, s: o.mul_(-1), {}, "o is -1 times what is wanted, everywhere: the sign is wrong."),
        (lambda o, s: s.mul_(3), {}, "Final state is 3 times what is wanted, everywhere."),
        (lambda o, s: s.copy_(s.mT.contiguous().view_as(s)), {},
         "It is the wanted state transposed: the other state_layout."),
    ],
)  # fmt: skip
def test_patterns(change: Callable[..., None], changes: dict[str, Any], says: str) -> None:
    said = spoil(change, **changes)
    assert says in said, said
    assert said.endswith(RANDOM)


def test_an_error_everywhere_names_no_place() -> None:
    said = spoil(lambda o, s: o.copy_(torch.randn(o.shape)))
    assert "Only" not in said and "Tokens from" not in said


def test_a_thin_error_is_called_so() -> None:
    said = spoil(lambda o, s: o.mul_(1 + 0.02 * torch.randn(o.shape)))
    assert "The error is spread thinly over tokens and heads" in said and "Only" not in said


def test_what_agrees_is_said_to() -> None:
    assert spoil(lambda o, s: None) == f"o agrees. Final state agrees. {RANDOM}"


@pytest.mark.parametrize(
    ("got", "says"),
    [
        (lambda o, s: (o, None), "Final state: wanted a tensor, got NoneType."),
        (lambda o, s: (o.float(), s), "o: wanted dtype torch.bfloat16, got torch.float32."),
        (lambda o, s: (o[:, 1:], s), "o: wanted shape (1, 9, 4, 16), got (1, 8, 4, 16)."),
    ],
)
def test_what_cannot_be_compared(got: Callable[..., Any], says: str) -> None:
    kwargs = make(replace(PROBLEM, T=9))
    said = diagnose(got(*same_roundings(kwargs)), oracle(kwargs), kwargs, "random")
    # an empty tensor stands for a state that did not come
    assert says in said or ("NoneType" in says and "Final state: wanted shape (1, 4, 32, 16), got (0,)." in said)
    assert "It computes KDA" not in said


def test_a_spoilt_neighbour_is_left_out() -> None:
    kwargs = FAMILIES["nan_neighbour"].build(PROBLEM)
    want = oracle(kwargs)
    o, state = same_roundings(kwargs)
    assert state is not None and want[0].isnan().any()
    assert diagnose((o, state), want, kwargs, "nan_neighbour").startswith("o agrees. Final state agrees.")
    o[0, 60:, 2] = torch.nan  # the sequence after the spoilt one starts at 58
    said = diagnose((o, state), want, kwargs, "nan_neighbour")
    assert "the first at sequence 2, token 2, head 2" in said
    assert "Only head 2 of 4 has NaN or inf. Only sequence 2 of 3 has NaN or inf. Tokens from 2 on" in said
    wrong = MUTANTS["no_beta"].run(**kwargs)
    assert "It computes KDA without beta" in diagnose(wrong, want, kwargs, "nan_neighbour")


def test_limits_of_its_own() -> None:
    """Comparisons under other limits say what counts as wrong; a name that is no family ends in nothing."""
    kwargs = make(replace(PROBLEM, T=9))
    o, state = oracle(kwargs)
    got = (o.bfloat16() * 1.01, state)
    wide = judge((o.bfloat16(), None if state is None else state.float()), (o, state), kwargs)
    assert diagnose(got, (o, state), kwargs, "captured call", wide) == "o agrees. Final state agrees."
