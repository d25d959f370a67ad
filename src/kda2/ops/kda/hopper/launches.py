"""The launch of stage `fused` for a checked call, and the call itself."""

from __future__ import annotations

from typing import Any

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kda2 import device
from kda2.backends.triton import Launch
from kda2.ops.kda.check import Call
from kda2.ops.kda.hopper.fused import kda_fused
from kda2.ops.kda.hopper.slots import C
from kda2.ops.kda.hopper.tuning import Configs, default_configs, tuning_key

REGISTERS = 65536  # of a multiprocessor, which one CTA has to itself
# of ptxas: nothing that takes more registers. With its default, builds whose CTAs have 128 of V spill one or two
FEW_REGISTERS = "--register-usage-level=0"
RANKED = 64  # packed sequences that a CTA sorts by length; more go in order
_SMS_OF_H200 = 132  # assumed where the tensors are on no device


def kda(call: Call, configs: Configs | None = None) -> tuple[Tensor, Tensor | None]:
    """Run a prefill call; `configs` replaces the shipped configuration."""
    o, final = _outputs(call)
    if call.sequences == 0 or call.v.numel() == 0 or call.q.numel() == 0:
        return o.zero_(), _unchanged(call, final)
    _launch(call, o, final, configs).run()
    return o, final


def key_of(call: Call) -> dict[str, Any]:
    """The tuning key of a prefill call."""
    on_device = call.q.device.type == "cuda"
    sms = device.gpu(call.q.device.index or 0).sm_count if on_device else _SMS_OF_H200
    sequences = call.sequences * call.heads
    return tuning_key(
        call.q.shape[-1], call.v.shape[-1], _terms(call), call.g.element_size() * 8, halves_fit=2 * sequences <= sms
    )


def launches(call: Call, configs: Configs | None = None) -> list[Launch]:
    """The launch of a prefill call; its tensors may be on the meta device, to compile it only."""
    return [_launch(call, *_outputs(call), configs)]


def _outputs(call: Call) -> tuple[Tensor, Tensor | None]:
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    if not call.output_final_state:
        return o, None
    return o, torch.empty(call.state_shape, dtype=call.state_dtype, device=call.q.device)


def _unchanged(call: Call, final: Tensor | None) -> Tensor | None:
    """The final state of sequences without tokens."""
    if final is None:
        return None
    return final.zero_() if call.initial_state is None else final.copy_(call.initial_state)


def _terms(call: Call) -> int:
    """bf16 terms of what the inverse and the delta rule's corrections are kept in. With negative eigenvalues one term
    diverges for repeated keys."""
    return 2 if call.options.allow_neg_eigval else 1


def _launch(call: Call, o: Tensor, final: Tensor | None, configs: Configs | None) -> Launch:
    config = (default_configs(key_of(call)) if configs is None else configs)["fused"]
    tiles = config.tiles
    options, gate = call.options, call.options.gate
    K, V, BV = call.q.shape[-1], call.v.shape[-1], tiles["BV"]
    N, HV = call.sequences, call.heads
    is_packed = call.cu_seqlens is not None
    none = call.beta  # in place of a tensor that the kernel does not touch
    warps = config.num_warps + 4 * (1 + tiles["FACTORS"])
    args = {
        "q_desc": _descriptor(call.q, K), "k_desc": _descriptor(call.k, K), "v_desc": _descriptor(call.v, BV),
        "g_desc": _descriptor(call.g, K), "o_desc": _descriptor(o, BV),
        "p_beta": call.beta, "p_cu": call.cu_seqlens if is_packed else none,
        "p_A_log": none if gate.A_log is None else gate.A_log,
        "p_dt_bias": none if gate.dt_bias is None else gate.dt_bias,
        "p_first": o if call.initial_state is None else call.initial_state, "p_last": o if final is None else final,
        "p_o": o, "scale": options.scale, "lower_bound": gate.lower_bound or 0.0, "beta_scale": options.beta_scale,
        "T": call.q.shape[1], "N": N,
        "s_beta_b": call.beta.stride(0), "s_beta_t": call.beta.stride(1), "s_beta_h": call.beta.stride(2),
        "s_A": 0 if gate.A_log is None else gate.A_log.stride(0),
        "s_dt_h": 0 if gate.dt_bias is None else gate.dt_bias.stride(0),
        "s_dt_d": 0 if gate.dt_bias is None else gate.dt_bias.stride(1),
        "s_o_b": o.stride(0), "s_o_t": o.stride(1), "s_o_h": o.stride(2),
        **_state_strides("first", call.initial_state, options.state_layout),
        **_state_strides("last", final, options.state_layout),
        "H": call.q.shape[2], "HV": HV, "K": K, "VS": V // BV, "V": BV,
        "SLOTS": tiles["SLOTS"], "FACTORS": tiles["FACTORS"], "TERMS": _terms(call),
        "GATE": gate.kind, "HAS_BIAS": gate.dt_bias is not None, "USE_L2NORM": options.qk_l2norm,
        "USE_SIGMOID": options.beta_sigmoid, "HAS_FIRST": call.initial_state is not None,
        "KEYS_FIRST": options.state_layout == "kv",
        "STORE_LAST": final is not None, "IS_PACKED": is_packed, "RANKED": RANKED if is_packed and N <= RANKED else 0,
        "FACTOR_REGS": tiles["FACTOR_REGS"], "SCORE_REGS": tiles["SCORE_REGS"],
    }  # fmt: skip
    # what a thread gets at launch, before roles take and give registers: an equal part, in steps of 8
    maxnreg = REGISTERS // (32 * warps) // 8 * 8
    return Launch("fused", kda_fused, N * HV * (V // BV), args, config, maxnreg, FEW_REGISTERS if BV == 128 else None)


def _descriptor(x: Tensor, width: int) -> TensorDescriptor:
    """x [B, T, heads, channels] for the copy engine, in boxes of one chunk and `width` channels. It takes strides of
    multiples of 16 bytes; what has others is copied first, and so is what is expanded."""
    odd = [s == 0 or s * x.element_size() % 16 for s, n in zip(x.stride()[:3], x.shape[:3], strict=True) if n > 1]
    if any(odd) or x.stride(3) != 1 or (x.device.type != "meta" and x.data_ptr() % 16):
        x = x.contiguous()
    B, T, heads, D = x.shape
    # the stride of an axis of one is never taken, but checked
    b, t, h = (s if n > 1 else D for s, n in zip(x.stride()[:3], x.shape[:3], strict=True))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=x.element_size() * 8, rank=4)
    return TensorDescriptor(x, [B, heads, T, D], [b, h, t, 1], [1, 1, C.value, width], layout)


def _state_strides(name: str, x: Tensor | None, state_layout: str) -> dict[str, int]:
    axes = "nhkv" if state_layout == "kv" else "nhvk"
    strides = (0, 0, 0, 0) if x is None else x.stride()
    return {f"s_{name}_{axis}": stride for axis, stride in zip(axes, strides, strict=True)}
