"""Candidates of `kda`: the implementations as shipped, their configurations by name, and files of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kda2 import device
from kda2.dispatch import registered
from kda2.errors import InvalidValue
from kda2.workbench.capture import Capture
from kda2.workbench.profiler.environment import source_hash
from kda2.workbench.records import Candidate
from kda2.workbench.verifier.code import WITH_KERNELS, meta_call, served_on
from kda2.workbench.verifier.subject import FILE, Subject

TRITON = "triton"
WRITER = "kda2"
Configs = Mapping[str, Mapping[str, int]]


def shipped(capture: Capture) -> list[Candidate]:
    """Every registered implementation of `kda` that can be judged on the captured call here, as users get it."""
    gpus = device.gpus()
    where, arch = ("cuda", gpus[0].arch) if gpus else ("cpu", 0)
    found = []
    for name in (i.name for i in registered("kda")):
        if (name in WITH_KERNELS and find_spec("triton") is None) or not served_on(name, capture, where, arch).ok:
            continue
        parameters = shipped_configs(capture) if name == TRITON else {}
        source = source_hash("kda", name)
        found.append(Candidate(name=name, op="kda", impl=name, writer=WRITER, source=source, parameters=parameters))
    return found


def shipped_configs(capture: Capture) -> dict[str, dict[str, int]]:
    """The configurations that the Triton kernels take for a call, from their table, tiles no larger than its channels:
    the launches would cut them down to that."""
    from kda2.ops.kda import triton

    key, bounds = tuning_key(capture), design_space(capture)
    return {
        stage: {field: min(value, max(bounds[stage][field])) for field, value in config.as_dict().items()}
        for stage, config in triton.default_configs(key).items()
    }


def tuning_key(capture: Capture) -> dict[str, Any]:
    """The key under which the tables keep a configuration for this call."""
    from kda2.ops.kda import triton

    return triton.key_of(meta_call(capture))


def design_space(capture: Capture) -> dict[str, dict[str, tuple[int, ...]]]:
    """What the Triton kernels declare that their stages may be built with, for this call."""
    from kda2.ops.kda import triton

    return triton.space(tuning_key(capture))


def of_file(path: Path, stage: str | None = None, op: str = "kda") -> Candidate:
    """A file of one's own as a candidate, known by its file name; `stage` if it computes one stage only."""
    subject = Subject.of_file(path)
    parameters = {"file": subject.file} | ({} if stage is None else {"stage": stage})
    return Candidate(name=path.name, op=op, impl=FILE, writer="file", source=subject.sha256, parameters=parameters)


def subject_of(candidate: Candidate) -> Subject:
    """What the verifier judges."""
    if candidate.impl == FILE:
        p = candidate.parameters
        return Subject(FILE, file=p["file"], sha256=candidate.source, stage=p.get("stage"), op=candidate.op)
    return Subject(candidate.impl, configs=candidate.parameters or None, op=candidate.op)


def changes(base: Configs, configs: Configs) -> str:
    """What differs, e.g. "prepare BK=64, state BV=16 num_stages=2"."""
    by_stage = {
        stage: " ".join(f"{name}={value}" for name, value in config.items() if base[stage].get(name) != value)
        for stage, config in configs.items()
    }
    return ", ".join(f"{stage} {values}" for stage, values in by_stage.items() if values)


def with_value(configs: Configs, stage: str, field: str, value: int) -> dict[str, dict[str, int]]:
    """The configurations with one field changed."""
    return {s: {**c, field: value} if s == stage else dict(c) for s, c in configs.items()}


def check_distinct(kernels: tuple[Path, ...]) -> None:
    """Refuse two files of one name, and one that is not told apart from an implementation: names are what candidates
    are known by."""
    names = [path.name for path in kernels]
    if odd := [name for name in names if not name.endswith(".py")]:
        raise InvalidValue("--kernel", "a Python file, whose name ends in .py", odd[0])
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidValue("--kernel", "files of different names", f"{twice[0]} twice", "rename one of them")
