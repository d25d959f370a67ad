"""Calls of other functions, and of `kda2.kda_step`, in the words of `kda2.kda`.

Each reader takes a call's arguments by name and gives the keyword arguments of `kda2.kda` for the same result, or
raises `NotCaptured`. Tensors come out as they went in, as views of them, or cast where that loses nothing.

FLA's functions are those of fla-core 0.6.0: there `lower_bound` alone makes the gate a bounded one, `safe_gate` is a
promise to the kernels, and `fused_recurrent_kda` ignores options that it does not name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kda2.errors import KDA2Error
from kda2.ops.kda.gate import Gate

Arguments = Mapping[str, Any]
TOKENS = ("q", "k", "v", "g", "beta")
_KDA = ("scale", "qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "state_layout")
_FLA = {
    "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "lower_bound", "A_log",
    "dt_bias", "cu_seqlens", "state_v_first", "transpose_state_layout",
}  # fmt: skip
# They change how FLA computes, not what.
_FLA_HOW = {"cu_seqlens_cpu", "chunk_size", "disable_recompute", "use_graph", "max_num_seqs"}
_DEEPEST = -5.0


class NotCaptured(KDA2Error, ValueError):
    """A call that `kda2.kda` has no words for; the message is the reason."""


def kda(given: Arguments) -> dict[str, Any]:
    """`kda2.kda` itself, without what says only how to compute."""
    kept = {name: x for name, x in given.items() if name not in ("impl", "deterministic")}
    kept.setdefault("gate", Gate.log())
    return kept


def kda_step(given: Arguments) -> dict[str, Any]:
    """One token for each row that has a state; the states of a pool are gathered."""
    tokens, state, rows = {name: given[name] for name in TOKENS}, given["state"], given.get("state_indices")
    if rows is not None:
        at = rows.long()
        live = (at >= 0) & (at < state.shape[0]) & (at != given.get("pad_slot", -1))
        where = live.nonzero().flatten()
        tokens, state = {name: x[where] for name, x in tokens.items()}, state[at[where]]
    if not tokens["q"].shape[0]:
        raise NotCaptured("no row has a state")
    options = {name: given[name] for name in _KDA if name in given}
    one_token = {name: x.unsqueeze(1) for name, x in tokens.items()}
    return {
        **one_token,
        **options,
        "gate": given.get("gate", Gate.log()),
        "initial_state": state,
        "output_final_state": True,
    }


def chunk_kda(given: Arguments) -> dict[str, Any]:
    """`fla.ops.kda.chunk_kda`."""
    if given.get("cp_context") is not None:
        raise NotCaptured("cp_context: kda2 has no context parallelism")
    if given.get("return_intermediate_states"):
        raise NotCaptured("return_intermediate_states: kda2 returns no states between chunks")
    return _fla(given)


def fused_recurrent_kda(given: Arguments) -> dict[str, Any]:
    """`fla.ops.kda.fused_recurrent_kda`."""
    if given["beta"].dim() == given["v"].dim():
        raise NotCaptured("beta per value channel: kda2's is per head")
    return _fla(given)


def _fla(given: Arguments) -> dict[str, Any]:
    for name in sorted(set(given) - _FLA - _FLA_HOW - {"cp_context", "return_intermediate_states"}):
        if given[name] is not None and given[name] is not False:
            raise NotCaptured(f"{name}: not an option of fla-core 0.6.0's KDA that kda2 knows")
    q = given["q"]
    own = {name: given[name] for name in ("q", "k", "v")}
    wide = {name: given[name] if given[name].dtype == q.dtype else given[name].float() for name in ("g", "beta")}
    v_first = given.get("state_v_first") or given.get("transpose_state_layout")
    return {
        **own,
        **wide,
        "gate": _fla_gate(given),
        "scale": given.get("scale"),
        "qk_l2norm": bool(given.get("use_qk_l2norm_in_kernel")),
        "beta_sigmoid": bool(given.get("use_beta_sigmoid_in_kernel")),
        "allow_neg_eigval": bool(given.get("allow_neg_eigval")),
        "initial_state": given.get("initial_state"),
        "output_final_state": bool(given.get("output_final_state")),
        "state_layout": "vk" if v_first else "kv",
        "cu_seqlens": given.get("cu_seqlens"),
    }


def _fla_gate(given: Arguments) -> Gate:
    bound = given.get("lower_bound")
    if not given.get("use_gate_in_kernel"):
        return _promised(given["g"], bound) if given.get("safe_gate") else Gate.log()
    A_log, dt_bias = _learned(given)
    if bound is None:
        if A_log is None:
            raise NotCaptured("use_gate_in_kernel without A_log and lower_bound: FLA gives it no meaning")
        return Gate.softplus(A_log, dt_bias)
    if not _DEEPEST <= bound < 0:
        raise NotCaptured(f"lower_bound = {bound}: kda2's is in [-5, 0)")
    if A_log is None:  # rate 1
        A_log = torch.zeros(given["v"].shape[2], device=given["v"].device)
    return Gate.bounded(A_log, dt_bias, bound)


def _promised(g: Tensor, bound: float | None) -> Gate:
    """`safe_gate` on log decays made by the caller: the promise is taken over where it holds."""
    bound = bound if bound is not None and _DEEPEST <= bound < 0 else _DEEPEST
    kept = bool((g.float() >= bound).all())
    return Gate.log(bound if kept else None)


def _learned(given: Arguments) -> tuple[Tensor | None, Tensor | None]:
    """A_log [HV] and dt_bias [HV, K] in fp32: FLA reads them flat, whatever their shape."""
    HV, K = given["v"].shape[2], given["q"].shape[-1]
    A_log, dt_bias = given.get("A_log"), given.get("dt_bias")
    for name, x, size in (("A_log", A_log, HV), ("dt_bias", dt_bias, HV * K)):
        if x is not None and x.numel() != size:
            raise NotCaptured(f"{name} with {x.numel()} elements: kda2's has {size}")
    return (
        None if A_log is None else A_log.detach().float().reshape(HV),
        None if dt_bias is None else dt_bias.detach().float().reshape(HV, K),
    )


READERS: dict[str, Callable[[Arguments], dict[str, Any]]] = {
    "kda2.kda": kda,
    "kda2.kda_step": kda_step,
    "fla.ops.kda.chunk_kda": chunk_kda,
    "fla.ops.kda.fused_recurrent_kda": fused_recurrent_kda,
}
