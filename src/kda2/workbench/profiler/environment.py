"""What a record must know about the machine and the code it was made on."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import operator
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch

import kda2
from kda2 import device

PACKAGE = Path(kda2.__file__).parent
# What nvidia-smi is asked while a run is timed, and how often.
_STATE = "clocks.mem,clocks_event_reasons.active,temperature.gpu,power.draw"
_STATE_EVERY_MS = 200
# The bits of clocks_event_reasons that hold clocks down (NVML, nvmlClocksEventReasons).
_SLOWED_BY = {
    0x04: "power cap", 0x08: "hardware slowdown", 0x20: "temperature, by software", 0x40: "temperature, by hardware",
    0x80: "power brake",
}  # fmt: skip
# Implementations that are hashed by themselves, and where their sources lie.
_APART = {"hopper": ("hopper/", "gluon/", "kda/hopper.json")}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def utc_now() -> str:
    """Now, in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_run() -> str:
    """A name for one run: its start and four random bytes."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


def machine(where: torch.device) -> dict[str, Any]:
    """The fields of a record that name device, driver and versions."""
    return {
        "device": device.gpu(where.index or 0).name if where.type == "cuda" else "cpu",
        "driver": driver() if where.type == "cuda" else None,
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "commit": commit(),
    }


def package_version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def driver() -> str | None:
    """The NVIDIA driver's version, or None where there is none."""
    if tool := shutil.which("nvidia-smi"):
        out = _output(tool, "--query-gpu=driver_version", "--format=csv,noheader")
        if out:
            return out.splitlines()[0].strip()
    version = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d{3}\.\d+(\.\d+)?", version.read_text()) if version.exists() else None
    return found[0] if found else None


@contextlib.contextmanager
def watched(where: torch.device) -> Iterator[dict[str, Any]]:
    """What the driver says of a GPU's state while the block runs, complete once it has ended: `mem_mhz` (lowest),
    `slowed_by` (every reason seen), `temperature_c` and `power_w` (highest). What it does not say is absent, and so is
    all of it on the CPU, without nvidia-smi, and of a block that is over before the first answer."""
    found: dict[str, Any] = {}
    tool = shutil.which("nvidia-smi") if where.type == "cuda" else None
    if tool is None:
        yield found
        return
    which = f"--id=GPU-{torch.cuda.get_device_properties(where).uuid}"
    asked = [tool, which, f"--query-gpu={_STATE}", "--format=csv,noheader,nounits", f"--loop-ms={_STATE_EVERY_MS}"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(asked, stdout=log, stderr=subprocess.DEVNULL)
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
        log.seek(0)
        found.update(state(log.read().splitlines()))


def state(lines: Iterable[str]) -> dict[str, Any]:
    """The answers of nvidia-smi to `watched`, summed up; lines and numbers that are none are passed over."""
    rows = [cells for line in lines if len(cells := [cell.strip() for cell in line.split(",")]) == 4]
    mem, reasons, temperature, power = ([x for row in rows if (x := _number(row[i])) is not None] for i in range(4))
    bits = functools.reduce(operator.or_, map(int, reasons), 0)
    found: dict[str, Any] = {}
    if mem:
        found["mem_mhz"] = min(mem)
    if reasons:
        found["slowed_by"] = [name for bit, name in _SLOWED_BY.items() if bits & bit]
    if temperature:
        found["temperature_c"] = max(temperature)
    if power:
        found["power_w"] = max(power)
    return found


def _number(text: str) -> float | None:
    try:
        return float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None


@functools.cache
def commit() -> str | None:
    """The commit of the checkout kda2 is imported from, "-dirty" appended if its sources differ; outside one what
    KDA2_COMMIT says, for copies made without their history, or None."""
    if named := os.environ.get("KDA2_COMMIT"):
        return named
    git = shutil.which("git")
    root = checkout()
    if git is None or root is None:
        return None
    head = _output(git, "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    return f"{head}-dirty" if _output(git, "-C", str(root), "status", "--porcelain", "--", "src") else head


def checkout() -> Path | None:
    """The root of the source checkout kda2 runs from, or None for an installed package."""
    root = PACKAGE.parent.parent
    return root if (root / "benchmarks").is_dir() and root / "src" / "kda2" == PACKAGE else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def file_hash(path: Path) -> str:
    """SHA-256 of a file's contents."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ops() -> list[str]:
    """The ops that have sources of their own."""
    return [x.name for x in _folders(resources.files("kda2") / "ops") if (x / "spec.py").is_file()]


@functools.cache
def source_hash(op: str, impl: str | None = None) -> str:
    """SHA-256 over the kernel sources of an implementation of `op` and its tuned table, comments and docstrings left
    out; None for those of all implementations.

    Kernel sources are the implementations' folders `ops/<op>/<implementation>/`, `ops/common/` and `backends/gluon/`.
    `hopper` is hashed by itself, the others together: `torch` and `triton` are the same stages.
    """
    home = resources.files("kda2")
    folders = [*_folders(home / "ops" / op), home / "ops" / "common", home / "tables" / op, home / "backends" / "gluon"]
    part = impl if impl in _APART else None
    digest = hashlib.sha256()
    for name, text in (file for folder in folders for file in _files(folder, folder.name)):
        if impl is None or _part(name) == part:
            digest.update(f"{name}\0{bare_source(text) if name.endswith('.py') else text}\0".encode())
    return digest.hexdigest()


def _part(name: str) -> str | None:
    """The implementation that a source belongs to alone."""
    return next((impl for impl, places in _APART.items() if name.startswith(places)), None)


def _folders(folder: Traversable) -> list[Traversable]:
    found = [x for x in folder.iterdir() if x.is_dir() and x.name != "__pycache__"]
    return sorted(found, key=lambda x: x.name)


def _files(folder: Traversable, prefix: str) -> list[tuple[str, str]]:
    """(path, text) of the sources under `folder`, in order of path; nothing if there is no such folder."""
    if not folder.is_dir():
        return []
    inside = [f for x in _folders(folder) for f in _files(x, f"{prefix}/{x.name}")]
    here = [x for x in folder.iterdir() if x.name.endswith((".py", ".json", ".cu", ".cuh"))]
    return sorted(inside + [(f"{prefix}/{x.name}", x.read_text(encoding="utf-8")) for x in here])


def bare_source(text: str) -> str:
    """Python source in a normal form without comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)
