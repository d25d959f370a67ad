"""The machine code of a build: its instructions by kind, and what they imply."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kda2.backends.triton.binary import disassemble
from kda2.backends.triton.build import Build
from kda2.workbench.inspector.occupancy import Occupancy, occupancy
from kda2.workbench.inspector.uniform import garbled_descriptors, undefined_uniform_registers

# /*0a40*/  @!P0 LDG.E.128 R8, desc[UR4][R2.64] ;
_INSTRUCTION = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?P<predicate>@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_.]*)(?P<rest>[^;]*);"
)
# Instructions worth a column: name -> opcodes. Those of global memory are split further by the width of one access.
_GROUPS: dict[str, str] = {
    "HGMMA": r"HGMMA",
    "HMMA": r"HMMA",
    "tcgen05.mma": r"UTC\w*MMA",
    "FFMA": r"FFMA2?",
    "MUFU": r"MUFU",
    "SHFL": r"SHFL",
    "BAR": r"BAR",
    "SYNCS": r"SYNCS",
    "LDG": r"LDG",
    "STG": r"STG",
    "LDGSTS": r"LDGSTS",
    "UTMALDG": r"UTMALDG",
    "UTMASTG": r"UTMASTG",
    "LDS": r"LDS|LDSM",
    "STS": r"STS|STSM",
    "LDL": r"LDL",
    "STL": r"STL",
}
_BY_WIDTH = ("LDG", "STG", "LDGSTS")


@dataclass(frozen=True)
class Inspection:
    """What the machine code of one build holds. Counts are of instructions in the code, not of executions.

    `groups` counts the kinds worth watching (all of them, zeros too; "LDG.128" is the part of "LDG" that moves 128
    bits a thread), `opcodes` every opcode without its modifiers, `instructions` their sum. `spills` is bytes of local
    memory per thread, `shared` bytes per CTA. `sass_hash` is the SHA-256 of the instructions: unlike the cubin's it
    does not depend on where the source lies. `undefined_reads` and `garbled_descriptors` are instructions that the
    assembler got wrong (see `uniform`): a kernel that has any must not be run.
    """

    stage: str
    name: str
    arch: int
    num_warps: int
    registers: int
    spills: int
    shared: int
    occupancy: Occupancy
    instructions: int
    groups: dict[str, int]
    opcodes: dict[str, int]
    sass_hash: str
    undefined_reads: tuple[str, ...]
    garbled_descriptors: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the same for the same machine code."""
        return asdict(self)


def inspect(build: Build) -> Inspection:
    """Disassemble `build` and count. Raises `UnsupportedTarget` for an architecture whose limits are not known."""
    code = instructions(disassemble(build.cubin))
    opcodes = [line.split(None, 1)[0] for line in code]
    by_base = Counter(opcode.partition(".")[0] for opcode in opcodes)
    return Inspection(
        stage=build.stage,
        name=build.name,
        arch=build.arch,
        num_warps=build.num_warps,
        registers=build.registers,
        spills=build.spills,
        shared=build.shared,
        occupancy=occupancy(build.arch, build.registers, build.num_warps, build.shared),
        instructions=len(opcodes),
        groups=grouped(opcodes),
        opcodes=dict(sorted(by_base.items())),
        sass_hash=hashlib.sha256("\n".join(code).encode()).hexdigest(),
        undefined_reads=undefined_uniform_registers(code),
        garbled_descriptors=garbled_descriptors(code),
    )


def instructions(sass: str) -> list[str]:
    """The instructions of a disassembly, opcode first, without predicates. NOPs, and what is predicated `@!PT` and so
    never runs, are padding and left out."""
    found = []
    for match in _INSTRUCTION.finditer(sass):
        predicate = (match["predicate"] or "").strip()
        if match["opcode"] != "NOP" and predicate not in ("@!PT", "@!UPT"):
            found.append(" ".join((match["opcode"] + match["rest"]).split()))
    return found


def grouped(opcodes: Iterable[str]) -> dict[str, int]:
    """Counts of the groups worth watching, in a fixed order, zeros included."""
    counts = Counter(dict.fromkeys(_GROUPS, 0))
    for opcode in opcodes:
        base, *modifiers = opcode.split(".")
        group = next((name for name, bases in _GROUPS.items() if re.fullmatch(bases, base)), None)
        if group is None:
            continue
        counts[group] += 1
        if group in _BY_WIDTH:
            counts[f"{group}.{_width(modifiers)}"] += 1
    order = [*_GROUPS, *sorted(counts.keys() - _GROUPS.keys(), key=lambda name: (name.split(".")[0], _bits(name)))]
    return {name: counts[name] for name in order}


def _width(modifiers: Iterable[str]) -> int:
    """Bits that one thread moves: 32 unless a modifier says otherwise."""
    for modifier in modifiers:
        if match := re.fullmatch(r"[US]?(8|16|64|128|256)", modifier):
            return int(match[1])
    return 32


def _bits(name: str) -> int:
    return int(name.rpartition(".")[2])
