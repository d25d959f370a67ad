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
from kda2.workbench.profiler.environment import package_version, source_hash
from kda2.workbench.profiler.problems import Problem, StepCase

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

    @property
    def source(self) -> str | None:
        """The hash of the kernels' sources, of kda2's own."""
        return source_hash("kda", self.name.removeprefix(OWN)) if self.name.startswith(OWN) else None


def find(name: str) -> Peer:
    """The implementation called `name` ("kda2:triton" or "triton" for kda2's own).

    Raises `NotServed` with a plain sentence if its package cannot be imported, `InvalidValue` for an unknown name.
    """
    own = {i.name for i in registered("kda")}
    if (impl := name.removeprefix(OWN)) in own:
        return Peer(OWN + impl, kda2.__version__, partial(_kda2, impl))
    if name not in _PEERS:
        wanted = f"one of {[*sorted(OWN + x for x in own), *_PEERS]}"
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
    options: dict[str, Any] = problem.call_options | {"impl": impl}
    op = "kda_step" if isinstance(problem.case, StepCase) else "kda"
    found = [i for i in registered(op) if i.name == impl]
    _serve(bool(found), f"it is no implementation of {op}")
    found[0].load()  # imports its kernels, which is no part of a call
    if isinstance(problem.case, StepCase):
        return Bound(lambda: kda2.kda_step(*tokens, t["state"], **options), _read)
    options |= {"cu_seqlens": t.get("cu_seqlens"), "initial_state": t.get("initial_state")}
    options["output_final_state"] = problem.options.output_final_state
    read = partial(_read, transposed=problem.options.state_layout == "vk")
    return Bound(lambda: kda2.kda(*tokens, **options), read)


def _read(result: tuple[Tensor, Tensor | None], transposed: bool = False) -> dict[str, Tensor]:
    o, state = result
    if state is None:
        return {"o": o}
    return {"o": o, "state": state.transpose(-1, -2) if transposed else state}


def _initial_state(problem: Problem) -> Tensor | None:
    """The initial state as [N, HV, V, K], which serving engines keep and peers prefer."""
    state = problem.tensors.get("initial_state")
    return state if state is None or problem.options.state_layout == "vk" else state.mT.contiguous()


def _fla(module: Any, problem: Problem) -> Bound:
    """fla.ops.kda: `chunk_kda` for sequences, states [N, H, V, K] as serving engines keep them; for single tokens the
    function under `fused_recurrent_kda`, which updates the state in place and so is the faster of the two."""
    t, o = problem.tensors, problem.options
    A_log, dt_bias = t.get("A_log"), t.get("dt_bias")
    options: dict[str, Any] = {
        "scale": o.scale,
        "A_log": A_log,
        "dt_bias": dt_bias if dt_bias is None else dt_bias.reshape(-1),
        "lower_bound": o.lower_bound,
        "use_qk_l2norm_in_kernel": o.qk_l2norm,
        "use_gate_in_kernel": o.gate != "log",
        "use_beta_sigmoid_in_kernel": o.beta_sigmoid,
        "allow_neg_eigval": o.allow_neg_eigval,
    }
    names = ("q", "k", "v", "g", "beta")
    if isinstance(problem.case, StepCase):
        step = import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
        tokens = {name: t[name].unsqueeze(1) for name in names}

        def call() -> tuple[Tensor, Tensor]:
            out = torch.empty_like(tokens["v"])
            step(**tokens, initial_state=t["state"], inplace_final_state=True, out=out, **options)
            return out, t["state"]

        return Bound(call, lambda result: _read((result[0].squeeze(1), result[1])))
    initial = _initial_state(problem)
    _serve(initial is None or initial.dtype == torch.float32, "its initial state is fp32")
    cu_seqlens = t["cu_seqlens"].long() if "cu_seqlens" in t else None
    prefill = partial(
        module.chunk_kda, *(t[name] for name in names), safe_gate=o.lower_bound is not None, cu_seqlens=cu_seqlens,
        state_v_first=True, initial_state=initial, output_final_state=o.output_final_state, **options,
    )  # fmt: skip
    return Bound(prefill, partial(_read, transposed=True))


