"""Where each role of a warp-specialised kernel spends its time, from Nsight Compute's source page.

    ncu --set full -k regex:kda_fused -o report python call.py
    ncu -i report.ncu-rep --page source --csv --print-units base > source.csv
    python roles.py source.csv

A role's code starts where its warps take or give registers (USETMAXREG). For each: its samples, the reasons it stalls
for, the pieces between barriers, waits and copies, and the shared-memory wavefronts by opcode.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from pathlib import Path

Row = dict[str, str]
ENDS = ("BAR.SYNC", "SYNCS", "DEPBAR", "MEMBAR", "UTMALDG", "UTMASTG")


def number(row: Row, column: str) -> float:
    return float((row.get(column) or "0").replace(",", "") or 0)


def roles(rows: list[Row]) -> list[list[Row]]:
    found: list[list[Row]] = [[]]
    for row in rows:
        if "USETMAXREG" in row["Source"]:
            found.append([])
        found[-1].append(row)
    total = sum(number(row, "# Samples") for row in rows)
    return [role for role in found if sum(number(row, "# Samples") for row in role) > 0.05 * total]


def opcode(row: Row) -> str:
    words = [word for word in row["Source"].split() if not word.startswith("@")]
    return words[0].split(".")[0]


def print_role(role: list[Row]) -> None:
    samples = sum(number(row, "# Samples") for row in role)
    print(f"\n{role[0]['Source'].strip()[:60]}: {samples:.0f} samples, {len(role)} instructions")
    stalls = Counter({name: sum(number(row, name) for row in role) for name in role[0] if is_stall(name)})
    print("  stalls:", ", ".join(f"{name[6:]} {100 * n / samples:.0f} %" for name, n in stalls.most_common(6)))
    wavefronts = Counter[str]()
    for row in role:
        wavefronts[opcode(row)] += int(number(row, "L1 Wavefronts Shared"))
    print("  wavefronts:", ", ".join(f"{name} {n}" for name, n in wavefronts.most_common(6) if n))
    start, piece = 0, 0.0
    for i, row in enumerate(role):
        piece += number(row, "# Samples")
        if piece > 0.012 * samples and any(end in row["Source"] for end in ENDS):
            print(f"  {start:5}-{i:5}  {100 * piece / samples:5.1f} %  until {row['Source'].strip()[:60]}")
            start, piece = i + 1, 0.0


def is_stall(name: str | None) -> bool:
    return name is not None and name.startswith("stall_") and "Not Issued" not in name


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()[1:]  # the first line names the kernel
    for each in roles(list(csv.DictReader(lines))):
        print_role(each)
