r"""Nsight Compute's figures of the kernel and its roles beside FlashKDA's kernels, as records and as Markdown tables.

    here=docs/notes/2026-11-30-kda-hopper; case=H64-8192
    for impl in hopper flash_kda; do
      ncu --set full --clock-control none --import-source no --profile-from-start off -f -o $impl \
        python $here/counters.py call $case $impl --calls calls.jsonl
      ncu -i $impl.ncu-rep --page raw --csv --print-units base > raw_$impl.csv
    done
    ncu -i hopper.ncu-rep -k regex:kda_fused --page source --csv --print-units base > source_hopper.csv
    python $here/counters.py table raw_hopper.csv source_hopper.csv raw_flash_kda.csv --calls calls.jsonl \
      --ncu $(ncu --version | awk '/^Version/ {print $2}') --out counters.jsonl

`call` calls three times on the inputs of suite `kda-prefill`, strong gate, and lets the last be profiled, with all the
kernels that it launches. Nsight Compute empties the caches before each of them.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from pathlib import Path
from typing import Any

from roles import Row, is_stall, number, roles

Record = dict[str, Any]
METRICS = {  # name in records: (Nsight Compute's name, row of the table, what one there stands for)
    "us": ("gpu__time_duration.sum", "duration, us", 1),
    "cycles": ("sm__cycles_elapsed.avg", "cycles, thousands", 1e3),
    "cycles_active": ("sm__cycles_active.avg", "of them active, mean of all SMs", 1e3),
    "instructions": ("smsp__inst_executed.sum", "warp instructions, millions", 1e6),
    "issue_active_pct": ("smsp__issue_active.avg.pct_of_peak_sustained_active", "issue active, % of active cycles", 1),
    "tensor_pct": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "tensor pipe, % of them", 1),
    "shared_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "shared-memory wavefronts, millions", 1e6),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "bank conflicts, millions", 1e6),
    "l2_pct": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", "L2, % of peak", 1),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct", "L2 hits, %", 1),
    "dram_pct": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "DRAM, % of peak", 1),
    "dram_read_bytes": ("dram__bytes_read.sum", "DRAM read, MB", 1e6),
    "dram_write_bytes": ("dram__bytes_write.sum", "DRAM written, MB", 1e6),
    "registers": ("launch__registers_per_thread", "registers a thread", 1),
    "shared_bytes": ("launch__shared_mem_per_block", "shared memory a CTA, KB", 1e3),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active", "occupancy, % of warps", 1),
}
UNITS = {"ns": 1e-3, "ms": 1e3, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}  # in us and bytes
SAMPLED = "smsp__pcsamp_warps_issue_stalled_"
STALLS = {  # the source page's own names
    "dispatch": "dispatch_stall", "imc": "imc_miss", "lg": "lg_throttle", "long_sb": "long_scoreboard",
    "math": "math_pipe_throttle", "mio": "mio_throttle", "no_inst": "no_instructions", "short_sb": "short_scoreboard",
    "sleep": "sleeping", "tex": "tex_throttle",
}  # fmt: skip


def value(row: Row, units: Row, metric: str) -> float | None:
    """A metric in us, bytes or its own unit; None where it was not measured ("n/a", "no data")."""
    try:
        x = float(row[metric].replace(",", "")) * UNITS.get(units[metric].split("/")[0], 1)
    except (KeyError, ValueError):
        return None
    return int(x) if x == int(x) else round(x, 3)


def shares(counts: dict[str, float], total: float) -> dict[str, float]:
    """The six largest, in percent of the total."""
    ranked = sorted(counts.items(), key=lambda x: -x[1])[:6]
    return {name: round(100 * n / total, 1) for name, n in ranked if n}


def of_kernels(raw: Path) -> list[Record]:
    """A record of each launch on a raw page, whose first row has the units."""
    units, *launches = csv.DictReader(raw.read_text().splitlines())
    sampled = [x for x in units if x.startswith(SAMPLED) and not x.endswith("_not_issued")]
    records = []
    for row in launches:
        counts = {x.removeprefix(SAMPLED): value(row, units, x) or 0 for x in sampled}
        record: Record = {"kernel": re.sub(r"^void |[<(].*", "", row["Kernel Name"])}
        record |= {"grid": row["Grid Size"], "block": row["Block Size"]}
        record |= {name: value(row, units, metric) for name, (metric, *_) in METRICS.items()}
        records.append(record | {"stalls_pct": shares(counts, sum(counts.values()))})
    return records


def total(rows: list[Row], column: str, opcode: str = "") -> int:
    return int(sum(number(row, column) for row in rows if re.search(opcode, row["Source"])))


def names(found: list[list[Row]]) -> list[str]:
    """Of roles, by what they execute: state's products have an operand in registers, factor takes the exponentials."""
    opcodes = (r"HGMMA\S* R\d+, R\d+", r"MUFU\.EX2", "HGMMA")
    own, exp, products = ([total(role, "Instructions Executed", x) for role in found] for x in opcodes)
    result = ["score" if n else "other" for n in products]
    for name, counts in (("factor", exp), ("state", own)):
        result = [name if n > max(counts) / 2 else x for n, x in zip(counts, result, strict=True)]
    return [f"{x} {result[:i].count(x) + 1}" if result.count(x) > 1 else x for i, x in enumerate(result)]


