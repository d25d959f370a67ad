"""The plan as text, picture and generated tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kda2
from kda2.ops.kda.spec import FAMILIES
from kda2.testing import STAGES
from kda2.workbench.blockplan import BlockPlan
from kda2.workbench.planner import Problem, figures, plan, render_html, render_text, unit_tests, write_book

PLAN = plan("kda", "sm_90", Problem())


def test_the_text_has_every_product_and_fits_the_page() -> None:
    text = render_text(PLAN)
    assert max(map(len, text.splitlines())) <= 120
    words = " ".join(text.split())
    for line in (
        "8192 x 64 x 128 x 2 = 134.2 MB",
        "671.1 MB / 4.24 TB/s (measured) = 158.28 us",
        "NT x HV x C x C x K x 2 (Kd Ki^T) = 128 x 64 x 64 x 64 x 128 x 2 = 8.59 Gflop",
        "N x HV x 2 (V in 64-row parts) = 1 x 64 x 2 = 128 CTAs on 132 SMs; one an SM: 1 wave",
        "Block D, stage solve",
        "A = strict_tril(diag(beta) Kd Ki^T)",
        "test_blocks.py::test_state",
        f"contract {PLAN.op} {PLAN.op_hash[:16]}",
    ):
        assert line in words


@pytest.mark.parametrize("text", ["T=1,H=1", "seqlens=5+0", "dtype=fp32,gate=log,state=none", "seqlens=0+0,gate=log"])
def test_every_problem_can_be_written(text: str) -> None:
    made = plan("kda", "sm_86", Problem.parse(text))
    assert "largest gap" in render_text(made) and len(figures(made)) == 3


def test_figures_show_the_plans_floors() -> None:
    drawn = figures(PLAN)
    bars = {bar.name: dict(zip(bar.y, bar.x, strict=True)) for bar in drawn["floors"].data}
    assert bars["memory"]["A factors"] == pytest.approx(222.83, abs=0.01) and list(bars["chain"]) == ["B state"]
    words = " ".join(a.text for a in drawn["blocks"].layout.annotations)
    for name in ("Qd", "Kr", "W", "S", "initial_state", "final_state", "o"):
        assert f"<b>{name}</b>" in words
    assert list(drawn["chunks"].data[0].x) == ["C = 16", "C = 32", "C = 64", "C = 128"]


def test_the_page_stands_alone() -> None:
    page = render_html(PLAN)
    assert page.count("Plotly.newPlot(") == 3 and "128 x 64 x 64 x 128 x 2 = 134.2 MB" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)


def test_the_book_is_written_whole(tmp_path: Path) -> None:
    (tmp_path / "state.py").write_text("mine")
    names = {path.name for path in write_book(PLAN, tmp_path)}
    assert names == {"plan.json", "plan.txt", "plan.html", "test_blocks.py"}
    assert {path.name for path in tmp_path.iterdir()} == names | {"state.py"}
    assert BlockPlan.from_line((tmp_path / "plan.json").read_text()) == PLAN


def test_a_book_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_book(PLAN, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write = Path.write_text

    def full(self: Path, text: str, **options: str) -> int:
        if "test_blocks" in self.name:
            write(self, text[:10], **options)
            raise OSError(28, "No space left on device")
        return write(self, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_book(plan("kda", "sm_90", Problem(H=1)), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("")
    with pytest.raises(kda2.InvalidValue, match="--out must be a folder"):
        write_book(PLAN, tmp_path / "here")


# --- the generated tests ---

RIGHT = """
from kda2.testing.stages import rounding
import torch

def run(**inputs):
    return rounding("state", torch.bfloat16)(**inputs)
"""
WRONG = """
import torch

def run(A, beta, Kd, v):
    Tm = (torch.eye(A.shape[-1]) - A) * beta.float()[:, :, None, :]
    return {"W": (Tm @ Kd.float()).bfloat16(), "U": (Tm @ v.float()).bfloat16()}
"""


def generated(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", "test_blocks.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(kda2.__file__).parent.parent)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


def test_generated_tests_name_every_stage_and_family() -> None:
    source = unit_tests(plan("kda", "sm_90", Problem(C=128, K=256, V=16, gate="softplus", HV=128, state="none")))
    compile(source, "test_blocks.py", "exec")
    assert all(f"def test_{stage}(family)" in source for stage in STAGES)
    assert all(f'"{family}"' in source for family in FAMILIES)
    assert "C = 64\n" in source and 'T=130, H=1, HV=2, K=32, V=16, dtype=torch.bfloat16, gate="softplus"' in source
    assert "state=None" in source and max(map(len, source.splitlines())) <= 120
    named = {name for b in PLAN.blocks for name in b.unit_tests}
    assert "test_blocks.py::test_factors[random]" in named and len(named) == 4 * len(FAMILIES)


def test_generated_tests_pass_right_kernels_and_fail_wrong_ones(tmp_path: Path) -> None:
    (tmp_path / "test_blocks.py").write_text(unit_tests(plan("kda", "sm_90", Problem(C=16))))
    (tmp_path / "state.py").write_text(RIGHT)
    (tmp_path / "solve.py").write_text(WRONG)
    out = generated(tmp_path, "-k", "(random or repeated_keys) and not random_depth and not neg")
    assert "2 failed, 2 passed, 6 skipped" in out, out
    assert "[repeated_keys] W is off" in out and "no prepare.py beside this file: write run(q, k, v, g, beta)" in out