def _flash_kda(module: Any, problem: Problem) -> Bound:
    """flash_kda.fwd: bf16, K = V = 128, states as [N, H, V, K], outputs written into given tensors; gate, norm and
    sigmoid are always its own."""
    t, case, options = problem.tensors, problem.case, problem.options
    _serve(not isinstance(case, StepCase), "it has no decode step")
    _serve((case.dtype, case.k, case.v) == ("bf16", 128, 128), "it takes bf16 with K = V = 128 only")
    _serve(case.value_heads == case.heads, "it has no grouped value heads")
    _serve(options.gate == "bounded", f"its gate is bounded, not {options.gate}")
    _serve(options.qk_l2norm and options.beta_sigmoid, "it always takes norms of q and k and the sigmoid of beta")
    _serve(not options.allow_neg_eigval, "it has no negative eigenvalues")
    _serve(t["g"].dtype == t["beta"].dtype == torch.bfloat16, "it takes g and beta in bf16 only")
    initial = _initial_state(problem)
    cu_seqlens = t["cu_seqlens"].long() if "cu_seqlens" in t else None
    beta, bias = t["beta"].contiguous(), t.get("dt_bias")
    bias = torch.zeros_like(t["g"][0, 0], dtype=torch.float32) if bias is None else bias
    count = t["q"].shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    shape, dtype = (count, case.heads, case.v, case.k), torch.float32 if initial is None else initial.dtype

    def call() -> tuple[Tensor, Tensor | None]:
        o = torch.empty_like(t["v"])
        final = o.new_empty(shape, dtype=dtype) if options.output_final_state else None
        module.fwd(
            t["q"], t["k"], t["v"], t["g"], beta, options.scale, o, t["A_log"], bias, options.lower_bound,
            initial_state=initial, final_state=final, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return o, final

    return Bound(call, partial(_read, transposed=True))


def _cudnn(module: Any, problem: Problem) -> Bound:
    """cudnn.linear_attention.kimi_delta_attention: tokens packed [T, H, D], states as [N, H, V, K]. It would turn
    bf16 g and beta into fp32 at each call; that is done for it, off the clock."""
    t, case, options = problem.tensors, problem.case, problem.options
    _serve(not isinstance(case, StepCase), "it has no decode step")
    _serve(options.gate != "softplus", "it has no softplus gate")
    initial = _initial_state(problem)
    _serve(initial is None or initial.dtype != torch.float16, "its states are fp32 or bf16")
    arch = device.gpu(t["q"].device.index).arch if t["q"].is_cuda else 0
    B, T = t["q"].shape[:2]
    every = torch.arange(0, B * T + 1, max(T, 1), dtype=torch.int32, device=t["q"].device)
    bounded = options.gate == "bounded"
    q, k, v, g, beta = (t[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta"))
    call = partial(
        module.kimi_delta_attention, q, k, v, g.float(), beta.float(), t.get("cu_seqlens", every),
        scale=options.scale, initial_state=initial, output_final_state=options.output_final_state,
        use_qk_l2norm_in_kernel=options.qk_l2norm, use_beta_sigmoid_in_kernel=options.beta_sigmoid,
        allow_neg_eigval=options.allow_neg_eigval, safe_gate=bounded,
        gate_lower_bound=options.lower_bound if bounded else None, a_log=t.get("A_log"), dt_bias=t.get("dt_bias"),
        plan_name="kda_hopper_cuda" if arch == 90 else None,
    )  # fmt: skip

    def read(result: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        state = result[1] if options.output_final_state else None
        return _read((result[0].unflatten(0, (B, T)), state), transposed=True)

    return Bound(call, read)


def _serve(ok: bool, reason: str) -> None:
    if not ok:
        raise NotServed(reason)


# name in records -> (module, distribution, how to bind)
_PEERS: Mapping[str, tuple[str, str, Callable[[Any, Problem], Bound]]] = {
    "fla": ("fla.ops.kda", "fla-core", _fla),
    "flash_kda": ("flash_kda", "flash-kda", _flash_kda),
    "cudnn": ("cudnn.linear_attention", "nvidia-cudnn-frontend", _cudnn),
}
