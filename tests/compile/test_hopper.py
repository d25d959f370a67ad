"""The KDA kernel for Hopper, compiled for sm_90 on a machine that need not have one."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import pytest
import torch

from kda2.backends.triton import Launch
from kda2.backends.triton.binary import disassemble
from kda2.backends.triton.build import BuildError, build, code_key
from kda2.device import SHARED_MEMORY_LIMIT
from kda2.ops.kda import Gate
from kda2.ops.kda.check import Call, check_call, check_options
from kda2.ops.kda.hopper import default_configs, key_of, launches
from kda2.workbench.capture import Capture
from kda2.workbench.inspector import Inspection, inspect
from kda2.workbench.inspector.inspection import instructions
from kda2.workbench.verifier.code import Builder
from kda2.workbench.verifier.subject import Subject

H, HV = 2, 4
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Shape:
    """What changes the code of a call's kernel; with many sequences a CTA takes all of V, with few a part. More than 64
    are not sorted by length."""

    K: int = 128
    V: int = 128
    dtype: torch.dtype = BF16
    gate: Literal["log", "softplus", "bounded"] = "bounded"
    g_dtype: torch.dtype | None = None
    norm: bool = True
    neg_eigval: bool = False
    layout: Literal["kv", "vk"] = "kv"
    packed: bool = True
    sequences: int = 3
    tokens: int = 1024
    heads_first: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        off = [name for name, on in (("norm", self.norm), ("packed", self.packed)) if not on]
        on = [name for name, on in (("neg", self.neg_eigval), ("fp32_gate", self.g_dtype is not None)) if on]
        words = [f"{self.K}x{self.V}", dtype, self.gate, self.layout, *on, *(f"no_{name}" for name in off)]
        return "-".join([*words, *([str(self.sequences)] if self.sequences > 3 else [])])


DEFAULT = Shape()
MANY = Shape(sequences=100)
SORTED = Shape(sequences=40, gate="softplus")
SHAPES = [
    DEFAULT,
    MANY,
    SORTED,
    replace(MANY, gate="softplus"),
    replace(MANY, packed=False),
    replace(MANY, dtype=FP16),
    Shape(gate="softplus", layout="vk", packed=False),
    Shape(gate="log", dtype=FP16),
    Shape(gate="log", norm=False, packed=False, sequences=100),
    Shape(gate="softplus", norm=False, layout="vk", sequences=40),
    Shape(K=64, V=64, dtype=FP16, norm=False),
    Shape(K=64, gate="log", packed=False, layout="vk"),
    Shape(V=64, dtype=FP16, gate="softplus"),
    Shape(neg_eigval=True),
    Shape(K=64, V=64, dtype=FP16, gate="log", neg_eigval=True, packed=False),
    Shape(g_dtype=FP32, sequences=100),
    Shape(dtype=FP16, g_dtype=FP32),
    Shape(dtype=FP16, g_dtype=FP32, sequences=100),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
# Bytes that a thread spills nonetheless, under one Triton or both: two conversions take registers that nothing has.
SPILLED = {Shape(dtype=FP16, g_dtype=FP32): 8, Shape(dtype=FP16, g_dtype=FP32, sequences=100): 32}


def meta(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def arguments(shape: Shape) -> dict[str, Any]:
    """Those of `kda2.kda`, on the meta device."""
    s = shape

    def tokens(heads: int, *channels: int, dtype: torch.dtype = s.dtype) -> torch.Tensor:
        B = 1 if s.packed else s.sequences
        if s.heads_first:
            return meta(B, heads, s.tokens, *channels, dtype=dtype).transpose(1, 2)
        return meta(B, s.tokens, heads, *channels, dtype=dtype)

    make = Gate.softplus if s.gate == "softplus" else Gate.bounded
    return {
        "q": tokens(H, s.K), "k": tokens(H, s.K), "v": tokens(HV, s.V),
        "g": tokens(HV, s.K, dtype=s.g_dtype or s.dtype), "beta": tokens(HV, dtype=s.g_dtype or s.dtype),
        "gate": Gate.log() if s.gate == "log" else make(meta(HV), meta(HV, s.K)), "qk_l2norm": s.norm,
        "beta_sigmoid": True, "allow_neg_eigval": s.neg_eigval, "state_layout": s.layout,
        "initial_state": meta(s.sequences, HV, *((s.K, s.V) if s.layout == "kv" else (s.V, s.K))),
        "output_final_state": True,
        "cu_seqlens": meta(s.sequences + 1, dtype=torch.int64) if s.packed else None,
    }  # fmt: skip


def call_of(shape: Shape) -> Call:
    kwargs = arguments(shape)
    names = ("gate", "qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "state_layout")
    gate, norm, sigmoid, neg, layout = (kwargs.pop(name) for name in names)
    q, k, v, g, beta = (kwargs.pop(name) for name in ("q", "k", "v", "g", "beta"))
    options = check_options(q, gate, None, norm, sigmoid, neg, layout)
    return check_call(q, k, v, g, beta, options, deterministic=False, **kwargs)


def launch_of(shape: Shape) -> Launch:
    (launch,) = launches(call_of(shape))
    return launch


@cache
def built(shape: Shape) -> tuple[Inspection, list[str]]:
    """What the kernel's machine code holds, and its instructions."""
    found = build(launch_of(shape), 90)
    return inspect(found), instructions(disassemble(found.cubin))


