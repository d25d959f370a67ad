"""Checks of a KDA call, before any launch. The result is a `Call` or `StepCall` that implementations trust."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda2 import device
from kda2.contract import Query
from kda2.errors import InvalidType, InvalidValue
from kda2.ops.kda.arguments import (
    check_device,
    check_shape,
    check_tensor,
    check_writable,
    dtype_name,
    flag,
    int64,
    real_number,
    shape_text,
    share_memory,
)
from kda2.ops.kda.gate import Gate

MAX_K, MAX_V = 256, 512
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_STATE_LAYOUTS = ("kv", "vk")

_debug = contextvars.ContextVar("kda2_debug", default=False)


@contextlib.contextmanager
def debug(enabled: bool = True) -> Iterator[None]:
    """Inside this context contents are read back and checked: cu_seqlens and state_indices on a GPU, and that `g` is a
    decay within its promised bound under `Gate.log`. Each check waits for the device: leave it off in production."""
    token = _debug.set(enabled)
    try:
        yield
    finally:
        _debug.reset(token)


@dataclass(frozen=True)
class Options:
    """What is applied inside the kernel, and the scale of the query."""

    gate: Gate
    scale: float
    qk_l2norm: bool
    beta_sigmoid: bool
    allow_neg_eigval: bool
    state_layout: str

    @property
    def beta_scale(self) -> float:
        return 2.0 if self.allow_neg_eigval else 1.0


@dataclass(frozen=True)
class Call:
    """A checked prefill call. Tensors are as given; `cu_seqlens` is on their device, or None for a dense batch."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    output_final_state: bool
    deterministic: bool
    options: Options

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def heads(self) -> int:
        return self.v.shape[2]

    @property
    def state_dtype(self) -> torch.dtype:
        """The final state's: the initial state's, else fp32 (fp64 for fp64 inputs)."""
        if self.initial_state is not None:
            return self.initial_state.dtype
        return torch.promote_types(torch.float32, self.q.dtype)

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return _state_shape(self.sequences, self.heads, self.q.shape[-1], self.v.shape[-1], self.options.state_layout)

    def query(self) -> Query:
        tensors = (self.q, self.k, self.v, self.g, self.beta, self.initial_state)
        return _query("kda", tensors, self.v, self.options, self.deterministic)


@dataclass(frozen=True)
class StepCall:
    """A checked decode call: one token a sequence. `state` is [B, ...] or, with `state_indices`, a pool."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    state_indices: Tensor | None
    pad_slot: int
    inplace: bool
    out: Tensor | None
    options: Options

    def query(self) -> Query:
        return _query("kda_step", (self.q, self.k, self.v, self.g, self.beta, self.state), self.v, self.options, False)


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    options: Options,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    deterministic: bool,
) -> Call:
    """Check a prefill call and bring `cu_seqlens` to the tensors' device."""
    output_final_state = flag("output_final_state", output_final_state)
    deterministic = flag("deterministic", deterministic)
    _check_tokens(q, k, v, g, beta, options, ("B", "T"))
    n = q.shape[0]
    if cu_seqlens is not None:
        cu_seqlens = _check_cu_seqlens(cu_seqlens, q)
        n = cu_seqlens.numel() - 1
    if initial_state is not None:
        K, V, HV = q.shape[-1], v.shape[-1], v.shape[2]
        _check_state("initial_state", initial_state, q, _state_shape(n, HV, K, V, options.state_layout))
    return Call(q, k, v, g, beta, initial_state, cu_seqlens, output_final_state, deterministic, options)


def check_step_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    options: Options,
    *,
    state_indices: Tensor | None,
    pad_slot: int,
    inplace: bool,
    out: Tensor | None,
) -> StepCall:
    """Check a decode call."""
    inplace, pad_slot = flag("inplace", inplace), int64("pad_slot", pad_slot)
    _check_tokens(q, k, v, g, beta, options, ("B",))
    B, K, HV, V = q.shape[0], q.shape[-1], v.shape[1], v.shape[-1]
    check_tensor("state", state)
    slots = B if state_indices is None or state.dim() != 4 else state.shape[0]
    _check_state("state", state, q, _state_shape(slots, HV, K, V, options.state_layout))
    if state_indices is not None:
        check_tensor("state_indices", state_indices)
        if state_indices.dtype not in (torch.int32, torch.int64):
            raise InvalidType("state_indices", "int32 or int64", dtype_name(state_indices.dtype))
        check_shape("state_indices", state_indices, (B,))
        check_device("state_indices", state_indices, q)
        if state_indices.device.type == "cpu" or _debug.get():
            _check_slots(state_indices, slots, pad_slot)
    if out is not None:
        check_tensor("out", out)
        check_shape("out", out, tuple(v.shape))
        check_device("out", out, q)
        if out.dtype != v.dtype:
            raise InvalidType("out", f"v's dtype {dtype_name(v.dtype)}", dtype_name(out.dtype))
        if out.requires_grad:
            raise InvalidValue("out", "without requires_grad", "requires_grad=True", "pass out.detach()")
        check_writable("out", out)
    if inplace:
        check_writable("state", state)
        if out is not None and not torch.compiler.is_compiling() and share_memory(out, state):
            raise InvalidValue("out", "apart from the state, which is written too", "memory of the state")
    return StepCall(q, k, v, g, beta, state, state_indices, pad_slot, inplace, out, options)


