"""L5: a few small probes under NVIDIA's compute-sanitizer, which sees accesses that NaN and guard bands do not."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kda2.workbench.records import Verdict
from kda2.workbench.verifier.code import not_run
from kda2.workbench.verifier.conditions import Conditions
from kda2.workbench.verifier.numerics import Interview
from kda2.workbench.verifier.process import Child, Children, Ended, NotStarted, elapsed
from kda2.workbench.verifier.subject import Subject

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# What is checked by default. The others take a kernel's own word for much (racecheck calls waits on barriers races in
# versions before 2025.4), so they are asked for.
USUAL = ("memcheck",)
PROBES = ("random", "ragged")
# Every access is followed: a tenth of the tokens is as much as one minute allows.
TOKENS = 70
_SHOWN = 3
_LONGEST_S = 300.0
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (?P<errors>\d+) error|RACECHECK SUMMARY: (?P<hazards>\d+) hazard)")
_LINE = re.compile(r"^=========[ \t]?(?P<words>.*)$", re.MULTILINE)
_UNABLE = ("Device not supported", "Unable to find", "not supported on this", "No attachable process", "libcuda")


def find() -> str | None:
    """The program, from the path or beside CUDA."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    places = [os.path.join(home, "bin") for home in homes if home]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def check(children: Children, subject: Subject, on: Conditions, tools: Sequence[str] = USUAL) -> Verdict:
    """L5 of a subject on a GPU."""
    program, start = find(), time.perf_counter()
    if program is None:
        fix = "compute-sanitizer is not here; it comes with CUDA, put it on PATH"
        return not_run(("L5",), fix)[0]
    sizes = {**on.sizes, "T": min(int(on.sizes.get("T", TOKENS)), TOKENS)} if "T" in on.sizes else on.sizes
    small = replace(on, sizes=sizes, capture=None, limits=replace(on.limits, silence_s=_LONGEST_S))
    probes = tuple(name for name in PROBES if name in on.families) or on.families[:1]
    found = {tool: _run(children, subject, small, probes, program, tool) for tool in tools}
    evidence: dict[str, Any] = {"probes": list(probes), "tools": found}
    if wrong := [f"{tool}: {x['says']}" for tool, x in found.items() if x["errors"]]:
        evidence |= {"ended": wrong[0], "gate": "memory"}
        return Verdict(stage="L5", outcome="fail", evidence=evidence, seconds=elapsed(start))
    if unclear := [f"{tool}: {x['says']}" for tool, x in found.items() if x["errors"] is None]:
        unable = any(words in unclear[0] for words in _UNABLE)
        if unable:
            return not_run(("L5",), unclear[0])[0]
        return Verdict(
            stage="L5", outcome="inconclusive", evidence=evidence | {"ended": unclear[0]}, seconds=elapsed(start)
        )
    return Verdict(stage="L5", outcome="pass", evidence=evidence, seconds=elapsed(start))


def _run(
    children: Children, subject: Subject, on: Conditions, probes: Sequence[str], program: str, tool: str
) -> dict[str, Any]:
    """{"errors": how many, None if that is not known, "says": the first of them}."""
    with tempfile.TemporaryDirectory(prefix="kda2-") as folder:
        log = Path(folder, "log")
        under = (program, "--tool", tool, "--log-file", str(log), "--print-limit", "20")
        # every tensor is an allocation of its own, so that its end is an end
        alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        child, says = Child(children, limits=on.limits, under=under, environment=alone), ""
        try:
            for _, result in Interview(child, subject, on).ask(probes):
                if "ended" in result:
                    says = str(result["says"])
        except (Ended, NotStarted) as e:
            says = str(e)
        finally:
            child.finish(60.0)
        report = log.read_text(errors="replace") if log.exists() else ""
    return _read(report, says)


def _read(report: str, says: str) -> dict[str, Any]:
    counts = [int(m["errors"] or m["hazards"] or 0) for m in _SUMMARY.finditer(report)]
    lines = list(_reports(report))
    if not counts or (says and not sum(counts)):  # nothing was found in what did not run
        told = " ".join([*([says] if says else []), *lines[:_SHOWN]])
        return {"errors": None, "says": told or "it wrote no summary", "reports": lines}
    return {"errors": sum(counts), "says": " ".join(lines[:1]) or says, "reports": lines[:_SHOWN]}


def _reports(report: str) -> Iterator[str]:
    """Each report as one line: what was wrong, and where."""
    block: list[str] = []
    for match in _LINE.finditer(report):
        words = match["words"].strip()
        if words and not words.startswith(("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY")):
            block.append(words)
        elif block:
            yield "; ".join(block[:4])
            block = []
    if block:
        yield "; ".join(block[:4])
