"""The oracles of the stages agree with the formula; judging one stage accepts honest kernels and kills wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import kda2
from kda2.testing import FAMILIES, STAGES, Problem, make, oracle, replaced, stage_inputs, upcast, verify_stage
from kda2.testing.stages import operands, rounding

BF16, FP32 = torch.bfloat16, torch.float32
PROBLEM = Problem(T=70, H=1, HV=2, K=32, V=16, regime="weak")
Tensors = dict[str, Tensor]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_that_rounds_as_kernels_do_passes(family: str) -> None:
    for stage in STAGES:
        verdict = verify_stage(rounding(stage, BF16), stage, family, PROBLEM, C=32)
        assert verdict.ok and verdict.margin <= 0.5, f"{stage}: {verdict}"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float16, FP32])
def test_other_dtypes_pass(stage: str, dtype: torch.dtype) -> None:
    for family in ("random", "repeated_keys_neg_eigval", "nan_neighbour"):
        verdict = verify_stage(rounding(stage, dtype), stage, family, replace(PROBLEM, dtype=dtype), C=16)
        assert verdict.ok, f"{family}: {verdict}"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("C", [16, 64, 128])
def test_every_chunk_length_gives_the_whole_call(stage: str, C: int) -> None:
    problem = replace(PROBLEM, dtype=FP32, lengths=(0, 37, 1, 65), tail=2, layout="vk")
    kwargs = make(problem)
    o, state = replaced(stage, rounding(stage, FP32), kwargs, C)
    want_o, want_state = oracle(kwargs)
    assert state is not None and want_state is not None and state.shape == (4, 2, 16, 32)
    assert (o - want_o).norm() < 1e-5 * want_o.norm() and (state - want_state).norm() < 1e-5 * want_state.norm()
    assert torch.equal(state[0], kwargs["initial_state"][0]) and (o[:, -2:] == 0).all()


def test_operands_are_the_formula_itself() -> None:
    kwargs = make(replace(PROBLEM, gate="softplus", H=2, HV=4, dtype=FP32, neg_eigval=True))
    plain = operands(kwargs)
    assert plain["q"].shape == (1, 70, 4, 32) and plain["beta"].max() > 1 and plain["g"].max() <= 0
    want, got = oracle(kwargs)[0], kda2.kda(**upcast(plain), impl="reference")[0]
    assert (got - want).norm() < 1e-6 * want.norm()
    again = operands(plain)
    assert all(torch.equal(again[name], plain[name]) for name in ("q", "k", "v", "g", "beta", "initial_state"))


def test_stage_inputs_by_hand() -> None:
    """Two tokens of one channel: every tensor of every stage written down."""
    q, k, v = (torch.tensor(x).view(1, 2, 1, 1) for x in ([2.0, 3.0], [1.0, 0.5], [4.0, 1.0]))
    g, beta = torch.tensor([0.5, 0.25]).log().view(1, 2, 1, 1), torch.tensor([0.5, 1.0]).view(1, 2, 1)
    kwargs: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "scale": 1.0,
        "initial_state": torch.full((1, 1, 1, 1), 8.0),
    }

    def at(stage: str, name: str) -> list[float]:
        return stage_inputs(stage, {**kwargs, "output_final_state": True}, 16)[name].flatten()[:2].tolist()

    # G = log 0.5, log 0.125; A_10 = beta_1 k_1 k_0 g_1 = 0.125
    assert at("output", "Qd") == pytest.approx([1.0, 0.375])
    assert at("solve", "Kd") == pytest.approx([0.5, 0.0625])
    assert at("state", "Kr") == pytest.approx([0.25, 0.5])
    assert at("state", "decay") == pytest.approx([0.125])
    A = stage_inputs("solve", kwargs, 16)["A"]
    assert A[0, 0, 1, 0].item() == pytest.approx(0.125) and A.count_nonzero() == 1
    # Tm = [[0.5, 0], [-0.0625, 1]]
    assert at("state", "W") == pytest.approx([0.25, 0.03125])
    assert at("state", "U") == pytest.approx([2.0, 0.75])
    assert at("output", "S") == [8.0]
    assert at("output", "Vn") == pytest.approx([0.0, 0.5], abs=1e-6)
    o, state = replaced("state", rounding("state", FP32), {**kwargs, "output_final_state": True}, 16)
    assert state is not None and state.item() == pytest.approx(1.25)  # 0.125 * 8 + 0.25 * 0 + 0.5 * 0.5
    assert o.flatten().tolist() == pytest.approx([8.0, 3.75])


@pytest.mark.parametrize(
    ("dtype", "work"), [(BF16, BF16), (torch.float16, BF16), (FP32, FP32)]
)  # fmt: skip
def test_stored_dtypes_and_shapes(dtype: torch.dtype, work: torch.dtype) -> None:
    kwargs = make(replace(PROBLEM, lengths=(5, 0, 40), dtype=dtype, beta_dtype=FP32))
    state, output = stage_inputs("state", kwargs, 16), stage_inputs("output", kwargs, 16)
    assert {name: x.dtype for name, x in state.items()} == {
        "W": work, "U": work, "Kr": work, "decay": FP32, "initial_state": FP32, "cu_chunks": torch.int64
    }  # fmt: skip
    assert state["cu_chunks"].tolist() == [0, 1, 1, 4] and state["W"].shape == (4, 2, 16, 32)
    assert output["q"].dtype == dtype and output["g"].dtype == FP32 and output["S"].dtype == output["Vn"].dtype
    assert stage_inputs("prepare", kwargs, 16)["beta"].dtype == FP32
    assert (output["k"][0, :, 5:] == 0).all() and (output["g"][0, :, 5:] == 0).all()


def state_by_hand(**x: Tensor) -> Tensors:
    """A kernel written on its own: token by token inside a chunk, in fp32."""
    W, U, Kr, S0, cu = x["W"].float(), x["U"].float(), x["Kr"].float(), x["initial_state"], x["cu_chunks"].tolist()
    Vn, S, final = torch.empty_like(U), torch.empty(*x["decay"].shape, U.shape[-1]), S0.clone()
    for n, (first, last) in enumerate(pairwise(cu)):
        for i in range(first, last):
            S[i] = final[n]
            final[n] = x["decay"][i][..., None] * S[i]
            for t in range(U.shape[2]):
                Vn[i, :, t] = U[i, :, t] - torch.einsum("hk,hkv->hv", W[i, :, t], S[i])
                final[n] += torch.einsum("hk,hv->hkv", Kr[i, :, t], Vn[i, :, t].to(x["U"].dtype).float())
    return {"Vn": Vn.to(x["U"].dtype), "S": S.to(x["W"].dtype), "final_state": final}


@pytest.mark.parametrize("family", ["random", "ragged", "all_empty", "large_state", "nan_neighbour", "one_token"])
def test_a_kernel_written_independently_passes(family: str) -> None:
    verdict = verify_stage(state_by_hand, "state", family, PROBLEM, C=16)
    assert verdict.ok, verdict.explain()
    assert [c.quantity for c in verdict.comparisons] == [
        "Vn", "S", "final_state", "o (whole call)", "final state (whole call)"
    ]  # fmt: skip


def failed(run: Callable[..., Any], stage: str, family: str = "random", **changes: Any) -> dict[str, str]:
    """What of a kernel fails: quantity to sentence."""
    verdict = verify_stage(run, stage, family, replace(PROBLEM, **changes), C=32)
    assert not verdict.ok
    return {c.quantity: c.explain() for c in verdict.comparisons if not c.ok}


def mutated(stage: str, change: Callable[[Tensors, Tensors], Tensors]) -> Callable[..., Tensors]:
    """The torch stage whose (inputs, outputs) pass through `change`."""

    def run(**inputs: Tensor) -> Tensors:
        return change(inputs, rounding(stage, inputs["Kr" if stage == "state" else "g"].dtype)(**inputs))

    return run


def changed_inputs(stage: str, **change: Callable[[Tensor], Tensor]) -> Callable[..., Tensors]:
    """The torch stage on inputs of which some are wrong."""

    def run(**inputs: Tensor) -> Tensors:
        return rounding(stage, BF16)(**inputs | {name: f(inputs[name]) for name, f in change.items()})

    return run


def test_a_state_that_is_not_handed_on_dies() -> None:
    def run(**x: Tensor) -> Tensors:
        each = torch.arange(len(x["W"]) + 1)
        fresh = torch.zeros(len(x["W"]), *x["initial_state"].shape[1:])
        out = rounding("state", BF16)(**{**x, "cu_chunks": each, "initial_state": fresh})
        return {**out, "final_state": out["final_state"][-1:]}

    dead = failed(run, "state")
    assert set(dead) == {"Vn", "S", "final_state", "o (whole call)", "final state (whole call)"}
    assert "chunk" in dead["S"] and "key" in dead["S"] and "value" in dead["S"]


def test_the_sign_of_the_correction() -> None:
    dead = failed(changed_inputs("state", W=torch.neg), "state")
    assert "Vn is off" in dead["Vn"] and "token" in dead["Vn"] and "o (whole call)" in dead


def test_a_forgotten_decay_dies_in_the_state_alone() -> None:
    dead = failed(changed_inputs("state", decay=torch.ones_like), "state", T=32)
    assert set(dead) == {"final_state", "final state (whole call)"}  # one chunk: what it reads is right


def test_a_missing_diagonal_dies() -> None:
    def run(**x: Tensor) -> Tensors:
        o = rounding("output", BF16)(**x)["o"].float()
        own = (x["q"].float() * x["k"].float()).sum(-1, keepdim=True) * x["Vn"].float()
        return {"o": (o - own).to(BF16)}

    assert set(failed(run, "output")) == {"o", "o (whole call)"}


def test_an_inverse_cut_short_dies_on_repeated_keys() -> None:
    def run(**x: Tensor) -> Tensors:
        Tm = (torch.eye(32) - x["A"]) * x["beta"].float()[:, :, None, :]
        return {"W": (Tm @ x["Kd"].float()).to(BF16), "U": (Tm @ x["v"].float()).to(BF16)}

    assert {"W", "U"} <= set(failed(run, "solve", "repeated_keys"))


def test_differences_of_prefix_sums_die_at_resets() -> None:
    def run(**x: Tensor) -> Tensors:
        out, G = rounding("factors", BF16)(**x), x["g"].cumsum(-2)
        return {**out, "Kr": (x["k"].float() * (G[..., -1:, :] - G).exp()).to(BF16)}

    assert "Kr" in failed(run, "factors", "reset_log")


def test_a_kernel_that_reads_its_neighbour_dies() -> None:
    """One sequence's NaN must stay there."""

    def run(**x: Tensor) -> Tensors:
        out = rounding("state", BF16)(**x)
        return {**out, "S": out["S"] + 0 * out["S"].sum(0, keepdim=True)}

    assert "NaN or inf" in failed(run, "state", "nan_neighbour")["S"]


