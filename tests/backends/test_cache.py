"""The fallback for a kernel cache that cannot be written. None of it relies on permissions, which root ignores."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kda2.backends.triton import Launch, cache
from kda2.backends.triton.build import build
from kda2.contract import KernelConfig


@triton.jit
def _copy(p_x, p_y, N: tl.constexpr):
    o_i = tl.arange(0, N)
    tl.store(p_y + o_i, tl.load(p_x + o_i))


def copy_launch() -> Launch:
    x = torch.empty(64, device="meta")
    return Launch("copy", _copy, 1, {"p_x": x, "p_y": x, "N": 64}, KernelConfig(1, 1))


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not used the cache yet; Triton's own setting comes back afterwards."""
    monkeypatch.setattr(cache, "_checked", False)
    monkeypatch.setattr(cache, "_fallback", None)
    with triton.knobs.cache.scope():
        yield


def use(folder: Path) -> None:
    triton.knobs.cache.dir = str(folder)


@pytest.mark.usefixtures("unchecked")
def test_a_writable_folder_is_kept(tmp_path: Path) -> None:
    use(tmp_path / "new" / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.ensure_writable()
    assert triton.knobs.cache.dir == str(tmp_path / "new" / "cache")
    assert list((tmp_path / "new" / "cache").iterdir()) == []


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/self", "/dev/null/cache"])
def test_another_folder_takes_over(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    places = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "cache"}
    folder = places.get(place, Path(place))
    use(folder)
    with pytest.warns(RuntimeWarning, match=str(folder)):
        cache.ensure_writable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.ensure_writable()
    fallback = Path(triton.knobs.cache.dir)
    assert fallback != folder
    assert fallback.stat().st_mode & 0o777 == 0o700
    assert build(copy_launch(), 90).cubin
    assert any(fallback.rglob("*.cubin"))


@pytest.mark.usefixtures("unchecked")
def test_kernels_of_a_read_only_cache_stay_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path)
    build(copy_launch(), 90)
    entries = sorted(entry.name for entry in tmp_path.iterdir())
    monkeypatch.setattr(cache, "_checked", False)
    monkeypatch.setattr(cache, "_write_problem", lambda folder: OSError("read-only file system"))
    with pytest.warns(RuntimeWarning, match="read-only file system"):
        build(copy_launch(), 90)
    assert sorted(entry.name for entry in Path(triton.knobs.cache.dir).iterdir()) == entries


def test_the_fallback_goes_when_the_process_ends() -> None:
    code = (
        "import triton; from kda2.backends.triton import cache; cache.ensure_writable(); print(triton.knobs.cache.dir)"
    )
    environment = {**os.environ, "TRITON_CACHE_DIR": "/dev/null/cache"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("kda2-triton-")
    assert not folder.exists()
    assert "RuntimeWarning: Triton's cache folder /dev/null/cache cannot be written" in done.stderr
