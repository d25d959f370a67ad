"""Input makers: what a problem says is what its tensors are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kda2
from kda2.ops.kda.gate import log_decay
from kda2.testing import FAMILIES, Family, Problem, family, make, make_step, offsets
from kda2.testing.inputs import RESTRIDE

TOKENS = ("q", "k", "v", "g", "beta")


def decay(kwargs: dict[str, Any]) -> torch.Tensor:
    return log_decay(kwargs["g"], kwargs["gate"], torch.float64)


def test_shapes_and_dtypes() -> None:
    kwargs = make(Problem(B=2, T=5, H=2, HV=6, K=8, V=12, g_dtype=torch.float32, state=torch.float16, layout="vk"))
    assert [tuple(kwargs[n].shape) for n in TOKENS] == [(2, 5, 2, 8)] * 2 + [(2, 5, 6, 12), (2, 5, 6, 8), (2, 5, 6)]
    assert [kwargs[n].dtype for n in TOKENS] == [torch.bfloat16] * 3 + [torch.float32, torch.bfloat16]
    assert kwargs["initial_state"].shape == (2, 6, 12, 8) and kwargs["initial_state"].dtype == torch.float16


def test_packed() -> None:
    kwargs = make(Problem(lengths=(3, 0, 4), tail=2, offsets_dtype=torch.int32))
    assert kwargs["q"].shape[:2] == (1, 9) and kwargs["initial_state"].shape[0] == 3
    assert kwargs["cu_seqlens"].tolist() == [0, 3, 3, 7] and kwargs["cu_seqlens"].dtype == torch.int32
    assert offsets(()).tolist() == [0]


def test_seed_decides() -> None:
    a, b, c = make(Problem()), make(Problem()), make(Problem(seed=1))
    assert all(torch.equal(a[n], b[n]) and not torch.equal(a[n], c[n]) for n in TOKENS)


def test_meta_tensors_for_compiling_only() -> None:
    kwargs = make(Problem(device="meta", strides="fused"))
    assert all(kwargs[n].is_meta for n in TOKENS) and kwargs["gate"].A_log.is_meta


@pytest.mark.parametrize("gate", ["log", "log_bounded", "softplus", "bounded"])
def test_regimes(gate: Any) -> None:
    depth = {
        r: decay(make(Problem(T=200, HV=8, H=8, gate=gate, regime=r))) for r in ("strong", "weak", "mixed", "none")
    }
    assert all((x <= 0).all() for x in depth.values())
    assert (depth["none"] == 0).all()
    strong, mixed, weak = (-depth[r].mean() for r in ("strong", "mixed", "weak"))
    assert strong > mixed > weak > 0 and strong > 1 and weak < 0.1
    if gate in ("bounded", "log_bounded"):
        assert depth["strong"].min() >= -5


@pytest.mark.parametrize("flag", [True, False])
def test_keys_are_normalised_by_somebody(flag: bool) -> None:
    kwargs = make(Problem(qk_l2norm=flag, dtype=torch.float32))
    norms = kwargs["k"].norm(dim=-1)
    assert torch.allclose(norms, torch.ones_like(norms), atol=1e-5) != flag


def test_betas_are_steps_or_logits() -> None:
    beta = make(Problem(beta_sigmoid=False))["beta"]
    assert 0 < beta.min() and beta.max() < 1 and make(Problem())["beta"].min() < 0


@pytest.mark.parametrize("strides", RESTRIDE)
def test_strides_are_what_they_say(strides: Any) -> None:
    problem = Problem(B=2, T=5, H=2, HV=4, K=8, V=12)
    plain, kwargs = make(problem), make(replace(problem, strides=strides))
    for name in TOKENS:
        assert kwargs[name].shape == plain[name].shape
        if (strides, name) != ("expanded_beta", "beta"):
            assert torch.equal(kwargs[name], plain[name])
    q, beta = kwargs["q"], kwargs["beta"]
    if strides == "fused":
        assert q.stride(1) == 1 + 2 * 2 * 8 + 4 * 12 + 4 * 8 + 4
        assert q.untyped_storage().data_ptr() == kwargs["v"].untyped_storage().data_ptr()
    if strides == "head_first":
        assert q.stride(1) == 8 and q.stride(2) == 5 * 8
    if strides == "expanded_beta":
        assert beta.stride(2) == 0
    if strides == "last_axis":
        assert q.stride(3) == 2


def test_steps() -> None:
    kwargs = make_step(Problem(B=3, H=2, HV=4), slots=7, indices=(6, -1, 0), pad_slot=-1)
    assert kwargs["q"].shape == (3, 2, 32) and kwargs["state"].shape == (7, 4, 32, 32)
    assert kwargs["state_indices"].tolist() == [6, -1, 0]
    assert make_step(Problem(B=3, state=None))["state"].shape[0] == 3


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_families_are_calls_within_the_contract(name: str, dtype: torch.dtype) -> None:
    kwargs = FAMILIES[name].build(Problem(H=1, HV=2, dtype=dtype))
    explanation = kda2.explain(kda2.kda, **kwargs)
    assert explanation.chosen is not None
    if FAMILIES[name].spoilt is None:
        assert not decay(kwargs).isnan().any() and (decay(kwargs) <= 0).all()


def test_families_probe_what_they_say() -> None:
    problem = Problem(T=200)
    built = {name: f.build(problem) for name, f in FAMILIES.items()}
    assert (decay(built["saturated_gate"]) == -5).all() and (decay(built["no_decay"]) == 0).all()
    assert (decay(built["deep_gate"]) == -1000).any() and (built["reset_log"]["g"] == -torch.inf).any()
    assert (built["reset_log"]["g"] == -torch.inf).all(-1).any() and (built["reset_softplus"]["g"] == torch.inf).any()
    keys = built["repeated_keys"]["k"]
    assert torch.equal(keys, keys[:, :1].expand_as(keys)) and (built["repeated_keys"]["beta"] == 1).all()
    near = built["near_collinear_keys"]["k"].double()
    cosine = torch.nn.functional.cosine_similarity(near[:, 1:], near[:, :-1], dim=-1)
    assert cosine.min() > 0.999 and not torch.equal(near[:, 1:], near[:, :-1])
    assert (2 * built["repeated_keys_neg_eigval"]["beta"].float().sigmoid() > 1.98).all()
    norms = built["unnormalised_keys"]["k"].float().norm(dim=-1)
    assert norms.min() < 0.2 and norms.max() > 1.2 and not built["unnormalised_keys"]["qk_l2norm"]
    g, tiny = built["open_gate"]["g"], built["tiny_rows"]["k"].float().norm(dim=-1)
    assert g.min() < -3 and g.max() > 20 and ((g > 0) & (g < 4)).float().mean() > 0.2
    assert tiny.min() < 1e-4 and tiny.max() > 0.3 and built["tiny_rows"]["qk_l2norm"]
    assert built["one_token"]["q"].shape[1] == 1 and built["all_empty"]["q"].shape[1] == 0
    assert built["nan_neighbour"]["v"][:, 37:58].isfinite().sum() == 0
    assert built["large_state"]["initial_state"].std() > 50


def test_a_family_of_ones_own() -> None:
    @family("only-here", probes="registration")
    def only_here(p: Problem) -> dict[str, Any]:
        return make(p)

    assert FAMILIES["only-here"] == Family("only-here", "registration", only_here)
    try:
        with pytest.raises(kda2.InvalidValue, match="name must be a new family's name, got 'only-here'"):
            family("only-here", probes="again")(only_here)
    finally:
        del FAMILIES["only-here"]
