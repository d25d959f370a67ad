"""Reading a problem from text: what it means, and what is refused with which words."""

from __future__ import annotations

import pytest

import kda2
from kda2.workbench.planner import Problem


def test_nothing_given_is_the_default() -> None:
    p = Problem.parse("")
    assert p == Problem() and p.sizes == {
        "B": 1, "T": 8192, "tokens": 8192, "H": 64, "HV": 64, "K": 128, "V": 128, "C": 64, "N": 1, "NT": 128
    }  # fmt: skip
    assert p.case() == {
        "seqlens": [8192], "heads": 64, "qk_heads": 64, "k": 128, "v": 128, "dtype": "bf16", "state": "fp32-in-out"
    }  # fmt: skip


def test_every_key() -> None:
    p = Problem.parse(" T = 100, B=3,H=2 ,HV=6,K=60,V=100,C=16,dtype=fp16,gate=log,qk_l2norm=false,state=bf16-in-out,")
    assert p == Problem(100, 3, 2, 6, 60, 100, 16, "fp16", "log", False, "bf16-in-out")
    assert p.chunks == (7, 7, 7) and p.sizes["NT"] == 21 and p.tokens == 300 and p.state_dtype == "bf16"


def test_packed_sequences() -> None:
    p = Problem.parse("seqlens=1300+0+547,H=1")
    assert p.lengths == (1300, 0, 547) and p.chunks == (21, 0, 9)
    assert p.sizes["N"] == 3 and p.sizes["T"] == p.tokens == 1847 and p.sizes["NT"] == 30


@pytest.mark.parametrize("text", ["", "seqlens=5+0,gate=softplus,state=none", "HV=128,T=1,dtype=fp32,C=128"])
def test_facts_give_the_problem_back(text: str) -> None:
    p = Problem.parse(text)
    assert Problem.of(p.facts()).case() == p.case() and Problem.of(p.facts()).facts() == p.facts()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("t=5", "problem must be of the keys T, B, H, .*, got 't'"),
        ("T", "problem must be key=value, separated by commas, got 'T'"),
        ("T=", "problem must be key=value"),
        ("T=5,T=6", "problem must be one value for T, got 5 and 6"),
        ("T=many", "T must be a whole number, got 'many'"),
        ("T=1e3", "T must be a whole number, got '1e3'"),
        ("T=1.5", "T must be a whole number"),
        ("T=0", "T must be at least 1, got 0"),
        ("H=-1", "H must be at least 1, got -1"),
        ("H=4,HV=6", "HV must be a multiple of H = 4, got 6"),
        ("H=4,HV=2", "HV must be a multiple of H = 4, got 2"),
        ("C=48", "C must be a power of two, one of 16, 32, 64, 128, got 48"),
        ("C=256", "C must be a power of two"),
        ("K=512", "K and V must be at most 256 and 512, got 512 and 128"),
        ("dtype=fp8", "dtype must be one of bf16, fp16, fp32, got 'fp8'"),
        ("gate=hard", "gate must be one of log, softplus, bounded, got 'hard'"),
        ("qk_l2norm=maybe", "qk_l2norm must be true or false, got 'maybe'"),
        ("state=fp32", "state must be fp32-in-out"),
        ("state=int8-in", "state must be fp32-in-out"),
        ("seqlens=5+x", r"seqlens must be whole numbers joined by \+, got 'x'"),
        ("seqlens=5+-1", "seqlens must be at least 0, got -1"),
        ("seqlens=5,T=5", "seqlens must be without T and B, got both"),
    ],
)
def test_refusals(text: str, words: str) -> None:
    with pytest.raises(kda2.InvalidValue, match=words):
        Problem.parse(text)


def test_wrong_types_are_refused() -> None:
    with pytest.raises(kda2.InvalidType, match="T must be an int, got float"):
        Problem(T=8.0)  # type: ignore[arg-type]
    with pytest.raises(kda2.InvalidType, match="H must be an int, got bool"):
        Problem(H=True)