def refuse_writes_with_grad(call: StepCall) -> None:
    """Refuse to write into the caller's tensors what a gradient is to flow through: they would join the graph, which
    would then grow from call to call."""
    fix = "call under torch.no_grad(), or pass inplace=False and no out"
    if call.inplace:
        raise InvalidValue("inplace", "False where an input requires grad", "True", fix)
    if call.out is not None:
        raise InvalidValue("out", "None where an input requires grad", "a tensor", fix)


def check_options(
    q: Tensor,
    gate: Gate,
    scale: float | None,
    qk_l2norm: bool,
    beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_layout: str,
) -> Options:
    """Check what is not a tensor and fill in the default scale K^-0.5."""
    if not isinstance(gate, Gate):
        fix = "use kda2.Gate.log(), .softplus(...) or .bounded(...)"
        raise InvalidType("gate", "a kda2.Gate", type(gate).__name__, fix)
    qk_l2norm, beta_sigmoid = flag("qk_l2norm", qk_l2norm), flag("beta_sigmoid", beta_sigmoid)
    allow_neg_eigval = flag("allow_neg_eigval", allow_neg_eigval)
    if allow_neg_eigval and not beta_sigmoid:
        raise InvalidValue(
            "allow_neg_eigval", "False unless beta_sigmoid=True", "True", "pass beta_sigmoid=True, beta as logits"
        )
    if state_layout not in _STATE_LAYOUTS:
        raise InvalidValue("state_layout", "'kv' ([N,HV,K,V]) or 'vk' ([N,HV,V,K])", repr(state_layout))
    if scale is None:
        check_tensor("q", q)
        scale = q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0
    scale = real_number("scale", scale)
    if not abs(scale) <= torch.finfo(torch.float32).max:
        raise InvalidValue("scale", "finite in float32", repr(scale))
    return Options(gate, scale, qk_l2norm, beta_sigmoid, allow_neg_eigval, state_layout)


