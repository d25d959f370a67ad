"""The stages of chunked KDA one by one: what each computes, an oracle for each, and the tensors that pass between them.

A stage kernel is a function `run(**inputs) -> dict of tensors`, named and shaped as `STAGES[stage]` says. All chunks of
all sequences lie one after another on the first axis: NT chunks of C tokens; `cu_chunks` [N + 1] says which chunks each
sequence owns. A last partial chunk is padded with q, k, v, beta = 0 and g = 0.

`prepare` is `factors` and then `solve`; a kernel may be either the whole or one of the two. `verify_stage` in this
package judges a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kda2.contract import TensorSpec
from kda2.errors import InvalidValue
from kda2.ops.kda import Gate
from kda2.ops.kda.check import Call
from kda2.ops.kda.torch import stages as torch_stages
from kda2.ops.kda.torch.stages import decayed_scores, rounded, suffix_sum
from kda2.ops.kda.transforms import first_state, last_state, sequence_bounds, transform
from kda2.testing.oracle import Outputs, checked, upcast

Tensors = dict[str, Tensor]
Run = Callable[..., Tensors]

CHUNKS = (16, 32, 64, 128)
_ANY, _WORK, _FP32 = ("bf16", "fp16", "fp32"), ("bf16", "fp32"), ("fp32",)


# --- what each stage computes, in the dtype of its inputs; `operand` rounds as a kernel's matrix operands are ---


def factors(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, operand: torch.dtype | None = None) -> Tensors:
    """The decayed queries and keys of each chunk, and the lower triangle A of what its keys share."""
    decay_to, decay_from = g.cumsum(-2).exp(), suffix_sum(g).exp()
    A = (beta[..., None] * decayed_scores(k, k, g, operand)).tril(-1)
    Qd, Kd, Kr = (rounded(x, operand) for x in (q * decay_to, k * decay_to, k * decay_from))
    return {"Qd": Qd, "Kd": Kd, "Kr": Kr, "decay": decay_to[..., -1, :], "A": A}


def solve(A: Tensor, beta: Tensor, Kd: Tensor, v: Tensor, operand: torch.dtype | None = None) -> Tensors:
    """W and U: the keys and values of each chunk with what its own earlier tokens predict taken out."""
    Tm = torch.linalg.solve_triangular(A, torch.diag_embed(beta), upper=False, unitriangular=True)
    if not _flips_signs(beta):
        Tm = rounded(Tm, operand)
    return {"W": rounded(Tm @ rounded(Kd, operand), operand), "U": rounded(Tm @ rounded(v, operand), operand)}


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, operand: torch.dtype | None = None) -> Tensors:
    """`factors` and `solve` in one."""
    return torch_stages.prepare(q, k, v, g, beta, operand, keep_Tm=_flips_signs(beta))._asdict()


def state(
    W: Tensor,
    U: Tensor,
    Kr: Tensor,
    decay: Tensor,
    initial_state: Tensor,
    cu_chunks: Tensor,
    operand: torch.dtype | None = None,
) -> Tensors:
    """The recurrence over the chunks of each sequence."""
    before, changed = W.new_zeros(*decay.shape, U.shape[-1]), torch.zeros_like(U)
    final = initial_state.clone()
    for n, (first, last) in enumerate(pairwise(cu_chunks.tolist())):
        for i in range(first, last):
            before[i] = final[n]
            chunk = torch_stages.Factors(W[i], U[i], W[i], Kr[i], decay[i])  # Qd plays no part here
            changed[i], final[n] = torch_stages.state(before[i], chunk, operand)
    return {"Vn": changed, "S": before, "final_state": final}


def output(
    Qd: Tensor, q: Tensor, k: Tensor, g: Tensor, Vn: Tensor, S: Tensor, operand: torch.dtype | None = None
) -> Tensors:
    """What the queries of each chunk read."""
    return {"o": torch_stages.output(S, Vn, Qd, q, k, g, operand)}


def _flips_signs(beta: Tensor) -> bool:
    """Whether beta passes 1: then an error in Tm is not forgotten but grows, and no kernel may round it to 16 bits."""
    return bool((beta > 1).any())


@dataclass(frozen=True)
class Stage:
    """One stage: its formulas, its tensors, and `reference(**inputs, operand=None)`, which computes it."""

    name: str
    computes: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    reference: Callable[..., Tensors]


def _spec(name: str, axes: str, dtypes: tuple[str, ...], meaning: str) -> TensorSpec:
    return TensorSpec(name, tuple(axes.split()), dtypes, meaning=meaning)


_SPECS = {
    spec.name: spec
    for spec in (
        _spec("q", "NT HV C K", _ANY, "queries, normalised and scaled"),
        _spec("k", "NT HV C K", _ANY, "keys, normalised"),
        _spec("v", "NT HV C V", _ANY, "values"),
        _spec("g", "NT HV C K", _FP32, "log decay, at most 0; a reset is -1e30"),
        _spec("beta", "NT HV C", _ANY, "step size of the delta rule"),
        _spec("Qd", "NT HV C K", _WORK, "queries decayed from the chunk's start"),
        _spec("Kd", "NT HV C K", _WORK, "keys decayed from the chunk's start"),
        _spec("Kr", "NT HV C K", _WORK, "keys decayed to the chunk's end"),
        _spec("decay", "NT HV K", _FP32, "decay of the whole chunk, in [0, 1]"),
        _spec("A", "NT HV C C", _FP32, "strictly lower, beta included"),
        _spec("W", "NT HV C K", _WORK, "what the state is asked"),
        _spec("U", "NT HV C V", _WORK, "the answers wanted"),
        _spec("Vn", "NT HV C V", _WORK, "what the state is told"),
        _spec("S", "NT HV K V", _WORK, "the state before each chunk, as the products read it"),
        _spec("initial_state", "N HV K V", _FP32, "zeros if the call has none"),
        _spec("final_state", "N HV K V", _FP32, "the state after the last chunk"),
        _spec("o", "NT HV C V", _ANY, "outputs, v's dtype"),
        TensorSpec("cu_chunks", ("N + 1",), ("int64",), meaning="the chunks that each sequence owns"),
    )
}


def _stage(name: str, inputs: str, outputs: str, reference: Callable[..., Tensors], *computes: str) -> Stage:
    ins, outs = (tuple(_SPECS[tensor] for tensor in names.split()) for names in (inputs, outputs))
    return Stage(name, computes, ins, outs, reference)


_FACTORS = (
    "G = cumsum(g)",
    "Qd = q exp(G)",
    "Kd = k exp(G)",
    "Kr = k exp(G_C - G)",
    "decay = exp(G_C)",
    "A = strict_tril(diag(beta) Kd Ki^T), Ki = k exp(-G) never formed",
)
_SOLVE = ("Tm = (I + A)^-1 diag(beta)", "W = Tm Kd", "U = Tm v")

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        _stage("prepare", "q k v g beta", "W U Qd Kr decay", prepare, *_FACTORS, *_SOLVE),
        _stage("factors", "q k g beta", "Qd Kd Kr decay A", factors, *_FACTORS),
        _stage("solve", "A beta Kd v", "W U", solve, *_SOLVE),
        _stage("state", "W U Kr decay initial_state cu_chunks", "Vn S final_state", state,
               "Vn = U - W S", "S <- diag(decay) S + Kr^T Vn"),
        _stage("output", "Qd q k g Vn S", "o", output, "o = Qd S + tril(Qd Ki^T) Vn"),
    )
}  # fmt: skip


# --- the tensors of a call, as the stages meet them ---


def operands(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call of `kda2.kda` that has the formula's own operands for inputs: options applied, scale in q, a q and k
    head for each value head, g the log decay in fp32, the initial state fp32 [N, HV, K, V].

    q, k and v are stored in the call's dtype and beta in its own, so that stages and oracle start from the same values.
    """
    call = checked(upcast(kwargs))
    x = transform(call.q, call.k, call.v, call.g, call.beta, call.options)
    dtype = kwargs["v"].dtype
    initial = None if call.initial_state is None else first_state(call, torch.float64).float()
    return {
        "q": x.q.to(dtype), "k": x.k.to(dtype), "v": x.v.to(dtype), "g": x.g.float(),
        "beta": x.beta.to(kwargs["beta"].dtype), "gate": Gate.log(), "scale": 1.0, "initial_state": initial,
        "output_final_state": call.output_final_state, "cu_seqlens": kwargs.get("cu_seqlens"),
    }  # fmt: skip


