"""A file that answered right is asked the same call with other contents in the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kda2.testing import Problem, make
from kda2.workbench.audit.catalogue import FOLDER
from kda2.workbench.verifier import Subject, questions
from kda2.workbench.verifier.numerics import question_words
from kda2.workbench.verifier.questions import AGAIN, BLOCK, OTHER, OTHER_DTYPES
from kda2.workbench.verifier.words import reasons

SIZES = {"T": 20, "B": 2, "H": 1, "HV": 2, "K": 16, "V": 12}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("cached_by_pointer", {OTHER, BLOCK}),
        ("cached_by_shape", {OTHER, BLOCK}),
        ("cached_by_fingerprint", {BLOCK}),
        ("work_in_prepare", {OTHER, BLOCK}),
        ("poisoned_only", {OTHER, BLOCK}),
    ],
)
def test_an_answer_that_was_kept_is_refused(shared: Any, name: str, wrong: set[str]) -> None:
    verdict = shared.numerics(Subject.of_file(FOLDER / f"{name}.py"), "random", sizes=SIZES)
    families = verdict.evidence["families"]
    assert verdict.outcome == "fail" and families["random"]["ok"]
    assert {x for x, result in families.items() if not result["ok"]} == wrong
    assert {families[x]["gate"] for x in wrong} == {"repeat"}
    assert (
        f"asked again with {question_words(BLOCK) if wrong == {BLOCK} else 'other contents'}" in (reasons(verdict)[0])
    )


@pytest.mark.parametrize("name", ["honest", "honest_workspace"])
def test_what_computes_each_time_passes(shared: Any, name: str) -> None:
    verdict = shared.numerics(Subject.of_file(FOLDER / f"{name}.py"), "random", "ragged", sizes=SIZES)
    assert verdict.outcome == "pass", reasons(verdict)
    assert list(verdict.evidence["families"]) == ["random", *AGAIN, "ragged", *OTHER_DTYPES]


def test_a_wrong_answer_is_not_asked_again(shared: Any, plain: str, changed: Callable[..., str]) -> None:
    verdict = shared.numerics(shared.file(changed(plain, "scale * (S", "(S")), "random", "one_token")
    assert list(verdict.evidence["families"]) == ["random", "one_token"]


def test_a_call_without_tokens_has_no_other_contents(shared: Any, plain: str) -> None:
    verdict = shared.numerics(shared.file(plain), "all_empty", "random")
    assert verdict.outcome == "pass", reasons(verdict)
    assert list(verdict.evidence["families"]) == ["all_empty", "random", *OTHER_DTYPES]


@pytest.mark.parametrize("family", ["one_token", "ragged", "options", "packed_bare", "bare"])
def test_any_family_can_be_the_one_that_is_asked_again(shared: Any, plain: str, family: str) -> None:
    verdict = shared.numerics(shared.file(plain), family)
    assert verdict.outcome == "pass", reasons(verdict)
    assert list(verdict.evidence["families"]) == [family, *AGAIN]


def test_the_block_is_of_some_tokens_of_one_head() -> None:
    kwargs = make(Problem(T=40, B=2, H=1, HV=2, K=8, V=8))
    other = questions._other_block(kwargs, seed=3)
    differs = (other["v"] != kwargs["v"]).any(-1).flatten(0, 1)  # [tokens, heads]
    assert sorted(differs.sum(0).tolist()) == [0, 10]
    rows = differs.any(1).nonzero().flatten()
    assert rows.tolist() == list(range(int(rows[0]), int(rows[0]) + 10))
    assert all(other[name] is kwargs[name] for name in kwargs if name != "v")


def test_the_block_of_a_strided_call_is_another_too() -> None:
    kwargs = make(Problem(T=40, B=2, H=1, HV=2, K=8, V=8))
    strided = {**kwargs, "v": kwargs["v"].transpose(1, 2).contiguous().transpose(1, 2)}
    assert not torch.equal(questions._other_block(strided, seed=3)["v"], kwargs["v"])
