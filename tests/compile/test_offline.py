"""Every kernel of the KDA implementation in Triton, compiled for GPUs that need not be here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
from triton.backends.nvidia.compiler import get_ptxas

from kda2.backends.triton import Launch
from kda2.backends.triton.build import build, code_key
from kda2.contract import KernelConfig
from kda2.device import PORTABLE_SHARED_MEMORY
from kda2.ops.kda import Gate
from kda2.ops.kda.check import Call, check_call, check_options, check_step_call
from kda2.ops.kda.triton import default_configs, key_of, launches, space, step_launches
from kda2.workbench.capture import Capture
from kda2.workbench.inspector import Inspection, inspect
from kda2.workbench.verifier.code import Builder
from kda2.workbench.verifier.subject import Subject

H, HV = 2, 4
PTXAS = get_ptxas(90).version


@dataclass(frozen=True)
class Shape:
    """What changes the code of a call's kernels."""

    K: int
    V: int
    dtype: torch.dtype
    gate: Literal["log", "softplus", "bounded"]
    neg_eigval: bool = False
    packed: bool = True

    def __str__(self) -> str:
        flags = "-neg" * self.neg_eigval + "-packed" * self.packed
        return f"{self.K}x{self.V}-{str(self.dtype).removeprefix('torch.')}-{self.gate}{flags}"


DEFAULT = Shape(128, 128, torch.bfloat16, "bounded")
SHAPES = [
    DEFAULT,
    Shape(128, 128, torch.bfloat16, "log", packed=False),
    Shape(128, 128, torch.bfloat16, "bounded", neg_eigval=True),
    Shape(256, 512, torch.bfloat16, "bounded"),
    Shape(256, 512, torch.float32, "softplus"),
    Shape(60, 100, torch.float32, "log"),
]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gate_of(shape: Shape) -> Gate:
    if shape.gate == "log":
        return Gate.log()
    make = Gate.softplus if shape.gate == "softplus" else Gate.bounded
    return make(meta(HV), meta(HV, shape.K))