def stage_inputs(stage: str, kwargs: Mapping[str, Any], C: int = 64) -> Tensors:
    """The inputs of `stage` for the call `kda2.kda(**kwargs)`: computed in fp64 by the stages before it, then stored in
    the dtypes that a kernel meets.

    Raises `InvalidValue` for an unknown stage, or a C that is not 16, 32, 64 or 128.
    """
    chosen, plain = find_stage(stage), operands(kwargs)
    tensors = upcast(_chunked(plain, C))
    for name in _path(stage):
        if name == stage:
            break
        tensors |= _called(STAGES[name], tensors)
    dtypes = dtypes_of(plain)
    return {spec.name: tensors[spec.name].to(dtypes[spec.name]) for spec in chosen.inputs}


def replaced(stage: str, run: Run, kwargs: Mapping[str, Any], C: int = 64) -> Outputs:
    """(o, final state) of `kda2.kda(**kwargs)` with `run` for `stage` and the torch stages, rounding as kernels do,
    for the others; what passes between stages is stored in the dtypes that `stage_inputs` gives."""
    find_stage(stage)
    plain = operands(kwargs)
    tensors, dtypes = _chunked(plain, C), dtypes_of(plain)
    for name in _path(stage):
        step = run if name == stage else rounding(name, plain["v"].dtype)
        inputs = {spec.name: tensors[spec.name] for spec in STAGES[name].inputs}
        outputs = step(**inputs)
        tensors |= {spec.name: outputs[spec.name].to(dtypes[spec.name]) for spec in STAGES[name].outputs}
    return _unchunked(tensors["o"], plain, C), last_state(checked(kwargs), tensors["final_state"])