def honest(**inputs: Tensor) -> Tensors:
    return rounding("state", BF16)(**inputs)


BAD_ANSWERS: dict[str, tuple[Callable[[Tensors], Any], str, str]] = {
    "missing": (lambda out: {k: x for k, x in out.items() if k != "S"}, "S", "missing: run returned Vn, final_state"),
    "dtype": (lambda out: {**out, "Vn": out["Vn"].float()}, "Vn", "wanted dtype torch.bfloat16, got torch.float32"),
    "shape": (lambda out: {**out, "S": out["S"].mT}, "S", r"wanted shape (3, 2, 32, 16), got (3, 2, 16, 32)"),
    "none": (lambda out: {**out, "Vn": None}, "Vn", "wanted a tensor, got NoneType"),
    "extra": (lambda out: {**out, "W": out["Vn"]}, "W", "not an output of state"),
    "no dict": (lambda out: tuple(out.values()), "outputs", "wanted a dict of Vn, S, final_state, got tuple"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_answers_that_do_not_fit_are_named(name: str) -> None:
    change, quantity, words = BAD_ANSWERS[name]
    dead = failed(lambda **inputs: change(honest(**inputs)), "state")
    assert words in dead[quantity] and "not formed: mend state first" in dead["o (whole call)"]


def test_changed_inputs_are_named() -> None:
    def run(**inputs: Tensor) -> Tensors:
        out = honest(**inputs)
        inputs["U"].zero_()
        return out

    assert failed(run, "state")["inputs"] == "inputs: changed: U"


def test_memory_that_was_never_written_shows() -> None:
    def run(**inputs: Tensor) -> Tensors:
        out = honest(**inputs)
        S = torch.empty_like(out["S"])
        S[1:] = out["S"][1:]
        return {**out, "S": S}

    assert "NaN or inf" in failed(run, "state")["S"]


def test_without_a_final_state_only_o_is_asked_of_the_call() -> None:
    verdict = verify_stage(honest, "state", "random", replace(PROBLEM, final_state=False, state=None), C=32)
    assert verdict.ok and [c.quantity for c in verdict.comparisons][-1] == "o (whole call)"


@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_without_tokens(stage: str) -> None:
    verdict = verify_stage(rounding(stage, BF16), stage, "random", replace(PROBLEM, T=0, B=2), C=64)
    assert verdict.ok, verdict.explain()
    assert stage_inputs(stage, make(replace(PROBLEM, T=0)))[STAGES[stage].inputs[0].name].shape[0] == 0


def test_bad_arguments() -> None:
    kwargs = make(PROBLEM)
    with pytest.raises(kda2.InvalidValue, match="stage must be one of prepare, factors, solve, state, output, got 'x'"):
        stage_inputs("x", kwargs)
    with pytest.raises(kda2.InvalidValue, match="C must be one of 16, 32, 64, 128, got 48"):
        stage_inputs("state", kwargs, 48)
    with pytest.raises(kda2.InvalidValue, match="family must be one of"):
        verify_stage(honest, "state", "nosuch", PROBLEM)
