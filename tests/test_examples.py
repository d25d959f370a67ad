"""The kernels to start from pass the verifier: those in examples/kernels, and the file that docs/kernels.md prints.

What no probe family asks for is asked for here too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kda2.cli.app import app
from kda2.testing import FAMILIES, Problem, verify
from kda2.testing.oracle import Outputs
from kda2.workbench.verifier.foreign import Kernel
from kda2.workbench.verifier.questions import AGAIN, OTHER_DTYPES, call_inputs

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "examples" / "kernels"
RECURRENT, STATE = KERNELS / "recurrent_triton.py", KERNELS / "state_torch.py"
FEW = ("--families", "^random$|reset_softplus|neg_eigval|all_empty", "--problem", "T=9")


def judged(folder: Path, file: Path, *arguments: str) -> dict[str, Any]:
    """What `kda2 verify --json` prints, its exit code with it."""
    words = ["verify", str(file), "--json", "--out", str(folder / "verified"), "--seed", "7", "--timeout", "600"]
    result = CliRunner().invoke(app, [*words, *arguments])
    return {**json.loads(result.stdout), "exit": result.exit_code}


def assert_correct(found: dict[str, Any]) -> None:
    wrong = {stage: says for stage, says in found["reasons"].items() if found["verdicts"][stage] in ("fail", "invalid")}
    assert (found["exit"], found["correct"], wrong) == (0, True, {})
    assert found["verdicts"][numerics_of(found)] == "pass"


def numerics_of(found: dict[str, Any]) -> str:
    """The stage that judged the numbers here."""
    return "L3" if found["verdicts"]["L4"].startswith("not_run") else "L4"


def answered(found: dict[str, Any]) -> list[str]:
    """The probes that the numerics of a ledger have answered."""
    lines = [json.loads(line) for line in Path(found["ledger"]).read_text().splitlines()]
    verdicts = [line["payload"]["verdict"] for line in lines if line["kind"] == "verdict"]
    return [name for v in verdicts if v["stage"] in ("L3", "L4") for name in v["evidence"].get("families", {})]


def loaded(file: Path) -> Callable[..., Outputs]:
    kernel = Kernel.load(file, hashlib.sha256(file.read_bytes()).hexdigest())

    def call(**kwargs: Any) -> Outputs:
        answer = kernel.run(**call_inputs(kwargs))
        return answer["o"], answer["final_state"] if kwargs["output_final_state"] else None

    return call


@pytest.fixture
def printed(tmp_path: Path) -> Path:
    """The file that the page prints."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "kernels.md").read_text(), re.M | re.S)
    file = tmp_path / "printed.py"
    file.write_text(code)
    return file


def test_the_triton_kernel_passes(tmp_path: Path) -> None:
    found = judged(tmp_path, RECURRENT, *FEW)
    assert_correct(found)
    assert [found["verdicts"][stage] for stage in ("L0", "L1", "L2")] == ["pass"] * 3
    asked = ["random", *AGAIN, "reset_softplus", "repeated_keys_neg_eigval", "all_empty", *OTHER_DTYPES]
    assert answered(found) == asked


def test_the_stage_kernel_passes(tmp_path: Path) -> None:
    assert_correct(judged(tmp_path, STATE, "--stage", "state", *FEW))


def test_a_slip_in_the_triton_kernel_is_refused_by_name(tmp_path: Path) -> None:
    """The one that docs/kernels.md shows."""
    source, line = RECURRENT.read_text(), "i_h = i_hv // (HV // H)"
    assert source.count(line) == 1
    file = tmp_path / "heads.py"
    file.write_text(source.replace(line, "i_h = i_hv % H"))
    found = judged(tmp_path, file, "--families", "^random$", "--problem", "T=9,H=2,HV=4")
    stage = numerics_of(found)
    assert (found["exit"], found["correct"], found["verdicts"][stage]) == (1, False, "fail")
    says = "It computes KDA with q and k of head h % H in value head h, instead of h // (HV / H)"
    assert says in " ".join(found["reasons"][stage])


# What no family varies.
UNUSUAL = {
    "vk": Problem(T=9, H=1, HV=2, K=20, V=24, layout="vk"),
    "no state": Problem(T=9, state=None),
    "no bias": Problem(T=9, gate="softplus", dt_bias=False),
    "scale": Problem(T=9, scale=0.25),
    "16-bit state": Problem(T=9, K=16, state=torch.bfloat16),
    "int32 offsets": Problem(lengths=(3, 0, 5), offsets_dtype=torch.int32),
    "fp32 gates": Problem(T=9, g_dtype=torch.float32, beta_dtype=torch.float32),
    "dense batch": Problem(B=3, T=7),
    "fused rows": Problem(T=9, strides="fused"),
    "few channels": Problem(T=5, K=1, V=3),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("problem", UNUSUAL.values(), ids=UNUSUAL)
def test_the_triton_kernel_serves_every_option(problem: Problem) -> None:
    verdict = verify(loaded(RECURRENT), "random", problem)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("problem", UNUSUAL.values(), ids=UNUSUAL)
def test_the_printed_file_serves_every_option(printed: Path, problem: Problem) -> None:
    verdict = verify(loaded(printed), "random", problem)
    assert verdict.ok, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["HV=2", "dtype=fp32,K=40,V=24", "dtype=fp16,K=72,V=20,T=20,H=1,HV=2"])
def test_the_triton_kernel_passes_every_family(sizes: str, tmp_path: Path) -> None:
    found = judged(tmp_path, RECURRENT, "--problem", sizes)
    assert_correct(found)
    assert [name for name in answered(found) if name in FAMILIES] == list(FAMILIES)


@pytest.mark.slow
def test_the_stage_kernel_passes_every_family(tmp_path: Path) -> None:
    found = judged(tmp_path, STATE, "--stage", "state")
    assert_correct(found)
    assert [name for name in answered(found) if name in FAMILIES] == list(FAMILIES)


@pytest.mark.slow
def test_the_printed_file_passes_every_family(printed: Path, tmp_path: Path) -> None:
    assert_correct(judged(tmp_path, printed))
