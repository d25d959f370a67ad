"""Print the best time of each stage in each version of the kernels, from timings.jsonl beside this file."""

from __future__ import annotations

import json
from pathlib import Path

STAGES = ("prepare", "state", "output")


def table() -> str:
    """A Markdown table: one row a version, gate and head count; microseconds, medians."""
    best: dict[tuple[str, str, int], dict[str, int]] = {}
    for line in Path(__file__).with_name("timings.jsonl").read_text().splitlines():
        row = json.loads(line)
        stages = best.setdefault((row["version"], row["gate"], row["heads"]), {})
        stages[row["stage"]] = min(stages.get(row["stage"], row["median_us"]), row["median_us"])
    lines = ["| version | gate | H | prepare | state | output |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for (version, gate, heads), stages in best.items():
        times = " | ".join(str(stages.get(stage, "")) for stage in STAGES)
        lines.append(f"| {version} | {gate} | {heads} | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