def rounding(stage: str, dtype: torch.dtype) -> Run:
    """The torch stage as an honest kernel for inputs of `dtype`: fp32 arithmetic, matrix operands of bf16 (fp32 for
    fp32 inputs), outputs in the dtypes they are stored in."""
    chosen, stored = find_stage(stage), stored_dtypes(dtype)
    operand = None if dtype == torch.float32 else torch.bfloat16

    def run(**inputs: Tensor) -> Tensors:
        wide = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
        found = chosen.reference(**wide, operand=operand)
        return {spec.name: found[spec.name].to(stored[spec.name]) for spec in chosen.outputs}

    return run


def _called(stage: Stage, tensors: Tensors) -> Tensors:
    return stage.reference(**{spec.name: tensors[spec.name] for spec in stage.inputs})


def find_stage(stage: str) -> Stage:
    if stage not in STAGES:
        raise InvalidValue("stage", f"one of {', '.join(STAGES)}", repr(stage))
    return STAGES[stage]


def _path(stage: str) -> tuple[str, ...]:
    """The stages of a whole call that has `stage` among them, in order."""
    first = ("prepare",) if stage == "prepare" else ("factors", "solve")
    return (*first, "state", "output")


def stored_dtypes(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each tensor in a call whose q, k and v have `dtype`; beta's is the call's."""
    work = torch.float32 if dtype == torch.float32 else torch.bfloat16
    by_kind = {_ANY: dtype, _WORK: work, _FP32: torch.float32, ("int64",): torch.int64}
    return {spec.name: by_kind[spec.dtypes] for spec in _SPECS.values()}


def dtypes_of(plain: Mapping[str, Any]) -> dict[str, torch.dtype]:
    return {**stored_dtypes(plain["v"].dtype), "beta": plain["beta"].dtype}


def chunk_rows(call: Call, C: int) -> tuple[Tensor, Tensor]:
    """The token of every row of every chunk [NT, C], -1 past a sequence's end; and cu_chunks [N + 1]."""
    if C not in CHUNKS:
        raise InvalidValue("C", f"one of {', '.join(map(str, CHUNKS))}", repr(C))
    rows, counts = [torch.empty(0, C, dtype=torch.int64)], [0]
    for start, end in sequence_bounds(call):
        counts.append(-(-(end - start) // C))
        tokens = start + torch.arange(counts[-1] * C).view(-1, C)
        rows.append(torch.where(tokens < end, tokens, -1))
    device = call.q.device
    return torch.cat(rows).to(device), torch.tensor(counts).cumsum(0).to(device)


def _chunked(plain: Mapping[str, Any], C: int) -> Tensors:
    """q, k, v, g, beta as chunks [NT, HV, C, ...], the initial state and cu_chunks."""
    call = checked(plain)
    rows, cu_chunks = chunk_rows(call, C)
    tensors = {"cu_chunks": cu_chunks, "initial_state": first_state(call, torch.float32)}
    for name in ("q", "k", "v", "g", "beta"):
        x = plain[name].flatten(0, 1)
        # an index that is valid whatever T is: an empty batch has no token to stand in for padding
        chunks = torch.cat([x, x.new_zeros(1, *x.shape[1:])])[rows].transpose(1, 2)
        outside = (rows < 0)[:, None, :]
        tensors[name] = chunks.masked_fill(outside if x.dim() == 2 else outside[..., None], 0.0)
    return tensors


def _unchunked(o: Tensor, plain: Mapping[str, Any], C: int) -> Tensor:
    """o [B, T, HV, V] of chunks [NT, HV, C, V]; 0 where no sequence owns the token."""
    rows, _ = chunk_rows(checked(plain), C)
    flat = torch.zeros_like(plain["v"], memory_format=torch.contiguous_format).flatten(0, 1)
    valid = rows >= 0
    flat[rows[valid]] = o.transpose(1, 2)[valid]
    return flat.view(plain["v"].shape)
