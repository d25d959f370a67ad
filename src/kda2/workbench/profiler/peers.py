"""Implementations under one interface: kda2's own and other libraries', called as their authors document.

Each is bound to a problem once, outside the clock (layouts its interface wants are made there), and then called with no
arguments on the very tensors the others read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kda2
from kda2 import device
from kda2.dispatch import registered
from kda2.errors import InvalidValue, KDA2Error
from kda2.workbench.profiler.environment import package_version
from kda2.workbench.profiler.problems import LOWER_BOUND, Problem, StepCase

OWN = "kda2:"


class NotServed(KDA2Error, RuntimeError):
    """An implementation does not serve a case; the message is the reason."""


@dataclass(frozen=True)
class Bound:
    """An implementation bound to one problem. `call` runs it; `read` turns what it returned into o and state
    [N, HV, K, V]."""

    call: Callable[[], Any]
    read: Callable[[Any], dict[str, Tensor]]


@dataclass(frozen=True)
class Peer:
    """An implementation: its name in records, its version, and how it is bound to a problem (or `NotServed`)."""

    name: str
    version: str
    bind: Callable[[Problem], Bound]


def find(name: str) -> Peer:
    """The implementation called `name` ("kda2:triton" or "triton" for kda2's own).

    Raises `NotServed` with a plain sentence if its package cannot be imported, `InvalidValue` for an unknown name.
    """
    own = name.removeprefix(OWN)
    if own in ("triton", "torch", "reference"):
        return Peer(OWN + own, kda2.__version__, partial(_kda2, own))
    if name not in _PEERS:
        wanted = f"one of {[OWN + x for x in ('triton', 'torch', 'reference')] + list(_PEERS)}"
        raise InvalidValue("impl", wanted, repr(name))
    module, distribution, bind = _PEERS[name]
    try:
        imported = _import(module)
    except Exception as e:  # a peer may fail to import in any way; none of them may stop the run
        raise NotServed(f"{name} is not measured: importing {module} failed ({type(e).__name__}: {e})") from e
    return Peer(name, _version(imported, distribution), partial(bind, imported))


def _import(module: str) -> Any:
    # FLA hands eligible calls to FlashKDA where that is installed; here each is measured as itself
    os.environ.setdefault("FLA_FLASH_KDA", "0")
    return import_module(module)


def _version(module: Any, distribution: str) -> str:
    """The peer's version; for one installed without metadata, a hash of its package's files."""
    if version := package_version(distribution) or getattr(module, "__version__", None):
        return str(version)
    folder = Path(module.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".py", ".so")):
        digest.update(path.read_bytes())
    return f"sha256:{digest.hexdigest()[:12]}"


def _kda2(impl: str, problem: Problem) -> Bound:
    t = problem.tensors
    tokens = (t["q"], t["k"], t["v"], t["g"], t["beta"])
    options: dict[str, Any] = {"gate": problem.gate, "qk_l2norm": True, "beta_sigmoid": True, "impl": impl}
    op = "kda_step" if isinstance(problem.case, StepCase) else "kda"
    next(i for i in registered(op) if i.name == impl).load()  # imports its kernels, which is no part of a call
    if isinstance(problem.case, StepCase):
        return Bound(lambda: kda2.kda_step(*tokens, t["state"], **options), _read)
    options |= {"cu_seqlens": t.get("cu_seqlens"), "initial_state": t.get("initial_state")}
    options["output_final_state"] = problem.case.state != "none"
    return Bound(lambda: kda2.kda(*tokens, **options), _read)


def _read(result: tuple[Tensor, Tensor | None], transposed: bool = False) -> dict[str, Tensor]:
    o, state = result
    if state is None:
        return {"o": o}
    return {"o": o, "state": state.transpose(-1, -2) if transposed else state}


def _fla(module: Any, problem: Problem) -> Bound:
    """fla.ops.kda: `chunk_kda` for sequences, states [N, H, V, K] as serving engines keep them; for single tokens the
    function under `fused_recurrent_kda`, which updates the state in place and so is the faster of the two."""
    t = dict(problem.tensors)
    options: dict[str, Any] = {
        "scale": problem.scale,
        "A_log": t["A_log"],
        "dt_bias": t["dt_bias"].reshape(-1),
        "lower_bound": LOWER_BOUND,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    names = ("q", "k", "v", "g", "beta")
    if isinstance(problem.case, StepCase):
        step = import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
        tokens = {name: t[name].unsqueeze(1) for name in names}

        def call() -> tuple[Tensor, Tensor]:
            o = torch.empty_like(tokens["v"])
            step(**tokens, initial_state=t["state"], inplace_final_state=True, out=o, **options)
            return o, t["state"]

        return Bound(call, lambda result: _read((result[0].squeeze(1), result[1])))
    cu_seqlens = t["cu_seqlens"].long() if "cu_seqlens" in t else None
    initial = t["initial_state"].transpose(-1, -2).contiguous() if "initial_state" in t else None
    prefill = partial(
        module.chunk_kda, *(t[name] for name in names), safe_gate=True, cu_seqlens=cu_seqlens, state_v_first=True,
        initial_state=initial, output_final_state=problem.case.state != "none", **options,
    )  # fmt: skip
    return Bound(prefill, partial(_read, transposed=True))


def _flash_kda(module: Any, problem: Problem) -> Bound:
    """flash_kda.fwd: bf16, K = V = 128, states as [N, H, V, K], outputs written into given tensors."""
    t, case = problem.tensors, problem.case
    _serve(not isinstance(case, StepCase), "it has no decode step")
    _serve((case.dtype, case.k, case.v) == ("bf16", 128, 128), "it takes bf16 with K = V = 128 only")
    _serve(case.value_heads == case.heads, "it has no grouped value heads")
    initial = t["initial_state"].transpose(-1, -2).contiguous() if "initial_state" in t else None
    cu_seqlens = t["cu_seqlens"].long() if "cu_seqlens" in t else None
    beta = t["beta"].contiguous()

    def call() -> tuple[Tensor, Tensor | None]:
        o = torch.empty_like(t["v"])
        final = torch.empty_like(initial) if initial is not None else None
        module.fwd(
            t["q"], t["k"], t["v"], t["g"], beta, problem.scale, o, t["A_log"], t["dt_bias"], LOWER_BOUND,
            initial_state=initial, final_state=final, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return o, final

    return Bound(call, partial(_read, transposed=True))


def _cudnn(module: Any, problem: Problem) -> Bound:
    """cudnn.linear_attention.kimi_delta_attention: tokens packed [T, H, D], states as [N, H, V, K]. It would turn
    bf16 g and beta into fp32 at each call; that is done for it, off the clock."""
    t, case = problem.tensors, problem.case
    _serve(not isinstance(case, StepCase), "it has no decode step")
    initial = t["initial_state"].transpose(-1, -2).contiguous() if "initial_state" in t else None
    arch = device.gpu(t["q"].device.index).arch if t["q"].is_cuda else 0
    offsets = t.get("cu_seqlens", torch.tensor([0, case.tokens], dtype=torch.int32, device=t["q"].device))
    q, k, v, g, beta = (t[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta"))
    call = partial(
        module.kimi_delta_attention, q, k, v, g.float(), beta.float(), offsets,
        scale=problem.scale, initial_state=initial, output_final_state=initial is not None,
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
        gate_lower_bound=LOWER_BOUND, a_log=t["A_log"], dt_bias=t["dt_bias"],
        plan_name="kda_hopper_cuda" if arch == 90 else None,
    )  # fmt: skip
    return Bound(call, lambda result: _read((result[0].unsqueeze(0), result[1]), transposed=True))


def _serve(ok: bool, reason: str) -> None:
    if not ok:
        raise NotServed(reason)


# name in records -> (module, distribution, how to bind)
_PEERS: Mapping[str, tuple[str, str, Callable[[Any, Problem], Bound]]] = {
    "fla": ("fla.ops.kda", "fla-core", _fla),
    "flash_kda": ("flash_kda", "flash-kda", _flash_kda),
    "cudnn": ("cudnn.linear_attention", "nvidia-cudnn-frontend", _cudnn),
}
