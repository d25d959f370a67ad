"""What a record must know about the machine and the code it was made on."""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
import secrets
import shutil
import subprocess
from datetime import UTC, datetime
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch

import kda2
from kda2 import device

PACKAGE = Path(kda2.__file__).parent
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
