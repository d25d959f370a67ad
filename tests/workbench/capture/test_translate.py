"""Other functions' calls in the words of `kda2.kda`: they give what the formula gives from the call as it was made."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import kda2
from kda2.testing import Problem, make_step
from kda2.workbench.capture import Capture, translate
from kda2.workbench.capture.translate import NotCaptured

B, T, H, HV, K, V = 2, 5, 2, 4, 8, 6
FLA = (translate.chunk_kda, translate.fused_recurrent_kda)


def fla_call(**options: Any) -> dict[str, Any]:
    """Arguments as FLA's functions take them."""
    tokens = {"q": torch.randn(B, T, H, K), "k": torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1)}
    gate_in_kernel = options.get("use_gate_in_kernel", False)
    tokens |= {
        "v": torch.randn(B, T, HV, V),
        "g": torch.randn(B, T, HV, K) if gate_in_kernel else -torch.rand(B, T, HV, K),
    }
    return {**tokens, "beta": torch.rand(B, T, HV), "output_final_state": True, **options}


def fla_result(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What FLA documents, written down from its documentation: in fp64, one token of one head at a time."""
    c = {name: x.double() if isinstance(x, Tensor) else x for name, x in call.items()}
    v_first = c.get("state_v_first") or c.get("transpose_state_layout")
    o, states = torch.zeros(B, T, HV, V, dtype=torch.float64), torch.zeros(B, HV, K, V, dtype=torch.float64)
    for b, h in itertools.product(range(B), range(HV)):
        S = torch.zeros(K, V, dtype=torch.float64)
        if c.get("initial_state") is not None:
            S = c["initial_state"][b, h].T if v_first else c["initial_state"][b, h]
        for t in range(T):
            q, k = (c[name][b, t, h // (HV // H)] for name in ("q", "k"))
            if c.get("use_qk_l2norm_in_kernel"):
                q, k = (x / (x @ x + 1e-6).sqrt() for x in (q, k))
            beta = c["beta"][b, t, h]
            if c.get("use_beta_sigmoid_in_kernel"):
                beta = (2 if c.get("allow_neg_eigval") else 1) / (1 + (-beta).exp())
            S = fla_decay(c, c["g"][b, t, h], h).exp()[:, None] * S
            S = S + beta * torch.outer(k, c["v"][b, t, h] - S.T @ k)
            o[b, t, h] = (K**-0.5 if c.get("scale") is None else c["scale"]) * (S.T @ q)
        states[b, h] = S
    return o, states.mT if v_first else states


def fla_decay(c: dict[str, Any], g: Tensor, h: int) -> Tensor:
    if not c.get("use_gate_in_kernel"):
        return g
    if c.get("dt_bias") is not None:
        g = g + c["dt_bias"].flatten()[h * K : (h + 1) * K]
    rate = 1.0 if c.get("A_log") is None else c["A_log"].flatten()[h].exp()
    if c.get("lower_bound") is not None:
        return c["lower_bound"] / (1 + (-rate * g).exp())
    return -rate * (1 + g.exp()).log()


BIAS = {"A_log": torch.linspace(-1, 1, HV), "dt_bias": torch.linspace(-2, 2, HV * K)}
CALLS: dict[str, dict[str, Any]] = {
    "bare": {},
    "scale": {"scale": 0.3},
    "transforms": {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True},
    "negative eigenvalues": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    "softplus": {"use_gate_in_kernel": True, **BIAS},
    "softplus without bias": {"use_gate_in_kernel": True, "A_log": BIAS["A_log"]},
    "learned ones in odd shapes": {
        "use_gate_in_kernel": True,
        "A_log": BIAS["A_log"].reshape(1, 1, HV, 1).bfloat16(),
        "dt_bias": BIAS["dt_bias"].reshape(HV, K).bfloat16(),
    },
    "bounded": {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0, **BIAS},
    "bounded without being called safe": {"use_gate_in_kernel": True, "lower_bound": -2.0, **BIAS},
    "bounded at rate 1": {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0, "A_log": None},
    "a bound that is not used": {"lower_bound": -7.0, **BIAS},
    "initial state": {"initial_state": torch.randn(B, HV, K, V)},
    "V first": {"initial_state": torch.randn(B, HV, V, K), "state_v_first": True},
    "V first by its old name": {"initial_state": torch.randn(B, HV, V, K), "transpose_state_layout": True},
    "how, not what": {"chunk_size": 32, "disable_recompute": True, "use_graph": False, "cp_context": None},
}


@pytest.mark.parametrize("read", FLA)
@pytest.mark.parametrize("name", CALLS)
def test_fla(name: str, read: Any) -> None:
    call = fla_call(**CALLS[name])
    o, state = kda2.kda(**Capture(read(call)).kwargs, impl="reference")
    want_o, want_state = fla_result(call)
    torch.testing.assert_close(o.double(), want_o, rtol=0, atol=2e-6)
    torch.testing.assert_close(state.double(), want_state, rtol=0, atol=2e-6)


def test_the_gates_of_fla() -> None:
    for options, kind, bound in (
        ({}, "log", None),
        ({"safe_gate": True}, "log", -5.0),  # its promise
        ({"safe_gate": True, "lower_bound": -1.0}, "log", -1.0),
        ({"use_gate_in_kernel": True, **BIAS}, "softplus", None),
        ({"use_gate_in_kernel": True, "lower_bound": -3.0, **BIAS}, "bounded", -3.0),
    ):
        gate = translate.chunk_kda(fla_call(**options))["gate"]
        assert (gate.kind, gate.lower_bound) == (kind, bound)


def test_a_broken_promise_is_not_taken_over() -> None:
    call = fla_call(safe_gate=True)
    call["g"][0, 0, 0, 0] = -5.1
    assert translate.chunk_kda(call)["gate"].lower_bound is None


def test_dtypes_that_only_fla_mixes() -> None:
    call = fla_call()
    call |= {name: call[name].bfloat16() for name in ("q", "k", "v")} | {"g": call["g"].half()}
    kwargs = Capture(translate.chunk_kda(call)).kwargs
    assert kwargs["g"].dtype == torch.float32 and torch.equal(kwargs["g"], call["g"].float())
    assert kwargs["beta"] is call["beta"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cp_context": object()}, "cp_context: kda2 has no context parallelism"),
        ({"return_intermediate_states": True}, "return_intermediate_states"),
        ({"use_gate_in_kernel": True, "lower_bound": -6.0, **BIAS}, "lower_bound = -6.0"),
        ({"use_gate_in_kernel": True}, "without A_log"),
        ({"use_gate_in_kernel": True, "A_log": torch.zeros(3)}, "A_log with 3 elements: kda2's has 4"),
        ({"use_gate_in_kernel": True, **BIAS, "dt_bias": torch.zeros(HV)}, "dt_bias with 4 elements: kda2's has 32"),
        ({"head_first": True}, "head_first: not an option"),
        ({"mask": torch.ones(B, T)}, "mask: not an option"),
    ],
)
def test_what_kda2_has_no_words_for(options: dict[str, Any], words: str) -> None:
    with pytest.raises(NotCaptured, match=words):
        translate.chunk_kda(fla_call(**options))


def test_beta_per_value_channel() -> None:
    with pytest.raises(NotCaptured, match="beta per value channel"):
        translate.fused_recurrent_kda(fla_call(beta=torch.rand(B, T, HV, V)))


@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_a_step_is_a_call_of_one_token(layout: Any) -> None:
    step = make_step(Problem(B=3, H=2, HV=4, K=8, V=6, layout=layout, gate="softplus", dtype=torch.float32))
    o, state = kda2.kda(**Capture(translate.kda_step(step)).kwargs, impl="reference")
    want_o, want_state = kda2.kda_step(**step, inplace=False, impl="reference")
    torch.testing.assert_close(o[:, 0], want_o, rtol=0, atol=1e-6)
    torch.testing.assert_close(state, want_state, rtol=0, atol=1e-6)


def test_states_of_a_pool_are_gathered() -> None:
    problem = Problem(B=4, H=1, HV=1, K=4, V=3, gate="bounded", dtype=torch.float32)
    step = make_step(problem, slots=6, indices=[5, 9, 0, 2], pad_slot=9)
    kwargs = Capture(translate.kda_step(step)).kwargs
    assert torch.equal(kwargs["initial_state"], step["state"][[5, 0, 2]])
    assert torch.equal(kwargs["q"], step["q"][[0, 2, 3], None])
    o, state = kda2.kda(**kwargs, impl="reference")
    want_o, pool = kda2.kda_step(**step, inplace=False, impl="reference")
    torch.testing.assert_close(o[:, 0], want_o[[0, 2, 3]], rtol=0, atol=1e-6)
    torch.testing.assert_close(state, pool[[5, 0, 2]], rtol=0, atol=1e-6)


def test_a_step_without_a_state() -> None:
    step = make_step(Problem(B=2, H=1, HV=1, K=4, V=3), slots=2, indices=[-1, -1])
    with pytest.raises(NotCaptured, match="no row has a state"):
        translate.kda_step(step)
