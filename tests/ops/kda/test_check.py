"""Bad input: a typed error that names the argument, what was wanted, what came and a fix, before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kda2
from kda2.dispatch import register, registered
from kda2.testing import Problem, make, make_step

BF16, FP32, FP64, INT = torch.bfloat16, torch.float32, torch.float64, torch.int64
Kwargs = dict[str, Any]


@pytest.fixture(autouse=True)
def nothing_runs() -> Iterator[None]:
    """An implementation that is so much as loaded fails the test."""

    def load() -> Any:
        raise AssertionError("a bad call reached an implementation")

    saved = {op: registered(op) for op in ("kda", "kda_step")}
    for op, implementations in saved.items():
        register(op, [dataclasses.replace(i, load=load) for i in implementations])
    yield
    for op, implementations in saved.items():
        register(op, implementations)


def call(**changes: Any) -> Kwargs:
    return {**make(Problem(B=2, T=8, H=2, HV=4, K=16, V=24)), **changes}


def packed(cu_seqlens: Any, **changes: Any) -> Kwargs:
    return {**make(Problem(T=8, H=2, HV=4, K=16, V=24)), "initial_state": None, "cu_seqlens": cu_seqlens, **changes}


def step(**changes: Any) -> Kwargs:
    return {**make_step(Problem(B=3, H=2, HV=4, K=16, V=24)), **changes}


def pooled(indices: Any, **changes: Any) -> Kwargs:
    kwargs = make_step(Problem(B=3, H=2, HV=4, K=16, V=24), slots=5, indices=(0, 1, 2))
    return {**kwargs, "state_indices": indices, **changes}


def out_inside_state() -> Kwargs:
    state = zeros(3, 4, 16, 24)
    return {"state": state, "out": state[:, :, 0]}


def zeros(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


SHAPES: dict[str, tuple[Callable[[], Kwargs], str, str]] = {
    "q rank": (lambda: call(q=zeros(8, 2, 16)), "q must be [B, T, H, K], got (8, 2, 16)", "q.unsqueeze(0)"),
    "q rank 2": (lambda: call(q=zeros(8, 2)), "q must be [B, T, H, K], got (8, 2)", ""),
    "k heads": (lambda: call(k=zeros(2, 8, 4, 16)), "k must be [2, 8, 2, 16], got (2, 8, 4, 16)", ""),
    "k channels": (lambda: call(k=zeros(2, 8, 2, 8)), "k must be [2, 8, 2, 16], got (2, 8, 2, 8)", ""),
    "v tokens": (lambda: call(v=zeros(2, 9, 4, 24)), "v must be [2, 8, HV, V], got (2, 9, 4, 24)", ""),
    "v heads": (lambda: call(v=zeros(2, 8, 3, 24)), "v must be [2, 8, 2, V], got (2, 8, 3, 24)", "multiple of q's 2"),
    "v fewer heads": (lambda: call(v=zeros(2, 8, 1, 24)), "v must be [2, 8, 2, V], got (2, 8, 1, 24)", "multiple"),
    "g heads": (lambda: call(g=zeros(2, 8, 2, 16)), "g must be [2, 8, 4, 16], got (2, 8, 2, 16)", ""),
    "g per head": (lambda: call(g=zeros(2, 8, 4)), "g must be [2, 8, 4, 16], got (2, 8, 4)", ""),
    "beta": (lambda: call(beta=zeros(2, 8, 4, 1)), "beta must be [2, 8, 4], got (2, 8, 4, 1)", ""),
    "K zero": (lambda: call(q=zeros(2, 8, 2, 0)), "q must be [..., K] with 1 <= K <= 256, got K = 0", ""),
    "K large": (lambda: call(q=zeros(2, 8, 2, 257)), "q must be [..., K] with 1 <= K <= 256, got K = 257", ""),
    "V zero": (lambda: call(v=zeros(2, 8, 4, 0)), "v must be [..., V] with 1 <= V <= 512, got V = 0", ""),
    "V large": (lambda: call(v=zeros(2, 8, 4, 513)), "v must be [..., V] with 1 <= V <= 512, got V = 513", ""),
    "no heads": (lambda: call(q=zeros(2, 8, 0, 16)), "q must be with at least one head, got (2, 8, 0, 16)", ""),
    "state": (
        lambda: call(initial_state=zeros(2, 4, 24, 16, dtype=FP32)),
        "initial_state must be [2, 4, 16, 24], got (2, 4, 24, 16)",
        "the other state_layout",
    ),
    "state count": (
        lambda: call(initial_state=zeros(1, 4, 16, 24, dtype=FP32)),
        "initial_state must be [2, 4, 16, 24], got (1, 4, 16, 24)",
        "",
    ),
    "state vk": (
        lambda: call(state_layout="vk"),
        "initial_state must be [2, 4, 24, 16], got (2, 4, 16, 24)",
        "the other state_layout",
    ),
    "A_log": (
        lambda: call(gate=kda2.Gate.softplus(zeros(2, dtype=FP32))),
        "A_log must be [4], got (2)",
        "",
    ),
    "dt_bias": (
        lambda: call(gate=kda2.Gate.bounded(zeros(4, dtype=FP32), zeros(4, dtype=FP32))),
        "dt_bias must be [4, 16], got (4",
        "",
    ),
}
VALUES: dict[str, tuple[Callable[[], Kwargs], str, str]] = {
    "neg_eigval alone": (
        lambda: call(beta_sigmoid=False, allow_neg_eigval=True),
        "allow_neg_eigval must be False unless beta_sigmoid=True, got True",
        "beta_sigmoid=True",
    ),
    "layout": (lambda: call(state_layout="kvk"), "state_layout must be 'kv' ([N,HV,K,V]) or 'vk'", ""),
    "layout None": (lambda: call(state_layout=None), "state_layout must be 'kv'", ""),
    "scale inf": (lambda: call(scale=float("inf")), "scale must be finite in float32, got inf", ""),
    "scale nan": (lambda: call(scale=float("nan")), "scale must be finite in float32, got nan", ""),
    "scale past float32": (lambda: call(scale=1e300), "scale must be finite in float32, got 1e+300", ""),
    "scale past float": (
        lambda: call(scale=10**5000),
        "scale must be a number that a float holds, got a larger one",
        "",
    ),
    "nested": (
        lambda: call(q=torch.nested.nested_tensor([zeros(8, 2, 16)] * 2)),
        "q must be one tensor, got a nested one",
        "with cu_seqlens",
    ),
    "impl": (lambda: call(impl="cuda-v9"), "impl must be 'auto' or one of", ""),
    "negative view": (
        lambda: call(q=torch.complex(zeros(2, 8, 2, 16, dtype=FP32), zeros(2, 8, 2, 16, dtype=FP32)).conj().imag),
        "q must be a tensor whose memory is its value, got a negative view",
        "resolve_neg",
    ),
    "sparse": (lambda: call(v=zeros(2, 8, 4, 24, dtype=FP32).to_sparse()), "v must be a strided tensor", "to_dense"),
    "device of v": (
        lambda: call(v=zeros(2, 8, 4, 24, device="meta")),
        "v must be on q's device cpu, got on meta",
        "v.to(q.device)",
    ),
    "device of state": (
        lambda: call(initial_state=zeros(2, 4, 16, 24, dtype=FP32, device="meta")),
        "initial_state must be on q's device cpu, got on meta",
        "initial_state.to(q.device)",
    ),
    "device of A_log": (
        lambda: call(gate=kda2.Gate.softplus(zeros(4, dtype=FP32, device="meta"))),
        "A_log must be on q's device cpu, got on meta",
        "",
    ),
    "cu_seqlens start": (
        lambda: packed(torch.tensor([1, 8])),
        "cu_seqlens must be starting at 0, got cu_seqlens[0] = 1",
        "",
    ),
    "cu_seqlens decreasing": (
        lambda: packed(torch.tensor([0, 5, 3, 8])),
        "cu_seqlens must be non-decreasing, got cu_seqlens[2] = 3 after 5",
        "",
    ),
    "cu_seqlens past T": (
        lambda: packed(torch.tensor([0, 4, 9])),
        "cu_seqlens must be at most T = 8, got cu_seqlens[2] = 9",
        "",
    ),
    "cu_seqlens negative": (lambda: packed(torch.tensor([0, -1])), "cu_seqlens must be non-decreasing", ""),
    "cu_seqlens rank": (lambda: packed(torch.tensor([[0, 8]])), "cu_seqlens must be [N + 1], got (1, 2)", ""),
    "cu_seqlens empty": (lambda: packed(torch.tensor([], dtype=INT)), "cu_seqlens must be [N + 1], got (0", ""),
    "cu_seqlens with a batch": (
        lambda: call(cu_seqlens=torch.tensor([0, 8]), initial_state=None),
        "q must be [1, T, H, K] with cu_seqlens, got (2, 8, 2, 16)",
        "pack the batch into one row",
    ),
    "cu_seqlens device": (
        lambda: packed(torch.tensor([0, 8], device="meta")),
        "cu_seqlens must be on cpu",
        "",
    ),
    "states of cu_seqlens": (
        lambda: packed(torch.tensor([0, 4, 8]), initial_state=zeros(1, 4, 16, 24, dtype=FP32)),
        "initial_state must be [2, 4, 16, 24], got (1, 4, 16, 24)",
        "",
    ),
}
TYPES: dict[str, tuple[Callable[[], Kwargs], str, str]] = {
    "q is a list": (lambda: call(q=[1.0]), "q must be a torch.Tensor, got list", ""),
    "q is a list, scale given": (lambda: call(q=[1.0], scale=1.0), "q must be a torch.Tensor, got list", ""),
    "g is None": (lambda: call(g=None), "g must be a torch.Tensor, got NoneType", ""),
    "q int": (lambda: call(q=zeros(2, 8, 2, 16, dtype=INT)), "q must be bfloat16, float16 or float32, got int64", ""),
    "k dtype": (
        lambda: call(k=zeros(2, 8, 2, 16, dtype=FP32)),
        "k must be q's dtype bfloat16, got float32",
        "k.to(q.dtype)",
    ),
    "v dtype": (
        lambda: call(v=zeros(2, 8, 4, 24, dtype=torch.float16)),
        "v must be q's dtype bfloat16, got float16",
        "v.to(q.dtype)",
    ),
    "g dtype": (
        lambda: call(g=zeros(2, 8, 4, 16, dtype=torch.float16)),
        "g must be q's dtype bfloat16 or float32, got float16",
        "",
    ),
    "beta dtype": (
        lambda: call(beta=zeros(2, 8, 4, dtype=FP64)),
        "beta must be q's dtype bfloat16 or float32, got float64",
        "",
    ),
    "A_log dtype": (
        lambda: call(gate=kda2.Gate.softplus(zeros(4))),
        "A_log must be float32, got bfloat16",
        "A_log.float()",
    ),
    "A_log is a list": (lambda: call(gate=kda2.Gate.softplus([0.0] * 4)), "A_log must be a torch.Tensor", ""),
    "state dtype": (
        lambda: call(initial_state=zeros(2, 4, 16, 24, dtype=INT)),
        "initial_state must be float32, bfloat16 or float16, got int64",
        "",
    ),
    "gate": (lambda: call(gate="log"), "gate must be a kda2.Gate, got str", "kda2.Gate.log()"),
    "scale": (lambda: call(scale="1"), "scale must be a number, got str", ""),
    "scale bool": (lambda: call(scale=True), "scale must be a number, got bool", ""),
    "scale tensor": (lambda: call(scale=torch.tensor(1.0)), "scale must be a number, got Tensor", ""),
    "impl": (lambda: call(impl=["torch"]), "impl must be a str, got list", ""),
    "cu_seqlens dtype": (
        lambda: packed(torch.tensor([0.0, 8.0])),
        "cu_seqlens must be int32 or int64, got float32",
        "",
    ),
    "cu_seqlens list": (lambda: packed([0, 8]), "cu_seqlens must be a torch.Tensor, got list", ""),
}
STEP_VALUES: dict[str, tuple[Callable[[], Kwargs], str, str]] = {
    "rank": (
        lambda: step(q=zeros(3, 1, 2, 16)),
        "q must be [B, H, K], got (3, 1, 2, 16)",
        "pass q[:, 0], or call kda2.kda",
    ),
    "rank 2": (lambda: step(q=zeros(2, 16)), "q must be [B, H, K], got (2, 16)", "q.unsqueeze(0)"),
    "rows": (lambda: step(v=zeros(4, 4, 24)), "v must be [3, HV, V], got (4, 4, 24)", ""),
    "state": (
        lambda: step(state=zeros(2, 4, 16, 24, dtype=FP32)),
        "state must be [3, 4, 16, 24], got (2, 4, 16, 24)",
        "",
    ),
    "state vk": (
        lambda: step(state=zeros(3, 4, 24, 16, dtype=FP32)),
        "state must be [3, 4, 16, 24], got (3, 4, 24, 16)",
        "the other state_layout",
    ),
    "pool": (
        lambda: pooled(torch.arange(3), state=zeros(5, 4, 8, 24, dtype=FP32)),
        "state must be [5, 4, 16, 24], got (5, 4, 8, 24)",
        "",
    ),
    "state rank": (lambda: pooled(torch.arange(3), state=zeros(5, 4)), "state must be [3, 4, 16, 24], got (5, 4)", ""),
    "indices": (lambda: pooled(torch.arange(4)), "state_indices must be [3], got (4", ""),
    "slot past the pool": (
        lambda: pooled(torch.tensor([0, 5, 1])),
        "state_indices must be in [0, 5) or pad_slot = -1, got state_indices[1] = 5",
        "",
    ),
    "negative slot": (
        lambda: pooled(torch.tensor([0, 1, -2])),
        "state_indices must be in [0, 5) or pad_slot = -1, got state_indices[2] = -2",
        "",
    ),
    "pad of another engine": (
        lambda: pooled(torch.tensor([0, 1, -1]), pad_slot=0),
        "state_indices must be in [0, 5) or pad_slot = 0, got state_indices[2] = -1",
        "",
    ),
    "out": (lambda: step(out=zeros(3, 4, 23)), "out must be [3, 4, 24], got (3, 4, 23)", ""),
    "out device": (lambda: step(out=zeros(3, 4, 24, device="meta")), "out must be on q's device cpu", ""),
    "slot of two rows": (
        lambda: pooled(torch.tensor([2, 0, 2])),
        "state_indices must be distinct, one slot a row, got state_indices[0] = state_indices[2] = 2",
        "",
    ),
    "pad slot": (lambda: pooled(torch.arange(3), pad_slot=2**63), "pad_slot must be an int of 64 bits", ""),
    "expanded out": (
        lambda: step(out=zeros(1, 4, 24).expand(3, 4, 24)),
        "out must be without elements that share memory, got strides (0, 24, 1)",
        "out.clone()",
    ),
    "expanded state": (
        lambda: step(state=zeros(1, 4, 16, 24, dtype=FP32).expand(3, 4, 16, 24)),
        "state must be without elements that share memory",
        "state.clone()",
    ),
    "windows for a state": (
        lambda: step(state=zeros(3 * 4 * 16 * 24, dtype=FP32).as_strided((3, 4, 16, 24), (384, 384, 24, 1))),
        "state must be without elements that share memory",
        "state.clone()",
    ),
    "out inside the state": (
        lambda: step(**out_inside_state()),
        "out must be apart from the state, which is written too",
        "",
    ),
    "in place with grad": (
        lambda: step(q=zeros(3, 2, 16).requires_grad_()),
        "inplace must be False where an input requires grad, got True",
        "torch.no_grad()",
    ),
    "in place into a leaf": (
        lambda: step(state=zeros(3, 4, 16, 24, dtype=FP32).requires_grad_()),
        "inplace must be False where an input requires grad, got True",
        "torch.no_grad()",
    ),
    "out with grad": (
        lambda: step(q=zeros(3, 2, 16).requires_grad_(), inplace=False, out=zeros(3, 4, 24)),
        "out must be None where an input requires grad, got a tensor",
        "torch.no_grad()",
    ),
    "out grad": (
        lambda: step(out=zeros(3, 4, 24).requires_grad_()),
        "out must be without requires_grad, got requires_grad=True",
        "out.detach()",
    ),
    "impl": (lambda: step(impl="hoper"), "impl must be 'auto' or one of", ""),
}
STEP_TYPES: dict[str, tuple[Callable[[], Kwargs], str, str]] = {
    "state": (lambda: step(state=None), "state must be a torch.Tensor, got NoneType", ""),
    "state dtype": (
        lambda: step(state=zeros(3, 4, 16, 24, dtype=INT)),
        "state must be float32, bfloat16 or float16, got int64",
        "",
    ),
    "indices dtype": (
        lambda: pooled(torch.zeros(3)),
        "state_indices must be int32 or int64, got float32",
        "",
    ),
    "indices list": (lambda: pooled([0, 1, 2]), "state_indices must be a torch.Tensor, got list", ""),
    "pad slot": (lambda: pooled(torch.arange(3), pad_slot=None), "pad_slot must be an int, got NoneType", ""),
    "pad slot bool": (lambda: pooled(torch.arange(3), pad_slot=True), "pad_slot must be an int, got bool", ""),
    "out dtype": (
        lambda: step(out=zeros(3, 4, 24, dtype=FP32)),
        "out must be v's dtype bfloat16, got float32",
        "",
    ),
}


def refuse(function: Callable[..., Any], kwargs: Kwargs, error: type[Exception], text: str, fix: str) -> None:
    with pytest.raises(error) as caught:
        function(**kwargs)
    message = str(caught.value)
    # a one-element shape prints as (2,)
    assert text.removesuffix(")") in message, message
    assert fix in message, message
    argument = text.split(" ", 1)[0]
    assert getattr(caught.value, "argument", None) == argument


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(case: str) -> None:
    make_kwargs, text, fix = SHAPES[case]
    refuse(kda2.kda, make_kwargs(), kda2.InvalidValue, text, fix)


@pytest.mark.parametrize("case", VALUES)
def test_values(case: str) -> None:
    make_kwargs, text, fix = VALUES[case]
    refuse(kda2.kda, make_kwargs(), kda2.InvalidValue, text, fix)


@pytest.mark.parametrize("case", TYPES)
def test_types(case: str) -> None:
    make_kwargs, text, fix = TYPES[case]
    refuse(kda2.kda, make_kwargs(), kda2.InvalidType, text, fix)


@pytest.mark.parametrize("case", STEP_VALUES)
def test_step_values(case: str) -> None:
    make_kwargs, text, fix = STEP_VALUES[case]
    refuse(kda2.kda_step, make_kwargs(), kda2.InvalidValue, text, fix)


@pytest.mark.parametrize("case", STEP_TYPES)
def test_step_types(case: str) -> None:
    make_kwargs, text, fix = STEP_TYPES[case]
    refuse(kda2.kda_step, make_kwargs(), kda2.InvalidType, text, fix)


@pytest.mark.parametrize(("function", "kwargs"), [(kda2.kda, call), (kda2.kda_step, step)])
def test_good_calls_reach_an_implementation(function: Callable[..., Any], kwargs: Callable[[], Kwargs]) -> None:
    """So that the tests above fail for the reason they name."""
    with pytest.raises(AssertionError, match="reached an implementation"):
        function(**kwargs(), impl="torch")


FLAGS = ("qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "output_final_state", "deterministic")


@pytest.mark.parametrize("value", ["False", None, 1, torch.tensor(True)])
@pytest.mark.parametrize("flag", [*FLAGS, "inplace"])
def test_flags_are_not_read_by_truthiness(flag: str, value: Any) -> None:
    function, kwargs = (kda2.kda_step, step()) if flag == "inplace" else (kda2.kda, call())
    text = f"{flag} must be True or False, got {type(value).__name__}"
    refuse(function, {**kwargs, flag: value}, kda2.InvalidType, text, "")


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.int64(1), 2, 0, -1.5])
def test_numbers_of_numpy_are_numbers(number: Any) -> None:
    assert kda2.explain(kda2.kda, **{**call(), "scale": number, "qk_l2norm": np.bool_(True)}).chosen
    assert kda2.explain(kda2.kda_step, **pooled(torch.arange(3), pad_slot=np.int64(-1), scale=number)).chosen


@pytest.mark.parametrize("out", [zeros(3, 4, 48)[..., ::2], zeros(4, 3, 24).transpose(0, 1), zeros(3, 9, 24)[:, 5:]])
def test_strided_outputs_are_no_overlap(out: torch.Tensor) -> None:
    state = zeros(3, 8, 24, 16, dtype=FP32)[:, 4:].transpose(-1, -2)
    assert kda2.explain(kda2.kda_step, **step(out=out, state=state)).chosen


def test_debug_is_off_outside_its_context() -> None:
    from kda2.ops.kda import check

    assert not check._debug.get()
    with kda2.debug():
        assert check._debug.get()
        with kda2.debug(False):
            assert not check._debug.get()
    assert not check._debug.get()


def test_debug_holds_log_decays_to_what_was_said_of_them() -> None:
    given = call(gate=kda2.Gate.log())
    given["g"] = given["g"].abs() + 0.5
    assert kda2.explain(kda2.kda, **given).chosen  # unread outside the context
    with kda2.debug():
        with pytest.raises(kda2.InvalidValue, match=r"g must be a log decay, at most 0"):
            kda2.kda(**given)
        bounded = {**given, "g": given["g"].neg().sub(3.0), "gate": kda2.Gate.log(lower_bound=-2.0)}
        with pytest.raises(kda2.InvalidValue, match=r"g must be at least the promised lower_bound -2\.0"):
            kda2.kda(**bounded)
        assert kda2.explain(kda2.kda, **{**given, "g": -given["g"]}).chosen
        given["g"][0, 0, 0, 0] = torch.nan  # hides nothing
        with pytest.raises(kda2.InvalidValue, match=r"g must be a log decay, at most 0"):
            kda2.kda(**given)


def test_debug_takes_a_bound_that_was_rounded_to_the_dtype() -> None:
    given = call(gate=kda2.Gate.log(lower_bound=-4.9))
    given["g"] = torch.full_like(given["g"], -4.9)  # -4.90625 in bf16
    with kda2.debug():
        assert kda2.explain(kda2.kda, **given).chosen


def test_no_unknown_keyword_is_swallowed() -> None:
    with pytest.raises(TypeError, match="use_qk_l2norm"):
        kda2.kda(**call(), use_qk_l2norm=True)
