"""Benchmarks on probe families: how far off an implementation is, judged as `kda2.testing` judges kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kda2.testing import FAMILIES, Comparison, Family, inputs, verify
from kda2.testing.oracle import Outputs
from kda2.workbench.profiler.peers import Peer
from kda2.workbench.profiler.problems import DTYPES, FamilyCase, Options, Problem

_OUTPUTS = {"o": "o", "final state": "state"}
# sigmoid(logit) is 1 in fp32 for what bf16 makes of the logit of this
_SURE = 1.0 - 2.0**-25


@dataclass(frozen=True)
class Errors:
    """Relative L2 errors and limits by output; `wrong` says why an answer has none, as a record's status."""

    rel_err: dict[str, float] = field(default_factory=dict)
    limit: dict[str, float] = field(default_factory=dict)
    wrong: str = ""


def judge(peer: Peer, case: FamilyCase, where: torch.device) -> Errors:
    """Hold an implementation to a family; raises whatever it raises."""

    def run(**kwargs: Any) -> Outputs:
        bound = peer.bind(_bound_problem(case, kwargs))
        with torch.no_grad():
            return _returned(bound.read(bound.call()), kwargs)

    found = verify(run, _inside(FAMILIES[case.family]), _base(case, where)).comparisons
    compared = {_OUTPUTS[c.quantity]: c for c in found if c.quantity in _OUTPUTS and not c.mismatch}
    return Errors(
        {name: _digits(c.relative_l2) for name, c in compared.items() if math.isfinite(c.relative_l2)},
        {name: _digits(c.limit) for name, c in compared.items()},
        next((_why(c) for c in found if c.mismatch or not math.isfinite(c.relative_l2)), ""),
    )


def problem(case: FamilyCase, where: torch.device) -> Problem:
    """The family's call, as implementations are bound to it."""
    return _bound_problem(case, _inside(FAMILIES[case.family]).build(_base(case, where)))


def _base(case: FamilyCase, where: torch.device) -> inputs.Problem:
    base = inputs.Problem(
        T=case.tokens, H=case.heads, HV=case.value_heads, K=case.k, V=case.v, dtype=DTYPES[case.dtype],
        device=str(where),
    )  # fmt: skip
    return base if case.gate == "own" else replace(base, regime=case.gate)


def _inside(family: Family) -> Family:
    """The family with norms and sigmoid left to the kernel where that is the same call: some peers have no other."""

    def build(base: inputs.Problem) -> dict[str, Any]:
        kwargs = family.build(base)
        if not kwargs["qk_l2norm"] and _are_unit(kwargs["q"]) and _are_unit(kwargs["k"]):
            kwargs["qk_l2norm"] = True
        if not kwargs["beta_sigmoid"]:
            logit = torch.logit(kwargs["beta"].double().clamp(1.0 - _SURE, _SURE))
            kwargs |= {"beta": logit.to(kwargs["beta"].dtype), "beta_sigmoid": True}
        return kwargs

    return replace(family, build=build)


def _are_unit(rows: Tensor) -> bool:
    return bool(((rows.double().norm(dim=-1) - 1.0).abs() < 1e-2).all())


def _bound_problem(case: FamilyCase, kwargs: Mapping[str, Any]) -> Problem:
    gate, scale = kwargs["gate"], kwargs["scale"]
    tensors = {name: x for name, x in kwargs.items() if isinstance(x, Tensor)}
    tensors |= {name: x for name, x in (("A_log", gate.A_log), ("dt_bias", gate.dt_bias)) if x is not None}
    options = Options(
        case.k**-0.5 if scale is None else scale, kwargs["output_final_state"], gate.kind, gate.lower_bound,
        kwargs["qk_l2norm"], kwargs["beta_sigmoid"], kwargs["allow_neg_eigval"], kwargs["state_layout"],
    )  # fmt: skip
    return Problem(case, tensors, options)


def _returned(outputs: Mapping[str, Tensor], kwargs: Mapping[str, Any]) -> Outputs:
    """(o, final state) as `kda2.kda` returns them. What a peer leaves in tokens of no sequence is its own affair."""
    o, state, offsets = outputs["o"].clone(), outputs.get("state"), kwargs["cu_seqlens"]
    if offsets is not None:
        o[:, int(offsets[-1]) :] = 0
    return o, state.mT if state is not None and kwargs["state_layout"] == "vk" else state


def _why(c: Comparison) -> str:
    return f"unsupported(wrong result: {c.explain()})"


def _digits(error: float) -> float:
    return float(f"{error:.4g}")
