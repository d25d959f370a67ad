"""The contracts of `kda` and `kda_step`: tensors, options, cost, probe families, tolerances and workloads.

A *case* is a workload's axes and options in one mapping, as benchmark records hold it: `seqlens` (or `batch` for the
step), `heads` (value heads), `qk_heads` (q and k heads, `heads` unless given), `k`, `v`, `dtype`, `g_dtype`
(`dtype` unless given) and `state`: `fp32-in-out`, `bf16-in`, `fp32-out` or `none` (the step: `state_dtype`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kda2.contract import OpSpec, TensorSpec, Workload
from kda2.contract.calibration import load, tolerances

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
SOURCE = "Kimi Linear, arXiv 2510.26692"

_INPUT = ("bf16", "fp16", "fp32")
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "gate": ("log", "softplus", "bounded"),
    "qk_l2norm": (False, True),
    "beta_sigmoid": (False, True),
    "allow_neg_eigval": (False, True),
    "state_layout": ("kv", "vk"),
}


def flops(case: Mapping[str, Any]) -> int:
    """Operations of the recurrence: per token and value head the decay (K V), the prediction, the update and the
    read-out (2 K V each). Chunked forms do more; this is the least."""
    heads, K, V = _heads_K_V(case)
    return 7 * _tokens(case) * heads * K * V


def bytes_moved(case: Mapping[str, Any]) -> int:
    """Bytes of every input and output once, states included."""
    heads, K, V = _heads_K_V(case)
    item, g_item = ITEM_BYTES[case["dtype"]], ITEM_BYTES[case.get("g_dtype", case["dtype"])]
    q_and_k = 2 * int(case.get("qk_heads", heads)) * K * item
    v_and_o = 2 * heads * V * item
    g_and_beta = heads * K * g_item + heads * item
    learned = 4 * heads * (K + 1)
    return _tokens(case) * (q_and_k + v_and_o + g_and_beta) + learned + _state_bytes(case) * heads * K * V


def _heads_K_V(case: Mapping[str, Any]) -> tuple[int, int, int]:
    return int(case["heads"]), int(case["k"]), int(case["v"])


def _tokens(case: Mapping[str, Any]) -> int:
    return int(case["batch"]) if "batch" in case else sum(case["seqlens"])


def _state_bytes(case: Mapping[str, Any]) -> int:
    """Bytes that move per element of one state, times the number of states."""
    if "batch" in case:
        return 2 * int(case["batch"]) * ITEM_BYTES[case["state_dtype"]]
    dtype, *ways = case.get("state", "none").split("-")
    return len(ways) * len(case["seqlens"]) * ITEM_BYTES[dtype] if ways else 0


CALIBRATIONS = Path(__file__).parent / "tolerances.json"  # written by `kda2 spec calibrate kda --write`
TOLERANCES = tolerances(load(CALIBRATIONS.read_text()))

FAMILIES = (
    "random", "saturated_gate", "no_decay", "weak_gate", "random_depth_gate", "deep_gate", "reset_log",
    "reset_softplus", "open_gate", "repeated_keys", "near_collinear_keys", "repeated_keys_neg_eigval",
    "unnormalised_keys", "tiny_rows", "one_token", "chunk_edges", "ragged", "all_empty", "nan_neighbour", "options",
    "bare", "packed_bare", "large_state", "grouped", "many_sequences", "long", "plain_packed", "no_tokens",
    "large_values", "learned_gate",
)  # fmt: skip
# Those whose first token is a probe of its own.
STEP_FAMILIES = (
    "random", "saturated_gate", "no_decay", "weak_gate", "random_depth_gate", "deep_gate", "reset_log",
    "reset_softplus", "open_gate", "unnormalised_keys", "tiny_rows", "large_state", "large_values", "learned_gate",
)  # fmt: skip


def _learned() -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("A_log", ("HV",), ("fp32",), optional=True, meaning="log of the gate's rate"),
        TensorSpec("dt_bias", ("HV", "K"), ("fp32",), optional=True, meaning="bias of the gate's activation"),
    )


def _tokens_specs(*lead: str) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("q", (*lead, "H", "K"), _INPUT, meaning="queries"),
        TensorSpec("k", (*lead, "H", "K"), _INPUT, meaning="keys"),
        TensorSpec("v", (*lead, "HV", "V"), _INPUT, meaning="values; HV is a multiple of H"),
        TensorSpec("g", (*lead, "HV", "K"), _INPUT, meaning="gate activations, or the log decay"),
        TensorSpec("beta", (*lead, "HV"), _INPUT, meaning="step size of the delta rule, or its logit"),
    )


_LENGTHS: tuple[tuple[int, ...], ...] = (
    (1024,), (2048,), (4096,), (8192,), (1300, 547, 2048, 963, 271, 3063), (1024,) * 8,
)  # fmt: skip


def _prefill(heads: int, seqlens: tuple[int, ...], regime: str) -> Workload:
    axes = {"seqlens": seqlens, "heads": heads, "k": 128, "v": 128}
    options = {"dtype": "bf16", "state": "fp32-in-out", "gate": regime}
    return Workload(f"h{heads}-{'-'.join(map(str, seqlens))}-{regime}", axes, options)


def _decode(batch: int, state_dtype: str) -> Workload:
    axes = {"batch": batch, "heads": 32, "k": 128, "v": 128}
    return Workload(f"b{batch}-{state_dtype}", axes, {"dtype": "bf16", "state_dtype": state_dtype})


KDA = OpSpec(
    name="kda",
    version=1,
    source=SOURCE,
    inputs=(
        *_tokens_specs("B", "T"),
        *_learned(),
        TensorSpec("initial_state", ("N", "HV", "K", "V"), _INPUT, optional=True, meaning="zeros if absent"),
        TensorSpec("cu_seqlens", ("N + 1",), ("int32", "int64"), optional=True, meaning="offsets of packed sequences"),
    ),
    outputs=(
        TensorSpec("o", ("B", "T", "HV", "V"), _INPUT, meaning="v's dtype"),
        TensorSpec("final_state", ("N", "HV", "K", "V"), _INPUT, meaning="initial_state's dtype, fp32 without one"),
    ),
    options=_OPTIONS,
    oracle="kda2.ops.kda.reference.kda",
    flops="kda2.ops.kda.spec.flops",
    bytes="kda2.ops.kda.spec.bytes_moved",
    families=FAMILIES,
    tolerances=TOLERANCES,
    workloads=tuple(_prefill(h, s, r) for h in (64, 96) for s in _LENGTHS for r in ("strong", "weak")),
)

KDA_STEP = OpSpec(
    name="kda_step",
    version=1,
    source=SOURCE,
    inputs=(
        *_tokens_specs("B"),
        *_learned(),
        TensorSpec("state", ("slots", "HV", "K", "V"), _INPUT, meaning="one per row, or a pool; updated in place"),
        TensorSpec("state_indices", ("B",), ("int32", "int64"), optional=True, meaning="the slot of each row"),
    ),
    outputs=(
        TensorSpec("o", ("B", "HV", "V"), _INPUT, meaning="v's dtype"),
        TensorSpec("state", ("slots", "HV", "K", "V"), _INPUT, meaning="the updated states"),
    ),
    options=_OPTIONS,
    oracle="kda2.ops.kda.reference.step",
    flops="kda2.ops.kda.spec.flops",
    bytes="kda2.ops.kda.spec.bytes_moved",
    families=STEP_FAMILIES,
    # not calibrated apart: a step is held to what any call is
    tolerances=tuple(t for t in TOLERANCES if not t.family),
    workloads=tuple(_decode(b, s) for b in (1, 16, 64, 256) for s in ("fp32", "bf16")),
)

SPECS = {spec.name: spec for spec in (KDA, KDA_STEP)}
