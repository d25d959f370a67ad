"""The public calls: `kda` (prefill) and `kda_step` (decode)."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor

from kda2.dispatch import choose
from kda2.ops.kda.check import check_call, check_options, check_step_call, refuse_writes_with_grad
from kda2.ops.kda.gate import Gate

StateLayout = Literal["kv", "vk"]


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    gate: Gate = Gate.log(),  # noqa: B008 - frozen
    scale: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_layout: StateLayout = "kv",
    cu_seqlens: Tensor | None = None,
    deterministic: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over whole sequences (prefill).

    For each sequence and value head, with state S [K, V]:

        S <- diag(exp(g_t)) S;  e = v_t - S^T k_t;  S <- S + beta_t k_t e^T;  o_t = scale * S^T q_t

    Source: Kimi Linear, arXiv 2510.26692.

    Args:
        q, k: [B, T, H, K], bf16, fp16 or fp32; K at most 256. The reference and torch implementations take fp64 too.
        v: [B, T, HV, V], q's dtype; HV a multiple of H (value head h reads q/k head h // (HV / H)); V at most 512.
        g: [B, T, HV, K], q's dtype or fp32: the gate's input, natural log decay under `Gate.log`.
        beta: [B, T, HV], q's dtype or fp32: the delta rule's step size, or its logit with `beta_sigmoid`. The GPU
            kernels for 16-bit inputs expect at most 1; beyond, pass logits with `allow_neg_eigval`, or fp32 inputs.
        gate: how g becomes the log decay; see `Gate`.
        scale: factor of the output; K^-0.5 if None.
        qk_l2norm: first divide each q and k by sqrt(sum x^2 + 1e-6).
        beta_sigmoid: beta is a logit; use sigmoid(beta).
        allow_neg_eigval: use 2 * sigmoid(beta), so that the state may flip sign along k. Needs `beta_sigmoid`.
        initial_state: [N, HV, K, V] (or [N, HV, V, K], see `state_layout`), any floating dtype; zeros if None.
        output_final_state: also return the state after the last token.
        state_layout: "kv" or "vk", for the initial and the final state.
        cu_seqlens: [N + 1] int32 or int64, offsets of N packed sequences (then B = 1), non-decreasing, from 0 to at
            most T. Tokens past the last offset belong to no sequence; their o is 0. On a GPU its contents are not
            checked outside `kda2.debug()`.
        deterministic: only implementations that give the same bits every time.
        impl: "auto", "hopper", "triton", "torch" or "reference". `kda2.explain(kda2.kda, ...)` says what "auto" picks
            and why.

    Returns:
        o: [B, T, HV, V], v's dtype.
        final_state: as `initial_state` in shape and dtype (fp32 without one, fp64 for fp64 inputs), or None unless
            asked for.

    Raises:
        ValueError: a shape, device, layout or value is wrong (`kda2.InvalidValue`).
        TypeError: a dtype or Python type is wrong (`kda2.InvalidType`).
        kda2.UnsupportedTarget: no implementation, or not the one named, serves this call here.
    """
    options = check_options(q, gate, scale, qk_l2norm, beta_sigmoid, allow_neg_eigval, state_layout)
    call = check_call(
        q, k, v, g, beta, options,
        initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, deterministic=deterministic,
    )  # fmt: skip
    run = choose(call.query(), impl).load()
    with _own_dtypes(q):
        o, state = run(call)
    return o, state


def kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    gate: Gate = Gate.log(),  # noqa: B008 - frozen
    scale: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    state_layout: StateLayout = "kv",
    state_indices: Tensor | None = None,
    pad_slot: int = -1,
    inplace: bool = True,
    out: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention for one token a sequence (decode). The maths and options are `kda`'s.

    Args:
        q, k: [B, H, K]. v: [B, HV, V]. g: [B, HV, K]. beta: [B, HV]. Dtypes as for `kda`.
        state: [B, HV, K, V] (or [B, HV, V, K]), or with `state_indices` a pool [slots, HV, K, V].
        state_indices: [B] int32 or int64, the slot of each row; no slot may be named twice. None: row b has slot b.
        pad_slot: rows whose index is this value give o = 0 and leave the pool untouched. On a GPU, so does any
            index outside [0, slots).
        inplace: write the new states into `state` and return it; otherwise return an updated copy. Where an input
            requires grad, pass False.
        out: [B, HV, V], v's dtype, receives o; allocated if None. It may be v itself, and must share no memory with
            the other tensors. Not where an input requires grad.

    Returns:
        o: [B, HV, V], v's dtype (`out` if given), and the state.

    Raises: as `kda`.
    """
    options = check_options(q, gate, scale, qk_l2norm, beta_sigmoid, allow_neg_eigval, state_layout)
    call = check_step_call(
        q, k, v, g, beta, state, options,
        state_indices=state_indices, pad_slot=pad_slot, inplace=inplace, out=out,
    )  # fmt: skip
    query = call.query()
    chosen = choose(query, impl)
    if query.needs_grad:
        refuse_writes_with_grad(call)
    run = chosen.load()
    with _own_dtypes(q):
        o, new_state = run(call)
    if not torch.compiler.is_compiling():  # autograd must see that kernels wrote into tensors that it may have saved
        written = (state if inplace else None, out)
        torch.autograd.graph.increment_version([x for x in written if x is not None])
    return o, new_state


def _own_dtypes(q: Tensor) -> AbstractContextManager[object]:
    """Keeps autocast out: it would turn the products inside an fp32 call into bf16 ones."""
    device = q.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()
