"""Making inputs for KDA: a `Problem` says what is wanted, `make` gives the keyword arguments of `kda2.kda`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kda2.ops.kda import Gate
from kda2.ops.kda.gate import log_decay

GateKind = Literal["log", "log_bounded", "softplus", "bounded"]
Regime = Literal["strong", "weak", "mixed", "none"]
Strides = Literal["contiguous", "fused", "head_first", "expanded_beta", "last_axis"]

LOWER_BOUND = -5.0
# A gate activation so low that every gate gives exactly no decay; every dtype holds it.
SHUT = -1.0e4


@dataclass(frozen=True)
class Problem:
    """A KDA problem by its facts. Values depend on `seed` and the sizes alone, never on the device.

    `lengths` packs sequences into one row (`tail` tokens follow the last of them); without it the batch is dense,
    B x T. `g_dtype` and `beta_dtype` are the inputs' `dtype` unless given. `state` is the dtype of the initial state,
    None for none. `regime` shifts the gate's activations: `strong` forgets within 16 tokens, `weak` remembers from a
    hundred tokens to everything, `mixed` has one depth per head, `none` never forgets.
    """

    lengths: tuple[int, ...] | None = None
    B: int = 1
    T: int = 64
    tail: int = 0
    H: int = 2
    HV: int = 2
    K: int = 32
    V: int = 32
    dtype: torch.dtype = torch.bfloat16
    g_dtype: torch.dtype | None = None
    beta_dtype: torch.dtype | None = None
    gate: GateKind = "bounded"
    dt_bias: bool = True
    lower_bound: float = LOWER_BOUND
    regime: Regime = "mixed"
    qk_l2norm: bool = True
    beta_sigmoid: bool = True
    neg_eigval: bool = False
    scale: float | None = None
    state: torch.dtype | None = torch.float32
    final_state: bool = True
    layout: Literal["kv", "vk"] = "kv"
    offsets_dtype: torch.dtype = torch.int64
    strides: Strides = "contiguous"
    seed: int = 0
    device: str = "cpu"

    @property
    def rows(self) -> tuple[int, int]:
        """(B, T) of the tensors."""
        return (self.B, self.T) if self.lengths is None else (1, sum(self.lengths) + self.tail)

    @property
    def sequences(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)


def make(problem: Problem) -> dict[str, Any]:
    """The keyword arguments of `kda2.kda` for `problem`.

    q, k, v, beta and the gate's activations are normal; A_log and dt_bias uniform in [0, 1). Without `qk_l2norm` the
    keys and queries come normalised, without `beta_sigmoid` beta comes in (0, 1), and for the gates `log` and
    `log_bounded` g is the bounded gate's value, at most 0.
    """
    p, rng = problem, torch.Generator().manual_seed(problem.seed)
    B, T = p.rows
    q, k = (_normal(rng, B, T, p.H, p.K) for _ in range(2))
    v, g, beta = _normal(rng, B, T, p.HV, p.V), _normal(rng, B, T, p.HV, p.K), _normal(rng, B, T, p.HV)
    A_log, dt_bias = torch.rand(p.HV, generator=rng), torch.rand(p.HV, p.K, generator=rng)
    g = g + _shift(p, rng)
    state = _normal(rng, *state_shape(p))
    if not p.qk_l2norm:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    if not p.beta_sigmoid:
        beta = beta.sigmoid()
    gate = _gate(p, A_log.to(p.device), dt_bias.to(p.device))
    if gate.kind == "log":
        g = log_decay(g, Gate.bounded(A_log, dt_bias, p.lower_bound), torch.float32)
    tokens = {
        "q": q.to(p.dtype),
        "k": k.to(p.dtype),
        "v": v.to(p.dtype),
        "g": g.to(p.g_dtype or p.dtype),
        "beta": beta.to(p.beta_dtype or p.dtype),
    }
    tokens = {name: x.to(p.device) for name, x in tokens.items()}
    return {
        **RESTRIDE[p.strides](tokens),
        "gate": gate,
        "scale": p.scale,
        "qk_l2norm": p.qk_l2norm,
        "beta_sigmoid": p.beta_sigmoid,
        "allow_neg_eigval": p.neg_eigval,
        "initial_state": None if p.state is None else state.to(p.state).to(p.device),
        "output_final_state": p.final_state,
        "state_layout": p.layout,
        "cu_seqlens": None if p.lengths is None else offsets(p.lengths, p.offsets_dtype, p.device),
    }


def as_step(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `kda2.kda_step` for the one token that those of `kda2.kda` hold (dense, T = 1, with an
    initial state)."""
    tokens = {name: kwargs[name].squeeze(1) for name in ("q", "k", "v", "g", "beta")}
    options = ("gate", "scale", "qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "state_layout")
    return {**tokens, **{name: kwargs[name] for name in options}, "state": kwargs["initial_state"]}


def make_step(
    problem: Problem, *, slots: int | None = None, indices: Sequence[int] | None = None, pad_slot: int = -1
) -> dict[str, Any]:
    """The keyword arguments of `kda2.kda_step`: `problem.B` rows of one token; T and lengths do not matter. With
    `indices` (one per row) the state is a pool of `slots`, without them `slots` does not matter."""
    p = replace(problem, lengths=None, T=1, state=problem.state or torch.float32)
    kwargs = as_step(make(p))
    if indices is None:
        return kwargs
    rng = torch.Generator().manual_seed(p.seed + 1)
    pool = _normal(rng, slots or p.B, *state_shape(p)[1:])
    return {
        **kwargs,
        "state": pool.to(kwargs["state"].dtype).to(p.device),
        "state_indices": torch.tensor(list(indices), dtype=p.offsets_dtype, device=p.device),
        "pad_slot": pad_slot,
    }


def offsets(lengths: Sequence[int], dtype: torch.dtype = torch.int64, device: str = "cpu") -> Tensor:
    """cu_seqlens [N + 1] of sequences of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype).to(device)


def state_shape(problem: Problem) -> tuple[int, int, int, int]:
    """The shape of the problem's states, in its layout."""
    p = problem
    return (p.sequences, p.HV, p.K, p.V) if p.layout == "kv" else (p.sequences, p.HV, p.V, p.K)


def _normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng)