def _check_tokens(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, options: Options, lead: tuple[str, ...]
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        check_tensor(name, x)
    rank = len(lead) + 2
    if q.dim() != rank:
        raise InvalidValue("q", f"[{', '.join((*lead, 'H', 'K'))}]", str(tuple(q.shape)), _rank_fix(q.dim(), lead))
    *lead_sizes, H, K = q.shape
    if not 1 <= K <= MAX_K:
        raise InvalidValue("q", f"[..., K] with 1 <= K <= {MAX_K}", f"K = {K}")
    if H < 1:
        raise InvalidValue("q", "with at least one head", str(tuple(q.shape)))
    check_shape("k", k, tuple(q.shape))
    wanted_v: tuple[int | str, ...] = (*lead_sizes, "HV", "V")
    if v.dim() != rank or list(v.shape[: len(lead)]) != lead_sizes:
        raise InvalidValue("v", shape_text(wanted_v), str(tuple(v.shape)))
    HV, V = v.shape[-2:]
    if HV < H or HV % H:
        raise InvalidValue(
            "v",
            shape_text((*lead_sizes, H, "V")),
            str(tuple(v.shape)),
            f"the {HV} value heads must be a multiple of q's {H} heads",
        )
    if not 1 <= V <= MAX_V:
        raise InvalidValue("v", f"[..., V] with 1 <= V <= {MAX_V}", f"V = {V}")
    check_shape("g", g, (*lead_sizes, HV, K))
    check_shape("beta", beta, (*lead_sizes, HV))
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        check_device(name, x, q)
    if q.dtype not in _SHORT:
        raise InvalidType("q", "bfloat16, float16 or float32", dtype_name(q.dtype))
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise InvalidType(
                name, f"q's dtype {dtype_name(q.dtype)}", dtype_name(x.dtype), f"cast it: {name}.to(q.dtype)"
            )
    for name, x in (("g", g), ("beta", beta)):
        if x.dtype not in (q.dtype, torch.float32):
            raise InvalidType(name, f"q's dtype {dtype_name(q.dtype)} or float32", dtype_name(x.dtype))
    _check_gate(options.gate, q, HV, K)
    if _debug.get() and options.gate.kind == "log":
        _check_log_decay(g, options.gate.lower_bound)


def _check_log_decay(g: Tensor, lower_bound: float | None) -> None:
    """Read `g` back and hold it to what `Gate.log` takes: no growth, and no decay past a promised bound."""
    numbers = g[~g.isnan()]
    low, high = (float(x) for x in torch.aminmax(numbers)) if numbers.numel() else (0.0, 0.0)
    if high > 0.0:
        raise InvalidValue("g", "a log decay, at most 0, under Gate.log", f"a value of {high:.4g}", "is its sign lost?")
    if lower_bound is not None and low < torch.tensor(lower_bound, dtype=g.dtype).item():
        raise InvalidValue("g", f"at least the promised lower_bound {lower_bound}", f"a value of {low:.4g}")


def _check_gate(gate: Gate, q: Tensor, HV: int, K: int) -> None:
    for name, x, shape in (("A_log", gate.A_log, (HV,)), ("dt_bias", gate.dt_bias, (HV, K))):
        if x is None:
            continue
        check_tensor(name, x)
        allowed = (torch.float32, torch.float64) if q.dtype == torch.float64 else (torch.float32,)
        if x.dtype not in allowed:
            raise InvalidType(name, "float32", dtype_name(x.dtype), f"cast it: {name}.float()")
        check_shape(name, x, shape)
        check_device(name, x, q)


def _check_state(name: str, state: Tensor, q: Tensor, shape: tuple[int, ...]) -> None:
    check_tensor(name, state)
    if state.dtype not in _SHORT:
        raise InvalidType(name, "float32, bfloat16 or float16", dtype_name(state.dtype))
    if tuple(state.shape) != shape:
        fix = ""
        if tuple(state.shape) == (*shape[:2], shape[3], shape[2]):
            fix = "it looks transposed: pass the other state_layout"
        raise InvalidValue(name, shape_text(shape), str(tuple(state.shape)), fix)
    check_device(name, state, q)


def _check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> Tensor:
    check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InvalidType("cu_seqlens", "int32 or int64", dtype_name(cu_seqlens.dtype))
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise InvalidValue("cu_seqlens", "[N + 1]", str(tuple(cu_seqlens.shape)))
    B, T = q.shape[:2]
    if B != 1:
        raise InvalidValue("q", "[1, T, H, K] with cu_seqlens", str(tuple(q.shape)), "pack the batch into one row")
    if cu_seqlens.device not in (q.device, torch.device("cpu")):
        raise InvalidValue("cu_seqlens", f"on {q.device} or cpu", f"on {cu_seqlens.device}")
    if cu_seqlens.device.type == "cpu" or _debug.get():
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0:
            raise InvalidValue("cu_seqlens", "starting at 0", f"cu_seqlens[0] = {offsets[0]}")
        for i in range(1, len(offsets)):
            if offsets[i] < offsets[i - 1]:
                got = f"cu_seqlens[{i}] = {offsets[i]} after {offsets[i - 1]}"
                raise InvalidValue("cu_seqlens", "non-decreasing", got)
        if offsets[-1] > T:
            raise InvalidValue("cu_seqlens", f"at most T = {T}", f"cu_seqlens[{len(offsets) - 1}] = {offsets[-1]}")
    return cu_seqlens.to(q.device, non_blocking=True).contiguous()


def _check_slots(state_indices: Tensor, slots: int, pad_slot: int) -> None:
    rows: dict[int, int] = {}
    for i, slot in enumerate(state_indices.tolist()):
        if slot == pad_slot:
            continue
        if not 0 <= slot < slots:
            wanted = f"in [0, {slots}) or pad_slot = {pad_slot}"
            raise InvalidValue("state_indices", wanted, f"state_indices[{i}] = {slot}")
        if slot in rows:
            got = f"state_indices[{rows[slot]}] = state_indices[{i}] = {slot}"
            raise InvalidValue("state_indices", "distinct, one slot a row", got)
        rows[slot] = i


def _state_shape(n: int, HV: int, K: int, V: int, layout: str) -> tuple[int, int, int, int]:
    return (n, HV, K, V) if layout == "kv" else (n, HV, V, K)


def _rank_fix(rank: int, lead: tuple[str, ...]) -> str:
    if lead == ("B",) and rank == 4:
        return "kda_step takes one token a sequence: pass q[:, 0], or call kda2.kda"
    return "add the batch dimension: q.unsqueeze(0)" if rank == len(lead) + 1 else ""


def _is_differentiated(tensors: Sequence[Tensor]) -> bool:
    """Whether something follows the call through torch: a gradient, a tangent (forward mode), or torch.func."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return True
    return torch._C._functorch.maybe_current_level() is not None


def _query(op: str, tensors: tuple[Tensor | None, ...], v: Tensor, options: Options, deterministic: bool) -> Query:
    q = tensors[0]
    assert q is not None
    learned = (*tensors, options.gate.A_log, options.gate.dt_bias)
    return Query(
        op=op,
        device=q.device.type,
        # 0 on ROCm, whose device type is "cuda" too
        arch=device.gpu(q.device.index).arch if q.device.type == "cuda" and torch.version.cuda else 0,
        interpreted=device.interpreted(),
        dtype=_SHORT[q.dtype],
        K=q.shape[-1],
        V=v.shape[-1],
        needs_grad=_is_differentiated([x for x in learned if x is not None]),
        deterministic=deterministic,
    )
