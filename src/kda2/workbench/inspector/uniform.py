"""A fault of the assembler that shows in the machine code: uniform registers that are used but were never set.

ptxas 12.8, which Triton 3.6 and 3.7 bring along, drops the instruction that sets half of a matrix descriptor in some
kernels with many small `wgmma`s. A descriptor is a pair of uniform registers: an address in shared memory in the lower,
strides and swizzle, which are constants of the kernel, in the upper. What is used then is whatever the register holds:
nothing of this kernel's (`undefined_uniform_registers`) or a value meant for something else (`garbled_descriptors`).
Either way the numbers are wrong or the memory access is illegal, now and then.

The code is followed from top to bottom, and the last instruction above that sets a register is the one that counts:
right for straight-line code and for the first turn of a loop. An instruction that is not known is taken to be right, so
what these functions name is worth believing, while their silence proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_REGISTER = re.compile(r"\bUR(\d+)\b")
_PREDICATE = re.compile(r"!?U?P[0-6T]")
# Registers that a destination takes, by the modifier that says so, and opcodes that take two without saying so.
_WIDTHS = {"64": 2, "S64": 2, "U64": 2, "WIDE": 2, "128": 4}
_ALWAYS_WIDE = ("CS2UR", "ULEPC")
# A funnel shift of 64 bits gives 32 of them.
_NARROW = ("USHF.L.U64.HI", "USHF.R.U64", "USHF.R.S64")


@dataclass(frozen=True)
class _Instruction:
    """One instruction as far as uniform registers go: those it sets, and those it certainly reads, operand by operand.

    `uppers` are the registers it takes for the upper half of a matrix descriptor; `is_pairwise` says that all operands
    are pairs, and each half of the result follows from the same halves of the sources.
    """

    text: str
    base: str
    is_pairwise: bool
    sets: range
    sources: tuple[range, ...]
    uppers: tuple[int, ...]


def undefined_uniform_registers(code: Iterable[str]) -> tuple[str, ...]:
    """The instructions of `code` (what `instructions` makes of a disassembly) that read a uniform register which none
    above sets, each with the register behind it: "UIADD3.X UR51, UR9, -0x7fffffe0, URZ, UP0, !UPT: UR9"."""
    known: set[int] = set()
    found = []
    for instruction in map(_parse, code):
        if missing := {n for source in instruction.sources for n in source} - known:
            found.append(_told(instruction, missing))
        known.update(instruction.sets)
    return tuple(found)


def garbled_descriptors(code: Iterable[str]) -> tuple[str, ...]:
    """The matrix products of `code` with a descriptor whose upper half is set, but not from constants, each with the
    register behind it: "HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR48].tnspB, R24: UR51"."""
    known: set[int] = set()
    constant: set[int] = set()
    found = []
    for instruction in map(_parse, code):
        if wrong := known.intersection(instruction.uppers) - constant:
            found.append(_told(instruction, wrong))
        constant = constant.difference(instruction.sets) | _set_from_constants(instruction, constant)
        known.update(instruction.sets)
    return tuple(found)


def _told(instruction: _Instruction, registers: Iterable[int]) -> str:
    return f"{instruction.text}: {', '.join(f'UR{n}' for n in sorted(registers))}"


def _set_from_constants(instruction: _Instruction, constant: set[int]) -> set[int]:
    """The registers that the instruction sets to what follows from constants alone. A value that comes out of a vector
    register may be one."""
    if instruction.base == "R2UR":
        return set(instruction.sets)
    if not instruction.base.startswith("U") or "c[" in instruction.text:
        return set()
    if instruction.is_pairwise:
        halves = ((n, [source[i] for source in instruction.sources]) for i, n in enumerate(instruction.sets))
        return {n for n, half in halves if constant.issuperset(half)}
    return set(instruction.sets) if all(constant.issuperset(source) for source in instruction.sources) else set()


def _parse(text: str) -> _Instruction:
    opcode, _, rest = text.partition(" ")
    base, *modifiers = opcode.split(".")
    operands = [operand.strip() for operand in rest.split(",")]
    sets = range(0)
    destination = next((i for i, operand in enumerate(operands) if not _PREDICATE.fullmatch(operand)), 0)
    if not base.endswith("SETP") and (match := _REGISTER.fullmatch(operands[destination])):
        sets = range(int(match[1]), int(match[1]) + _width(opcode, base, modifiers))
        del operands[: destination + 1]
    if base.endswith("GMMA"):
        descriptors = tuple(_descriptors(operands))
        return _Instruction(text, base, False, sets, descriptors, tuple(pair[1] for pair in descriptors))
    is_pairwise = base.startswith("U") and "64" in modifiers and "[" not in rest
    sources = tuple(source for operand in operands for source in _reads(operand, is_pairwise))
    return _Instruction(text, base, is_pairwise, sets, sources, ())


def _width(opcode: str, base: str, modifiers: Iterable[str]) -> int:
    if opcode in _NARROW:
        return 1
    return next((_WIDTHS[x] for x in modifiers if x in _WIDTHS), 2 if base in _ALWAYS_WIDE else 1)


def _reads(operand: str, is_pairwise: bool) -> Iterator[range]:
    """The uniform registers that an operand names: pairs where `is_pairwise`, in a descriptor, and with `.64`."""
    for match in _REGISTER.finditer(operand):
        before, after = operand[: match.start()], operand[match.end() :]
        is_pair = is_pairwise or before.endswith("desc[") or after.startswith(".64")
        yield range(int(match[1]), int(match[1]) + (2 if is_pair else 1))


def _descriptors(operands: Sequence[str]) -> Iterator[range]:
    """The descriptors of a `wgmma`: `gdesc[UR16]` names four registers, two for A and two for B; A may lie in vector
    registers instead, and then the first two are not used."""
    for position, operand in enumerate(operands):
        if operand.startswith("gdesc[") and (match := _REGISTER.search(operand)):
            first = int(match[1])
            if position == 1:
                yield range(first, first + 2)
            yield range(first + 2, first + 4)
