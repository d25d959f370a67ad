"""L7: the kernels of one call under Nsight Compute, and what their counters say."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kda2.errors import InvalidValue, MissingExtra
from kda2.workbench.profiler.ncu.drive import ProfilingFailed, find_ncu
from kda2.workbench.profiler.ncu.evidence import evidence as counted
from kda2.workbench.profiler.ncu.read import read_report
from kda2.workbench.profiler.ncu.report_file import load_module
from kda2.workbench.records import Verdict
from kda2.workbench.verifier.code import not_run
from kda2.workbench.verifier.conditions import Conditions
from kda2.workbench.verifier.numerics import Interview
from kda2.workbench.verifier.process import Child, Children, Ended, NotStarted, elapsed
from kda2.workbench.verifier.questions import first_probe
from kda2.workbench.verifier.subject import Subject

# Every kernel is run some forty times over, once for each set of counters.
_LONGEST_S = 300.0
MOST_LAUNCHES = 24


def profile(children: Children, subject: Subject, on: Conditions) -> Verdict:
    """L7 of a subject on a GPU: it passes if its kernels could be counted; what they say is evidence, no verdict."""
    start = time.perf_counter()
    try:
        ncu, _ = find_ncu(), load_module()
    except (ProfilingFailed, MissingExtra) as e:
        return not_run(("L7",), str(e))[0]
    with tempfile.TemporaryDirectory(prefix="kda2-") as folder:
        file = Path(folder, "profile.ncu-rep")
        under = (
            ncu, "--clock-control", "none", "--set", "full", "--import-source", "yes", "--profile-from-start", "off",
            "--launch-count", str(MOST_LAUNCHES), "--log-file", str(Path(folder, "log")), "--force-overwrite",
            "--export", str(file.with_suffix("")),
        )  # fmt: skip
        on = replace(on, limits=replace(on.limits, silence_s=_LONGEST_S))
        says = _called(Child(children, limits=on.limits, under=under), subject, on)
        try:
            found = counted(read_report(file))
        except (InvalidValue, OSError) as e:
            why = "; ".join(filter(None, (says, _last_line(Path(folder, "log"))))) or str(e)
            return not_run(("L7",), f"no counters: {why}")[0]
    return Verdict(stage="L7", outcome="pass", evidence=found, seconds=elapsed(start))


def _called(child: Child, subject: Subject, on: Conditions) -> str:
    """Ask for one call whose kernels are counted; how that ended, "" if well."""
    says = ""
    try:
        result: dict[str, Any] = dict(Interview(child, subject, on, counted=True).ask([first_probe(on, subject)]))
        says = next((str(r.get("says", "")) for r in result.values() if "ended" in r), "")
    except (Ended, NotStarted) as e:
        says = str(e)
    finally:
        child.finish(120.0)
    return says


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].strip() if lines else ""
