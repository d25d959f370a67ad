"""Counting machine instructions, on written disassembly and on compiled kernels."""

from __future__ import annotations

import json

import pytest
import torch
import triton
import triton.language as tl

from kda2.backends.triton import Launch
from kda2.backends.triton.build import build
from kda2.contract import KernelConfig
from kda2.workbench.inspector import inspect
from kda2.workbench.inspector.inspection import grouped, instructions

SASS = """
        .section        .text.kernel,"ax",@progbits
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R8, desc[UR4][R2.64] ;
        /*0020*/               @P1 LDG.E.U16.CONSTANT R8, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E R9, desc[UR4][R2.64+0x4] ;
        /*0040*/                   LDGSTS.E.BYPASS.LTC128B.128 [R4], desc[UR4][R2.64] ;
        /*0050*/              @!PT LDS RZ, [RZ] ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT, gsb0 ;
        /*0070*/             @!UP0 UIADD3 UR8, UR6, 0x1, URZ ;
        /*0080*/                   MUFU.EX2 R3, R3 ;
        /*0090*/                   STL.64 [R1+0x8], R4 ;
.L_x_0:
        /*1000a0*/                 BRA `(.L_x_0);
        /*1000b0*/                 NOP;
"""


def test_instructions_of_a_disassembly() -> None:
    code = instructions(SASS)
    assert [line.split()[0] for line in code] == [
        "LDC", "LDG.E.128", "LDG.E.U16.CONSTANT", "LDG.E", "LDGSTS.E.BYPASS.LTC128B.128", "HGMMA.64x64x16.F32.BF16",
        "UIADD3", "MUFU.EX2", "STL.64", "BRA",
    ]  # fmt: skip
    assert code[3] == "LDG.E R9, desc[UR4][R2.64+0x4]"


def test_groups_of_opcodes() -> None:
    groups = grouped(line.split()[0] for line in instructions(SASS))
    assert {name: count for name, count in groups.items() if count} == {
        "HGMMA": 1, "MUFU": 1, "LDG": 3, "LDG.16": 1, "LDG.32": 1, "LDG.128": 1, "LDGSTS": 1, "LDGSTS.128": 1, "STL": 1,
    }  # fmt: skip
    assert groups["HMMA"] == groups["UTMALDG"] == 0


@pytest.mark.parametrize(
    ("opcode", "group"),
    [
        ("LDG.E.64", "LDG.64"),
        ("LDG.E.ENL2.256", "LDG.256"),
        ("STG.E.U8", "STG.8"),
        ("LDSM.16.MT88.4", "LDS"),
        ("STS.128", "STS"),
        ("UTCHMMA", "tcgen05.mma"),
        ("UTMALDG.2D", "UTMALDG"),
        ("HMMA.16816.F32.BF16", "HMMA"),
    ],
)
def test_group_of_an_opcode(opcode: str, group: str) -> None:
    assert grouped([opcode])[group] == 1


@triton.jit
def _double(p_x, p_y, n, N: tl.constexpr):
    o_i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(p_y + o_i, tl.exp2(tl.load(p_x + o_i, mask=o_i < n)), mask=o_i < n)


def double_launch(n: int = 256) -> Launch:
    x = torch.empty(4096, device="meta")
    return Launch("double", _double, 4096 // n, {"p_x": x, "p_y": x, "n": 4096, "N": n}, KernelConfig(2, 1))


def test_inspection_of_a_kernel() -> None:
    built = build(double_launch(), 90)
    found = inspect(built)
    # 256 floats over 64 threads: one 128-bit load and store, and four exponentials, a thread
    assert (found.groups["LDG.128"], found.groups["STG.128"], found.groups["MUFU"]) == (1, 1, 4)
    assert (found.stage, found.arch, found.num_warps, found.registers) == ("double", 90, 2, built.registers)
    assert found.instructions == sum(found.opcodes.values()) > 10
    assert found.occupancy.ctas == 32


def test_the_same_code_gives_the_same_data() -> None:
    one, two = (inspect(build(double_launch(), 90)).as_dict() for _ in range(2))
    assert json.dumps(one) == json.dumps(two)
    assert inspect(build(double_launch(128), 90)).sass_hash != one["sass_hash"]