def _shift(p: Problem, rng: torch.Generator) -> Tensor:
    """What the regime adds to the gate's activations, per head [HV, 1]."""
    per_head = -8 * torch.rand(p.HV, 1, generator=rng)
    by_name = {"strong": 0.0, "weak": -8.0, "none": SHUT}
    return per_head if p.regime == "mixed" else torch.full_like(per_head, by_name[p.regime])


def _gate(p: Problem, A_log: Tensor, dt_bias: Tensor) -> Gate:
    bias = dt_bias if p.dt_bias else None
    if p.gate == "softplus":
        return Gate.softplus(A_log, bias)
    if p.gate == "bounded":
        return Gate.bounded(A_log, bias, p.lower_bound)
    return Gate.log(p.lower_bound if p.gate == "log_bounded" else None)


def _contiguous(tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    return tokens


def _fused(tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    """Views of one projection's rows, as a layer with a fused projection has them, for all that share q's dtype."""
    dtype = tokens["q"].dtype
    mine = {name: x.flatten(2) for name, x in tokens.items() if x.dtype == dtype}
    rows = torch.cat([torch.full_like(mine["q"][..., :1], torch.nan), *mine.values()], dim=-1)
    parts = rows[..., 1:].split([x.shape[-1] for x in mine.values()], dim=-1)
    views = {name: part.unflatten(-1, tokens[name].shape[2:]) for name, part in zip(mine, parts, strict=True)}
    return {**tokens, **views}


def _head_first(tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stored [B, H, T, ...]."""
    return {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in tokens.items()}


def _expanded_beta(tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    """One beta for all heads, with stride 0."""
    beta = tokens["beta"]
    return {**tokens, "beta": beta[..., :1].expand_as(beta)}


def _last_axis(tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every second element along the last axis; NaN lies between."""
    return {name: torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0] for name, x in tokens.items()}


RESTRIDE: dict[Strides, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "contiguous": _contiguous,
    "fused": _fused,
    "head_first": _head_first,
    "expanded_beta": _expanded_beta,
    "last_axis": _last_axis,
}
