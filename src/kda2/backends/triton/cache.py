"""A place for Triton's compiled kernels, also where its cache folder cannot be written."""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from pathlib import Path

import triton

_lock = threading.Lock()
_checked = False
# Keeps the fallback folder until the process ends.
_fallback: tempfile.TemporaryDirectory[str] | None = None


def ensure_writable() -> None:
    """Point Triton at a private temporary folder if its cache folder cannot be written. Looks once per process.

    The kernels that a read-only cache already holds stay in use; new ones live as long as the process.
    """
    global _checked, _fallback
    if _checked:
        return
    with _lock:
        if _checked:
            return
        folder = Path(triton.knobs.cache.dir)
        problem = _write_problem(folder)
        if problem is not None:
            _fallback = tempfile.TemporaryDirectory(prefix="kda2-triton-", ignore_cleanup_errors=True)
            _link_entries(folder, Path(_fallback.name))
            triton.knobs.cache.dir = _fallback.name
            warnings.warn(
                f"Triton's cache folder {folder} cannot be written ({problem}): kernels compiled by this process are "
                "kept until it ends. Set TRITON_CACHE_DIR to a writable folder to keep them.",
                RuntimeWarning,
                stacklevel=3,
            )
        _checked = True


def _write_problem(folder: Path) -> OSError | None:
    """Why a kernel could not be stored below `folder`, or None if it could."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="kda2-probe-", dir=folder) as entry:
            probe = Path(entry, "probe")
            probe.write_bytes(bytes(4096))
            os.replace(probe, Path(entry, "probe.done"))
    except OSError as e:
        return e
    return None


def _link_entries(source: Path, target: Path) -> None:
    """Make every entry of cache `source` readable through `target`."""
    try:
        entries = [entry for entry in source.iterdir() if entry.is_dir()]
    except OSError:
        return
    for entry in entries:
        (target / entry.name).symlink_to(entry.resolve(), target_is_directory=True)