def inputs(shape: Shape, *lead: int, heads_first: bool = False) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta on the meta device; `heads_first` makes them views of [B, H, T, ...] tensors."""

    def make(heads: int, *channels: int) -> torch.Tensor:
        if heads_first:
            B, T = lead
            return meta(B, heads, T, *channels, dtype=shape.dtype).transpose(1, 2)
        return meta(*lead, heads, *channels, dtype=shape.dtype)

    return make(H, shape.K), make(H, shape.K), make(HV, shape.V), make(HV, shape.K), make(HV)


def prefill_call(shape: Shape, T: int = 1024, sequences: int = 3, heads_first: bool = False) -> Call:
    q, k, v, g, beta = inputs(shape, 1 if shape.packed else sequences, T, heads_first=heads_first)
    return check_call(
        q, k, v, g, beta, check_options(q, gate_of(shape), None, True, True, shape.neg_eigval, "kv"),
        initial_state=meta(sequences, HV, shape.K, shape.V),
        output_final_state=True,
        cu_seqlens=meta(sequences + 1, dtype=torch.int64) if shape.packed else None,
        deterministic=False,
    )  # fmt: skip


def prefill(*args: Any, **kwargs: Any) -> list[Launch]:
    return launches(prefill_call(*args, **kwargs))


def decode(shape: Shape, batch: int = 16, slots: int = 64) -> list[Launch]:
    q, k, v, g, beta = inputs(shape, batch)
    call = check_step_call(
        q, k, v, g, beta, meta(slots, HV, shape.K, shape.V),
        check_options(q, gate_of(shape), None, True, True, shape.neg_eigval, "kv"),
        state_indices=meta(batch, dtype=torch.int64), pad_slot=-1, inplace=True, out=None,
    )  # fmt: skip
    return step_launches(call)


@cache
def inspections(shape: Shape, arch: int) -> dict[str, Inspection]:
    """Stage -> what its machine code holds, of a prefill call and a step."""
    return {launch.stage: inspect(build(launch, arch)) for launch in prefill(shape) + decode(shape)}


STAGES = ["prepare", "state", "output", "step"]


def test_every_stage_is_there() -> None:
    assert [launch.stage for launch in prefill(DEFAULT) + decode(DEFAULT)] == STAGES


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", STAGES)
def test_default_call_on_hopper(stage: str) -> None:
    inspection = inspections(DEFAULT, 90)[stage]
    assert inspection.spills == inspection.groups["LDL"] == inspection.groups["STL"] == 0
    assert_sound(inspection)
    uses_tensor_cores = inspection.groups["HMMA"] + inspection.groups["HGMMA"] > 0
    assert uses_tensor_cores == (stage != "step")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("shape", "arch"),
    # sm_80, 86 and 89 get the same IR from Triton and differ in ptxas alone
    [(DEFAULT, arch) for arch in (80, 86, 89, 90, 120)] + [(s, arch) for s in SHAPES[1:] for arch in (86, 90, 120)],
    ids=str,
)
def test_shipped_configurations_are_sound_everywhere(shape: Shape, arch: int) -> None:
    for inspection in inspections(shape, arch).values():
        assert_sound(inspection)


def assert_sound(inspection: Inspection) -> None:
    """One configuration is shipped for all architectures, so each fits the smallest; and ptxas got it right."""
    assert inspection.shared <= PORTABLE_SHARED_MEMORY, f"{inspection.stage} takes {inspection.shared} bytes"
    assert inspection.occupancy.ctas >= 1
    assert inspection.undefined_reads == inspection.garbled_descriptors == ()


def chunks_of_64(BV: int) -> tuple[Call, dict[str, KernelConfig]]:
    """A call and configurations that are not shipped, for which ptxas 12.8 leaves a register of `prepare` unset."""
    call = prefill_call(DEFAULT)
    prepare = KernelConfig(num_warps=4, num_stages=1, tiles={"BT": 64, "BK": 32, "BV": BV})
    return call, {**default_configs(key_of(call)), "prepare": prepare}


faulty_ptxas = pytest.mark.skipif(PTXAS != "12.8", reason=f"a fault of ptxas 12.8, this is {PTXAS}")


@faulty_ptxas
@pytest.mark.parametrize(("BV", "was_used_before"), [(32, False), (64, True)])
def test_what_ptxas_gets_wrong_is_found(BV: int, was_used_before: bool) -> None:
    inspection = inspect(build(launches(*chunks_of_64(BV))[0], 90))
    assert inspection.garbled_descriptors
    # whether the kernel has had something else in the register is chance
    assert (inspection.undefined_reads == ()) == was_used_before


@faulty_ptxas
def test_the_ladder_refuses_what_ptxas_gets_wrong() -> None:
    q, k, v, g, beta = inputs(DEFAULT, 1, 512)
    options = {"gate": gate_of(DEFAULT), "qk_l2norm": True, "beta_sigmoid": True}
    capture = Capture({"q": q, "k": k, "v": v, "g": g, "beta": beta, **options})
    _, configs = chunks_of_64(32)
    subject = Subject("triton", configs={stage: c.as_dict() for stage, c in configs.items()})
    l0, l1, l2 = Builder().judge(subject, 90, capture, dict)
    assert (l0.outcome, l1.outcome, l2.outcome) == ("pass", "pass", "fail")
    failed = {name: check for name, check in l2.evidence["checks"].items() if not check["ok"]}
    assert failed.keys() == {"prepare: registers"}
    assert "ptxas 12.8 has miscompiled it" in failed["prepare: registers"]["observed"]


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_one_compilation_serves_every_length(packed: bool, heads_first: bool) -> None:
    shape = replace(DEFAULT, packed=packed)
    sizes = [(1024, 1), (1, 1), (17, 3), (4096, 16), (5000, 7), (2**20, 2)]
    keys = {tuple(code_key(launch, 90) for launch in prefill(shape, *size, heads_first)) for size in sizes}
    assert len(keys) == 1


def test_one_compilation_serves_every_decode_batch() -> None:
    sizes = [(1, 1), (16, 16), (17, 1000), (256, 257)]
    assert len({code_key(launch, 90) for size in sizes for launch in decode(DEFAULT, *size)}) == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_ships_lies_in_the_design_space(shape: Shape) -> None:
    """Tiles that are larger than the channels are cut down to them by the launches."""
    key = key_of(prefill_call(shape))
    for stage, fields in space(key).items():
        for field, values in fields.items():
            assert min(default_configs(key)[stage].as_dict()[field], max(values)) in values