def those_of(shape: Shape, opcode: str) -> list[str]:
    return [line for line in built(shape)[1] if line.startswith(opcode)]


@each_shape
def test_it_fits_and_the_assembler_got_it_right(shape: Shape) -> None:
    inspection, _ = built(shape)
    assert inspection.stage == "fused"
    assert inspection.shared <= SHARED_MEMORY_LIMIT[90]
    assert inspection.occupancy.ctas == 1
    assert inspection.undefined_reads == inspection.garbled_descriptors == ()


@each_shape
def test_nothing_is_spilled_but_by_fp16_beside_fp32_gates(shape: Shape) -> None:
    inspection, _ = built(shape)
    assert inspection.spills <= SPILLED.get(shape, 0)


@pytest.mark.parametrize(("shape", "one_factor_role"), [(DEFAULT, False), (MANY, True), (Shape(neg_eigval=True), True)])
def test_no_signal_is_made_that_nobody_waits_for(shape: Shape, one_factor_role: bool) -> None:
    """Triton would put other things where it lies: to write over an mbarrier is undefined."""
    slots = default_configs(key_of(call_of(shape)))["fused"].tiles["SLOTS"]
    assert len(those_of(shape, "SYNCS.EXCH")) == (3 * slots + 2 if one_factor_role else 5 * slots + 4)


@each_shape
def test_the_state_stays_in_registers(shape: Shape) -> None:
    """Each product of the loop over chunks has the state, or what is multiplied with its update, as an operand in
    registers: keys and queries against the state, the delta rule's correction, the update and the scores."""
    products = those_of(shape, "HGMMA")
    from_registers = [line for line in products if re.match(r"HGMMA\S* R\d+, R\d+, gdesc", line)]
    steps = shape.K // 16  # a product sums over 16 at a time, of K channels or of a chunk's 32 tokens
    panels = shape.K // 64
    assert len(from_registers) >= 2 * steps + 2 + 2 * panels + 2
    assert len(products) > len(from_registers)  # the other roles read shared memory


@each_shape
def test_products_are_not_made_one_at_a_time(shape: Shape) -> None:
    """Where ptxas cannot tell that registers of a running product are left alone, it waits after each."""
    assert 0 < len(those_of(shape, "WARPGROUP.DEPBAR")) <= len(those_of(shape, "HGMMA")) / 2


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [DEFAULT, MANY], ids=str)
def test_one_compilation_serves_every_length(shape: Shape, packed: bool, heads_first: bool) -> None:
    shape = replace(shape, packed=packed, heads_first=heads_first)
    counts = {3: (1, 2, 3, 16), 100: (65, 100, 1000)}[shape.sequences]
    same = [replace(shape, tokens=T, sequences=N) for T in (1, 16, 17, 1024, 2**20) for N in counts]
    assert len({code_key(launch_of(s), 90) for s in same}) == 1


def test_two_factor_roles_need_a_slot_more() -> None:
    call = call_of(DEFAULT)
    config = default_configs(key_of(call))["fused"]
    assert config.tiles["FACTORS"] == 2
    (launch,) = launches(call, {"fused": replace(config, tiles={**config.tiles, "SLOTS": 2})})
    with pytest.raises(BuildError, match="a factor role loads what comes after"):
        build(launch, 90)


def test_the_ladder_builds_it_for_hopper_alone() -> None:
    capture = Capture(arguments(DEFAULT))
    l0, l1, l2 = Builder().judge(Subject("hopper"), 90, capture, dict)
    assert (l0.outcome, l1.outcome, l2.outcome) == ("pass", "pass", "pass")
    assert l0.evidence["files"].count("fused.py") == 1 and set(l1.evidence["stages"]) == {"fused"}
    _, *others = Builder().judge(Subject("hopper"), 100, capture, dict)
    refusal = "not_run(it does not serve this call on sm_100: compute capability 10.0, wants 9.0)"
    assert [v.outcome for v in others] == [refusal, refusal]
