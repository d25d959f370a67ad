"""Launches of the stages for a checked call, and the calls themselves."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda2.backends.triton import Launch
from kda2.contract import KernelConfig
from kda2.dispatch import lookup
from kda2.ops.kda.check import Call, Options, StepCall
from kda2.ops.kda.triton.output import kda_output
from kda2.ops.kda.triton.prepare import kda_prepare
from kda2.ops.kda.triton.state import kda_state
from kda2.ops.kda.triton.step import kda_step
from kda2.ops.kda.triton.tuning import (
    Configs,
    anchored_block,
    default_configs,
    padded,
    precision,
    tuning_key,
)


class Planned(NamedTuple):
    """The launches of a call, in order, and the tensors that they fill."""

    launches: list[Launch]
    o: Tensor
    final_state: Tensor | None


def kda(call: Call, configs: Configs | None = None) -> tuple[Tensor, Tensor | None]:
    """Run a prefill call; `configs` replaces the shipped configurations."""
    planned = plan(call, configs)
    for launch in planned.launches:
        launch.run()
    return planned.o, planned.final_state


def step(call: StepCall, config: KernelConfig | None = None) -> tuple[Tensor, Tensor]:
    """Run a decode call in one launch."""
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format) if call.out is None else call.out
    new = call.state if call.inplace else _copied(call)
    step_launch(call, o, new, config).run()
    return o, new


def key_of(call: Call) -> dict[str, Any]:
    """The tuning key of a prefill call."""
    tile_precision = precision(call.q.dtype, call.options.allow_neg_eigval)
    return tuning_key(call.q.shape[-1], call.v.shape[-1], tile_precision, anchored_block(call.options, tile_precision))


def launches(call: Call, configs: Configs | None = None) -> list[Launch]:
    """The launches of a prefill call; its tensors may be on the meta device, to compile them only."""
    return plan(call, configs).launches


def step_launches(call: StepCall, config: KernelConfig | None = None) -> list[Launch]:
    """The launch of a decode call; its tensors may be on the meta device, to compile it only."""
    o = torch.empty_like(call.v) if call.out is None else call.out
    return [step_launch(call, o, call.state, config)]


def plan(call: Call, configs: Configs | None = None) -> Planned:
    """Allocate outputs and workspace and lay out the three stages."""
    T, K = call.q.shape[1], call.q.shape[-1]
    HV, V, N = call.heads, call.v.shape[-1], call.sequences
    key = key_of(call)
    configs = default_configs(key) if configs is None else configs
    BT = configs["prepare"].tiles["BT"]
    is_packed = call.cu_seqlens is not None
    slots = T // BT + N if is_packed else N * (-(-T // BT))
    dtype = torch.bfloat16 if key["precision"] == "bf16" else torch.float32

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=call.q.device)

    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    final = empty(*call.state_shape, dtype=call.state_dtype) if call.output_final_state else None
    W, Qd, Kr = (empty(slots, HV, BT, K) for _ in range(3))
    # the state stage overwrites U with Vn
    U, S = empty(slots, HV, V, BT), empty(slots, HV, V, K)
    decay = empty(slots, HV, K, dtype=torch.float32)

    shared = {
        "p_cu": call.cu_seqlens, "T": T, "N": N, "HV": HV, "K": K, "V": V, "BT": BT,
        "IS_PACKED": is_packed, "PRECISION": key["precision"],
    }  # fmt: skip

    def tiles(stage: str, **bounds: int) -> dict[str, int]:
        return {name: min(configs[stage].tiles.get(name, bound), bound) for name, bound in bounds.items()}

    block = min(anchored_block(call.options, key["precision"]), BT)
    work = {"p_W": W, "p_U": U, "p_Kr": Kr, "p_decay": decay}
    prepare = {
        **shared, **work, **tiles("prepare", BK=padded(K), BV=padded(V)), "p_Qd": Qd, **_prepare_args(call, block)
    }  # fmt: skip
    state = {
        **shared, **work, **tiles("state", BK=padded(K), BV=padded(V)), "p_S": S,
        "p_first": call.initial_state, "HAS_FIRST": call.initial_state is not None,
        "p_last": final, "STORE_LAST": final is not None,
        **_state_strides("first", call.initial_state, call.options), **_state_strides("last", final, call.options),
    }  # fmt: skip
    output = {
        **shared, **tiles("output", BK=padded(K), BS=padded(K), BV=padded(V)), **_score_args(call, block),
        "p_Qd": Qd, "p_Vn": U, "p_S": S, "p_o": o, **_strides("o", o, "bthd"),
        "ALIGN": _alignment(call.q, call.k, call.g, o),
    }  # fmt: skip
    # one slot more than chunks: the tokens behind the last sequence, whose o is written too
    output_slots = slots + 1 if is_packed else slots
    return Planned(
        [
            Launch("prepare", kda_prepare, slots * HV, prepare, configs["prepare"]),
            Launch("state", kda_state, N * HV * -(-V // int(state["BV"])), state, configs["state"]),
            Launch("output", kda_output, output_slots * HV * -(-V // int(output["BV"])), output, configs["output"]),
        ],
        o,
        final,
    )


def _prepare_args(call: Call, block: int) -> dict[str, Any]:
    return {
        **_score_args(call, block), **_beta_args(call.options), "p_v": call.v, "p_beta": call.beta,
        **_strides("v", call.v, "bthd"), **_strides("beta", call.beta, "bth"),
        "ALIGN": _alignment(call.q, call.k, call.v, call.g),
    }  # fmt: skip


def _score_args(call: Call, block: int) -> dict[str, Any]:
    """What both stages that form scores take."""
    return {
        "p_q": call.q, "p_k": call.k, "p_g": call.g, **_gate_args(call.options), "scale": call.options.scale,
        **_strides("q", call.q, "bthd"), **_strides("k", call.k, "bthd"), **_strides("g", call.g, "bthd"),
        "USE_L2NORM": call.options.qk_l2norm, "H": call.q.shape[2], "BC": block,
    }  # fmt: skip


def step_launch(call: StepCall, o: Tensor, new: Tensor, config: KernelConfig | None = None) -> Launch:
    """The one launch of a decode call that writes `o` and the states `new` (which may be `call.state`)."""
    B, H, K = call.q.shape
    HV, V = call.v.shape[1:]
    key = {"K": padded(K), "V": padded(V), "state_layout": call.options.state_layout}
    config = lookup("kda", "triton", "step", key) if config is None else config
    BV = min(config.tiles["BV"], padded(V))
    index = call.state_indices
    args = {
        "p_q": call.q, "p_k": call.k, "p_v": call.v, "p_g": call.g, "p_beta": call.beta,
        "p_index": index, "p_state": call.state, "p_new": new, "p_o": o,
        "slots": call.state.shape[0], "pad_slot": call.pad_slot, "s_index": 0 if index is None else index.stride(0),
        **_strides("q", call.q, "bhd"), **_strides("k", call.k, "bhd"), **_strides("v", call.v, "bhd"),
        **_strides("g", call.g, "bhd"), **_strides("beta", call.beta, "bh"), **_strides("o", o, "bhd"),
        **_state_strides("state", call.state, call.options), **_state_strides("new", new, call.options),
        **_gate_args(call.options), **_beta_args(call.options), "scale": call.options.scale,
        "USE_L2NORM": call.options.qk_l2norm,
        "H": H, "HV": HV, "K": K, "V": V, "BK": padded(K), "BV": BV, "HAS_INDEX": index is not None,
    }  # fmt: skip
    return Launch("step", kda_step, B * HV * -(-V // BV), args, config)


def _copied(call: StepCall) -> Tensor:
    """A copy for the new states; without indices every row is rewritten, so nothing needs copying."""
    return call.state.clone() if call.state_indices is not None else torch.empty_like(call.state)


def _alignment(*tensors: Tensor) -> int:
    """The power of two, at most 16, that divides every batch and head stride."""
    return math.gcd(16, *(s for x in tensors for axis in (0, 2) if x.shape[axis] > 1 for s in (x.stride(axis),)))


@functools.cache
def _stride_names(name: str, axes: str) -> tuple[str, ...]:
    return tuple(f"s_{name}_{axis}" for axis in axes)


def _strides(name: str, x: Tensor, axes: str) -> dict[str, int]:
    return dict(zip(_stride_names(name, axes), x.stride(), strict=True))


def _state_strides(name: str, state: Tensor | None, options: Options) -> dict[str, int]:
    axes = "nhkv" if options.state_layout == "kv" else "nhvk"
    return dict.fromkeys(_stride_names(name, axes), 0) if state is None else _strides(name, state, axes)


def _gate_args(options: Options) -> dict[str, Any]:
    gate = options.gate
    A_stride = 0 if gate.A_log is None else gate.A_log.stride(0)
    dt_h, dt_d = (0, 0) if gate.dt_bias is None else gate.dt_bias.stride()
    return {
        "p_A_log": gate.A_log, "p_dt_bias": gate.dt_bias, "s_A": A_stride, "s_dt_h": dt_h, "s_dt_d": dt_d,
        "lower_bound": gate.lower_bound or 0.0, "GATE": gate.kind, "HAS_BIAS": gate.dt_bias is not None,
    }  # fmt: skip


def _beta_args(options: Options) -> dict[str, Any]:
    return {"beta_scale": options.beta_scale, "USE_SIGMOID": options.beta_sigmoid}