def of_roles(source: Path) -> list[Record]:
    """A record of each role on the source page of one kernel, whose first line names it."""
    title, *lines = source.read_text().splitlines()
    rows = list(csv.DictReader(lines))
    found, records = roles(rows), []
    for role, name in zip(found, names(found), strict=True):
        samples = total(role, "# Samples")
        counts: dict[str, float] = {STALLS.get(x[6:], x[6:]): total(role, x) for x in role[0] if is_stall(x)}
        counts["warpgroup_arrive"] = samples - sum(counts.values())  # has no column
        record: Record = {"kernel": title.split('"')[3], "role": name}
        record["registers"] = int(role[0]["Source"].split()[-1], 16)
        record["samples_pct"] = round(100 * samples / total(rows, "# Samples"), 1)
        record["instructions"] = total(role, "Instructions Executed")
        record["shared_wavefronts"] = total(role, "L1 Wavefronts Shared")
        records.append(record | {"stalls_pct": shares(counts, samples)})
    return records


def markdown(kernels: list[Record], by_role: list[Record]) -> str:
    rows = [["", *(k["kernel"] for k in kernels)], ["---", *("---:" for _ in kernels)]]
    for name, (_, label, unit) in METRICS.items():
        rows.append([label, *("n/a" if k[name] is None else f"{k[name] / unit:.4g}" for k in kernels)])
    rows.append(["stalls, % of samples", *map(stalls, kernels)])
    rows += [[], ["role", "samples, %", "registers", "instructions, M", "wavefronts, M", "stalls, % of samples"]]
    rows.append(["---", *["---:"] * 4, "---"])
    for r in by_role:
        millions = [f"{r[x] / 1e6:.3g}" for x in ("instructions", "shared_wavefronts")]
        rows.append([r["role"], str(r["samples_pct"]), str(r["registers"]), *millions, stalls(r)])
    return "\n".join(f"| {' | '.join(row)} |" if row else "" for row in rows)


def stalls(record: Record) -> str:
    return ", ".join(f"{name} {n:.0f}" for name, n in list(record["stalls_pct"].items())[:4])


def table(args: argparse.Namespace) -> None:
    calls = {x["impl"]: x for x in map(json.loads, args.calls.read_text().splitlines())}  # the last of each
    own, peer = ({**calls[impl], "ncu": args.ncu} for impl in ("kda2:hopper", "flash_kda"))
    if own["case"] != peer["case"]:
        raise SystemExit(f"{args.calls}: the last calls are of {own['case']} and {peer['case']}, not of one case")
    kernels, others, by_role = of_kernels(args.raw), of_kernels(args.peer), of_roles(args.source)
    with args.out.open("a") as out:
        for x in [own | x for x in kernels + by_role] + [peer | x for x in others]:
            out.write(json.dumps(x) + "\n")
    print(f"{own['case']}, {own['device']}, Nsight Compute {args.ncu}:\n\n{markdown(kernels + others, by_role)}")


def call(args: argparse.Namespace) -> None:
    import torch

    from kda2.workbench.profiler import bench, environment, peers, problems, suites

    cases = suites.load_suite("kda-prefill").cases(["strong"])
    (case,) = suites.select(cases, f"^{re.escape(args.case)}-strong$")
    where, peer = torch.device("cuda"), peers.find(args.impl)
    problem = problems.make_problem(problems.PrefillCase.model_validate(case), where, bench.SEED)
    run = peer.bind(problem).call
    stamp = {"utc": environment.utc_now(), "case": suites.case_name(case), "impl": peer.name, "version": peer.version}
    with torch.no_grad():
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        with torch.cuda.profiler.profile():
            run()
            torch.cuda.synchronize()
    with args.calls.open("a") as out:
        out.write(json.dumps(stamp | {"source": peer.source} | environment.machine(where)) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    commands = parser.add_subparsers(required=True)
    one, two = commands.add_parser("call"), commands.add_parser("table")
    one.add_argument("case", help="of suite kda-prefill, without its gate: H64-8192")
    one.add_argument("impl", help="hopper or flash_kda")
    for page in ("raw", "source", "peer"):
        two.add_argument(page, type=Path)
    two.add_argument("--ncu", required=True, help="the version of Nsight Compute")
    two.add_argument("--out", type=Path, required=True, help="records are appended")
    for command, act in ((one, call), (two, table)):
        command.add_argument("--calls", type=Path, required=True, help="what the calls say of themselves")
        command.set_defaults(act=act)
    options = parser.parse_args()
    options.act(options)
