"""Probe families: inputs that each kind of mistake fails on. `verify` in this package judges an implementation on them.

A family takes a base `Problem` (sizes, dtype, device, seed) and builds the arguments of `kda2.kda`. To add one, write
such a function here (or anywhere: it registers when imported) under `@family(name, probes=...)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kda2.errors import InvalidValue
from kda2.testing.inputs import SHUT, Problem, make

Builder = Callable[[Problem], dict[str, Any]]
Judge = Literal["tolerance", "same_roundings"]


@dataclass(frozen=True)
class Family:
    """A named kind of input. `probes` says which mistake it finds.

    `judge`: held to the op's tolerance, or to twice the error of a reference with the same roundings. `spoilt`: the
    sequence whose inputs are NaN, which is not compared.
    """

    name: str
    probes: str
    build: Builder
    judge: Judge = "tolerance"
    spoilt: int | None = None


FAMILIES: dict[str, Family] = {}


def family(
    name: str, *, probes: str, judge: Judge = "tolerance", spoilt: int | None = None
) -> Callable[[Builder], Builder]:
    """Register the decorated builder as the family `name`."""

    def register(build: Builder) -> Builder:
        if name in FAMILIES:
            raise InvalidValue("name", "a new family's name", repr(name))
        FAMILIES[name] = Family(name, probes, build, judge, spoilt)
        return build

    return register


def _rng(p: Problem) -> torch.Generator:
    return torch.Generator().manual_seed(p.seed + 0x5EED)


def _log_gate(p: Problem, g: Tensor, **changes: Any) -> dict[str, Any]:
    """`p` with the log decay `g` [B, T, HV, K]."""
    kwargs = make(replace(p, gate="log", **changes))
    return {**kwargs, "g": g.to(kwargs["g"].dtype).to(kwargs["g"].device)}


def _gate_shape(p: Problem) -> tuple[int, int, int, int]:
    return (*p.rows, p.HV, p.K)


@family("random", probes="the formula itself")
def random(p: Problem) -> dict[str, Any]:
    return make(p)


@family("saturated_gate", probes="exponents of a whole chunk at the bound: exp(-G) overflows")
def saturated_gate(p: Problem) -> dict[str, Any]:
    kwargs = make(replace(p, gate="bounded"))
    return {**kwargs, "g": torch.full_like(kwargs["g"], -SHUT)}


@family("no_decay", probes="errors that pile up in a state that never forgets")
def no_decay(p: Problem) -> dict[str, Any]:
    return make(replace(p, regime="none"))


@family("weak_gate", probes="memory over many chunks, as trained models have it")
def weak_gate(p: Problem) -> dict[str, Any]:
    return make(replace(p, regime="weak"))


@family("random_depth_gate", probes="decays from 1e-4 to 20 side by side: differences of prefix sums cancel")
def random_depth_gate(p: Problem) -> dict[str, Any]:
    depth = torch.empty(_gate_shape(p)).uniform_(-9.2, 3.0, generator=_rng(p))
    return _log_gate(p, -depth.exp())


@family("deep_gate", probes="log decays of -1000 among ordinary ones: inf * 0 and lost small terms")
def deep_gate(p: Problem) -> dict[str, Any]:
    rng = _rng(p)
    deep = torch.rand(_gate_shape(p), generator=rng) < 0.1
    return _log_gate(p, torch.where(deep, -1000.0, -torch.rand(_gate_shape(p), generator=rng)))


@family("reset_log", probes="log decay -inf, per channel and for whole tokens: inf - inf")
def reset_log(p: Problem) -> dict[str, Any]:
    return _log_gate(p, torch.where(_resets(p), -torch.inf, -0.1 * torch.rand(_gate_shape(p), generator=_rng(p))))


@family("reset_softplus", probes="softplus gate activations of +inf: inf * 0 and inf - inf")
def reset_softplus(p: Problem) -> dict[str, Any]:
    kwargs = make(replace(p, gate="softplus", regime="weak"))
    return {**kwargs, "g": kwargs["g"].masked_fill(_resets(p).to(kwargs["g"].device), torch.inf)}


def _resets(p: Problem) -> Tensor:
    """Single channels at random, and a document boundary (every channel) at random tokens."""
    rng = _rng(p)
    channels = torch.rand(_gate_shape(p), generator=rng) < 0.03
    boundaries = torch.rand(*p.rows, 1, 1, generator=rng) < 0.03
    return channels.logical_or(boundaries)


@family("open_gate", probes="softplus activations from -4 to 30: its bend and its linear side")
def open_gate(p: Problem) -> dict[str, Any]:
    kwargs, rng = make(replace(p, gate="softplus")), _rng(p)
    g = torch.empty(_gate_shape(p)).uniform_(-4.0, 8.0, generator=rng)
    far = torch.rand(_gate_shape(p), generator=rng) < 0.05
    g = torch.where(far, torch.empty_like(g).uniform_(8.0, 30.0, generator=rng), g)
    # rates from exp(-3) to exp(-2), so that what is forgotten shows whether the activation was read right
    gate = replace(kwargs["gate"], A_log=kwargs["gate"].A_log - 3.0)
    return {**kwargs, "g": g.to(kwargs["g"].dtype).to(kwargs["g"].device), "gate": gate}


@family("repeated_keys", probes="one unit key, beta 1, no decay: the worst inverse", judge="same_roundings")
def repeated_keys(p: Problem) -> dict[str, Any]:
    return _keys(p, 0.0)


@family("near_collinear_keys", probes="keys 1e-3 apart: truncated or 16-bit inverses", judge="same_roundings")
def near_collinear_keys(p: Problem) -> dict[str, Any]:
    return _keys(p, 1e-3)


def _keys(p: Problem, spread: float) -> dict[str, Any]:
    """Per head one unit key plus `spread` times noise; beta 1, no decay."""
    kwargs = make(replace(p, regime="none", qk_l2norm=False, beta_sigmoid=False, neg_eigval=False))
    return {**kwargs, "k": _similar_keys(p, spread, kwargs["k"]), "beta": torch.ones_like(kwargs["beta"])}


def _similar_keys(p: Problem, spread: float, like: Tensor) -> Tensor:
    rng = _rng(p)
    key, noise = torch.randn(1, 1, p.H, p.K, generator=rng), torch.randn(like.shape, generator=rng)
    keys = key / key.norm(dim=-1, keepdim=True) + spread * noise
    unit: Tensor = keys / keys.norm(dim=-1, keepdim=True)
    return unit.to(like.dtype).to(like.device)


@family("repeated_keys_neg_eigval", probes="one unit key, beta near 2: (I + A)^-1 needs more than 16 bits",
        judge="same_roundings")  # fmt: skip
def repeated_keys_neg_eigval(p: Problem) -> dict[str, Any]:
    kwargs = make(replace(p, regime="none", qk_l2norm=False, beta_sigmoid=True, neg_eigval=True))
    return {**kwargs, "k": _similar_keys(p, 0.0, kwargs["k"]), "beta": torch.full_like(kwargs["beta"], 5.0)}


@family("unnormalised_keys", probes="key norms from 0.05 to 1.3 without l2norm")
def unnormalised_keys(p: Problem) -> dict[str, Any]:
    kwargs = make(replace(p, qk_l2norm=False))
    norms = torch.empty(*p.rows, p.H, 1).uniform_(0.05, 1.3, generator=_rng(p))
    return {**kwargs, "k": (kwargs["k"].float() * norms.to(kwargs["k"].device)).to(p.dtype)}


@family("tiny_rows", probes="q and k rows of norm 1e-5 to 1 under l2norm: the 1e-6 beneath its root")
def tiny_rows(p: Problem) -> dict[str, Any]:
    kwargs, rng = make(replace(p, qk_l2norm=True)), _rng(p)
    for name in ("q", "k"):
        x = kwargs[name].float()
        norms = 10.0 ** torch.empty(*p.rows, p.H, 1).uniform_(-5.0, 0.0, generator=rng)
        kwargs[name] = (x / x.norm(dim=-1, keepdim=True) * norms.to(x.device)).to(p.dtype)
    return kwargs


@family("one_token", probes="T = 1: everything is padding but one row")
def one_token(p: Problem) -> dict[str, Any]:
    return make(replace(p, lengths=None, T=1))


@family("chunk_edges", probes="lengths one short of a tile, exactly one, and one more")
def chunk_edges(p: Problem) -> dict[str, Any]:
    return make(replace(p, lengths=(15, 16, 17, 31, 32, 33, 63, 64, 65), regime="weak"))


@family("ragged", probes="empty sequences and sequences of one token among others; tokens past the last offset")
def ragged(p: Problem) -> dict[str, Any]:
    return make(replace(p, lengths=(0, 37, 1, 0, 130, 5, 0), tail=3, regime="weak"))


@family("all_empty", probes="a batch of empty sequences: final state = initial state")
def all_empty(p: Problem) -> dict[str, Any]:
    return make(replace(p, lengths=(0, 0, 0)))


@family("nan_neighbour", probes="NaN and inf in one sequence, none in its neighbours", spoilt=1)
def nan_neighbour(p: Problem) -> dict[str, Any]:
    lengths = (37, 21, 70)
    kwargs = make(replace(p, lengths=lengths, state=p.state or torch.float32))
    inside = slice(lengths[0], lengths[0] + lengths[1])
    for name in ("q", "k", "v", "g", "beta"):
        kwargs[name] = kwargs[name].clone()
        kwargs[name][:, inside] = torch.nan
    kwargs["v"][:, inside][:, ::3] = torch.inf
    kwargs["initial_state"][1] = torch.nan
    return kwargs


@family("options", probes="scale, lower_bound, vk states in 16 bits, fp32 g and beta, int32 offsets, strided rows")
def options(p: Problem) -> dict[str, Any]:
    changed = replace(
        p, lengths=(5, 0, 40), scale=0.3, layout="vk", state=torch.bfloat16, dt_bias=False, lower_bound=-1.5
    )
    inputs = replace(changed, g_dtype=torch.float32, beta_dtype=torch.float32, offsets_dtype=torch.int32)
    return make(replace(inputs, strides="fused"))


@family("bare", probes="no initial state, a softplus gate without a bias")
def bare(p: Problem) -> dict[str, Any]:
    return make(replace(p, state=None, gate="softplus", dt_bias=False, regime="weak"))


@family("packed_bare", probes="packed sequences without an initial state: each starts from zeros")
def packed_bare(p: Problem) -> dict[str, Any]:
    return make(replace(p, lengths=(5, 0, 40), state=None, regime="weak"))


@family("large_state", probes="an initial state of RMS 100: v - S^T k cancels", judge="same_roundings")
def large_state(p: Problem) -> dict[str, Any]:
    kwargs = make(replace(p, state=p.state or torch.float32, regime="weak"))
    return {**kwargs, "initial_state": 100 * kwargs["initial_state"]}


@family("grouped", probes="three value heads to a key head, three rows, heads stored before tokens")
def grouped(p: Problem) -> dict[str, Any]:
    changed = replace(p, lengths=None, B=3, T=37, H=1, HV=3, gate="log_bounded", lower_bound=-3.0, regime="mixed")
    norms = replace(changed, qk_l2norm=True, beta_sigmoid=True, neg_eigval=True)
    return make(replace(norms, state=None, layout="vk", strides="head_first"))


@family(
    "many_sequences",
    probes="twelve packed sequences, and more tokens past the last offset than in them",
)
def many_sequences(p: Problem) -> dict[str, Any]:
    lengths = (3, 0, 0, 9, 1, 2, 20, 0, 5, 4, 1, 8)
    changed = replace(p, lengths=lengths, tail=70, H=3, HV=3, gate="softplus", layout="vk", state=torch.float32)
    return make(replace(changed, g_dtype=torch.float32, strides="last_axis", scale=-0.2, regime="mixed"))


@family("long", probes="260 tokens, five value heads to a key head, 16-bit states, negative eigenvalues under decay",
        judge="same_roundings")  # fmt: skip
def long(p: Problem) -> dict[str, Any]:
    changed = replace(p, lengths=None, B=1, T=260, H=1, HV=5, gate="bounded", lower_bound=-0.7, regime="weak")
    return make(replace(changed, neg_eigval=True, beta_sigmoid=True, state=torch.bfloat16, strides="expanded_beta"))


@family("plain_packed", probes="packed without l2norm and sigmoid, log decays with resets, fp16 states")
def plain_packed(p: Problem) -> dict[str, Any]:
    changed = replace(p, lengths=(70, 140, 2), qk_l2norm=False, beta_sigmoid=False, neg_eigval=False)
    kwargs = make(replace(changed, gate="log", state=torch.float16, regime="mixed"))
    resets = torch.rand(kwargs["g"].shape, generator=_rng(p)) < 0.02
    return {**kwargs, "g": kwargs["g"].masked_fill(resets.to(kwargs["g"].device), -torch.inf)}


@family("no_tokens", probes="T = 0 in a dense batch: final state = initial state")
def no_tokens(p: Problem) -> dict[str, Any]:
    return make(replace(p, lengths=None, T=0, state=torch.float32))


@family("large_values", probes="values and a state of RMS 1e4, beside which a constant would not show")
def large_values(p: Problem) -> dict[str, Any]:
    kwargs = make(replace(p, regime="weak", state=p.state or torch.float32))
    size = 100.0 if p.dtype == torch.float16 else 1e4  # what fp16 holds, sums included
    return {**kwargs, "v": kwargs["v"] * size, "initial_state": kwargs["initial_state"] * size}


@family("learned_gate", probes="biases and rates of both signs, softplus activations up to 200, beta logits up to 12")
def learned_gate(p: Problem) -> dict[str, Any]:
    kwargs, rng = make(replace(p, gate="softplus", regime="mixed")), _rng(p)
    gate, g = kwargs["gate"], kwargs["g"].float().cpu()
    A_log = torch.empty(p.HV).uniform_(-7.0, 0.0, generator=rng)
    A_log[0] = 2.0
    bias = torch.empty(p.HV, p.K).uniform_(-6.0, 3.0, generator=rng) if p.dt_bias else None
    far = torch.rand(g.shape, generator=rng) < 0.03
    g = torch.where(far, torch.empty_like(g).uniform_(30.0, 200.0, generator=rng), g)
    learned = replace(gate, A_log=A_log.to(p.device), dt_bias=None if bias is None else bias.to(p.device))
    return {**kwargs, "gate": learned, "g": g.to(kwargs["g"].dtype).to(p.device), "beta": 4 * kwargs["beta"]}
