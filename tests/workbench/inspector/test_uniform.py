"""Faults of the assembler in written machine code. The bad lines are those of a kernel that ptxas 12.8 got wrong."""

from __future__ import annotations

import pytest

from kda2.workbench.inspector import garbled_descriptors, undefined_uniform_registers

# Low and high word of a descriptor for B: an address of 14 bits, and strides that are constants.
ADDRESS = ["S2UR UR5, SR_CgaCtaId", "USHF.R.U32.HI UR5, URZ, 0x4, UR5", "USGXT.U32 UR5, UR5, 0xe"]
PRODUCT = "HGMMA.64x32x16.F32.BF16 R24, R160, gdesc[UR48].tnspB, R24"
ADDRESS_OF_B = "UIADD3 UR50, UP0, UR5, 0x2, URZ"
STRIDES_OF_B = "UIADD3.X UR51, {}, -0x7fffffe0, URZ, UP0, !UPT"


def test_a_register_that_nothing_sets() -> None:
    code = [*ADDRESS, ADDRESS_OF_B, STRIDES_OF_B.format("UR9"), "USHF.R.U32.HI UR9, URZ, 0x4, UR5", PRODUCT]
    assert undefined_uniform_registers(code) == ("UIADD3.X UR51, UR9, -0x7fffffe0, URZ, UP0, !UPT: UR9",)


def test_a_register_that_holds_something_else() -> None:
    code = [*ADDRESS, "S2UR UR9, SR_CTAID.X", ADDRESS_OF_B, STRIDES_OF_B.format("UR9"), PRODUCT]
    assert undefined_uniform_registers(code) == ()
    assert garbled_descriptors(code) == (f"{PRODUCT}: UR51",)


@pytest.mark.parametrize(
    "setting",
    [
        "UMOV UR9, URZ",
        "UMOV UR9, 0x40000040",
        "R2UR UR9, R7",  # perhaps a constant: not to be blamed
        "R2UR P1, UR9, R7",
    ],
)
def test_a_register_that_is_set_as_it_should_be(setting: str) -> None:
    code = [*ADDRESS, setting, ADDRESS_OF_B, STRIDES_OF_B.format("UR9"), PRODUCT]
    assert undefined_uniform_registers(code) == garbled_descriptors(code) == ()


def test_constants_are_followed_and_overwritten() -> None:
    made = [*ADDRESS, "UMOV UR9, 0x1", "UIADD3 UR9, UR9, 0x1, URZ", ADDRESS_OF_B, STRIDES_OF_B.format("UR9")]
    assert garbled_descriptors([*made, PRODUCT]) == ()
    assert garbled_descriptors([*made, "ULDC UR51, c[0x0][0x210]", PRODUCT]) == (f"{PRODUCT}: UR51",)


def test_halves_of_a_pair_are_told_apart() -> None:
    pair = [*ADDRESS, "UMOV UR6, 0x40000040", "UIADD3.64 UR50, UR5, 0x40, URZ", PRODUCT]
    assert garbled_descriptors(pair) == ()
    swapped = [*ADDRESS, "UMOV UR4, 0x40000040", "UIADD3.64 UR50, UR4, -UR4, URZ", PRODUCT]
    assert garbled_descriptors(swapped) == (f"{PRODUCT}: UR51",)


@pytest.mark.parametrize(
    ("instruction", "registers"),
    [
        ("STS.128 [R8+UR6+0x400], R12", "UR6"),
        ("LDS.64 R60, [R5+UR6+0x800]", "UR6"),  # 64 bits of data, one register of address
        ("LDG.E.128 R8, desc[UR6][R2.64]", "UR6, UR7"),
        ("LDG.E R8, desc[UR6][UR8.64]", "UR6, UR7, UR8, UR9"),
        ("BRA `(.L_x_0)", ""),
        ("UIADD3.64 UR6, UR6, -UR8, URZ", "UR6, UR7, UR8, UR9"),
        ("UIADD3 UR6, UP1, UR6, 0x2, URZ", "UR6"),
        ("ULDC.64 UR6, c[0x0][0x208]", ""),
        ("ULDC.64 UR6, c[0x0][UR8+0x208]", "UR8"),
        ("UISETP.NE.U32.AND UP0, UPT, UR6, UR7, UPT", "UR6, UR7"),
        ("ULOP3.LUT UP0, URZ, UR6, 0x1, URZ, 0xc0, !UPT", "UR6"),
        ("UIMNMX.S64 UPT, UPT, UR10, UR6, UR24, UPT, !UPT", "UR6, UR24"),
        ("IMAD.WIDE.U32 R4, R4, UR6, RZ", "UR6"),
        ("R2UR P0, UR6, R3", ""),
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0", "UR8, UR9, UR10, UR11"),
        ("HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], RZ, !UPT", "UR10, UR11"),
        (
            "UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4], tmem[UR6], idesc[UR7], !UPT",
            "UR4, UR6, UR7, UR8, UR9, UR10, UR11",
        ),
    ],
)
def test_what_an_instruction_reads(instruction: str, registers: str) -> None:
    expected = (f"{instruction}: {registers}",) if registers else ()
    assert undefined_uniform_registers([instruction]) == expected


@pytest.mark.parametrize(
    ("instruction", "last"),
    [
        ("ULDC UR4, c[0x0][0x208]", 4),
        ("ULDC.64 UR4, c[0x0][0x208]", 5),
        ("LDCU.128 UR4, c[0x0][0x380]", 7),
        ("UIMAD.WIDE.U32 UR4, 0x3, 0x5, URZ", 5),
        ("USHF.L.U64.HI UR4, URZ, 0x1, URZ", 4),
        ("CS2UR UR4, SR_CLOCKLO", 5),
        ("R2UR UR4, R2", 4),
        ("R2UR P0, UR4, R2", 4),
        ("UIMNMX.S64 UPT, UPT, UR4, URZ, URZ, UPT, !UPT", 5),
        ("USHF.R.S64 UR4, URZ, 0x1, URZ", 4),
        ("VOTEU.ANY UR4, UPT, PT", 4),
        ("STS [UR4], R2", 3),
    ],
)
def test_what_an_instruction_sets(instruction: str, last: int) -> None:
    reads = [f"MOV R{n}, UR{n}" for n in range(4, 9)]
    found = undefined_uniform_registers([instruction, *reads])
    assert found[-1] == "MOV R8, UR8: UR8"
    assert [line for line in found if line.startswith("MOV")] == [
        f"{x}: UR{n}" for n, x in enumerate(reads, 4) if n > last
    ]
