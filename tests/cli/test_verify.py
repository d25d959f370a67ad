"""`kda2 verify` as a user meets it: one verdict, exit codes, one JSON document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kda2
from kda2 import device
from kda2.cli.app import app
from kda2.contract import OpSpec, TensorSpec

KERNELS = Path(__file__).parents[1] / "workbench" / "verifier" / "kernels"
SMALL = ("--problem", "T=9,H=1,HV=2,K=8,V=8", "--families", "^random$", "--timeout", "60")
Verify = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def verify(tmp_path: Path) -> Verify:
    """`kda2 verify` in a folder of its own, which lies on no path."""
    env = {**os.environ, "PYTHONPATH": str(Path(kda2.__file__).parents[1])}

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "kda2.cli", "verify", *args]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)

    return call


def write(folder: Path, name: str, *pairs: str) -> str:
    text = (KERNELS / "plain.py").read_text()
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    (folder / name).write_text(text)
    return name


def test_a_right_kernel_passes_under_an_awkward_name(verify: Verify, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise ImportError('not this one')\n")
    done = verify(write(tmp_path, "torch.py"), *SMALL, "--out", "here", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert (told["name"], told["verdict"], told["correct"]) == ("torch.py", "correct on every probe", True)
    assert told["verdicts"]["L0"] == told["verdicts"]["L3"] == "pass"
    assert told["verdicts"]["L1"] == "not_run(it launches no Triton kernel)"
    assert told["verdicts"]["L4"] == "not_run(no CUDA device)" and told["latency_us"] is None
    assert (tmp_path / told["ledger"]).is_file()


def test_a_wrong_kernel_is_refused_with_its_reason(verify: Verify, tmp_path: Path) -> None:
    done = verify(write(tmp_path, "a b.py", "scale * (S", "(S", "final_state", "final_state"), *SMALL)
    assert done.returncode == 1
    assert "L3 numerics on the CPU              fail" in done.stdout
    assert "\nL3 random: o is off: relative L2 " in done.stdout and "the scale K^-0.5 is missing." in done.stdout
    assert "\na b.py: refused\n" in done.stdout and done.stderr == ""


def test_json_holds_every_reason_and_nothing_else(verify: Verify, tmp_path: Path) -> None:
    loud = "    print('loud')\n    raise ValueError('no')\n    (B, T, H, K)"
    done = verify(write(tmp_path, "loud.py", "    (B, T, H, K)", loud), *SMALL, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert told["verdict"] == "refused" and not told["correct"]
    assert told["reasons"]["L3"] == ["random: it raised ValueError: no (loud.py, line 13 in run)"]
    assert told["reasons"]["L4"] == ["no CUDA device"]


def test_a_refusal_exits_with_1(verify: Verify, tmp_path: Path) -> None:
    name = write(tmp_path, "part.py", "    (B, T, H, K)", "    raise NotImplementedError('K = 8')\n    (B, T, H, K)")
    done = verify(name, *SMALL)
    assert done.returncode == 1
    assert "part.py: inconclusive: it refuses some of the probes" in done.stdout
    assert "L3 random: it refuses this call: NotImplementedError: K = 8 (part.py, line 12 in run)" in done.stdout


def test_a_stage_kernel_is_judged_alone(verify: Verify, tmp_path: Path) -> None:
    text = (KERNELS / "stages.py").read_text().replace("def solve(", "def run(").replace("def prepare(", "def both(")
    (tmp_path / "solve.py").write_text(text)
    done = verify("solve.py", "--stage", "solve", *SMALL, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["verdict"] == "correct on every probe"


def test_what_no_interpreter_runs_is_not_judged_without_a_gpu(verify: Verify) -> None:
    if device.gpus():
        pytest.skip("it is judged on the GPU")
    told = json.loads(verify("hopper", "--families", "^random$", "--json").stdout)
    assert told["verdict"] == "not judged: none of its numerics could run here"
    assert told["verdicts"]["L3"] == "not_run(no interpreter runs Gluon kernels)"
    assert (told["sizes"]["K"], told["sizes"]["V"]) == (64, 64)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["absent.py"], "FILE must be a Python file that can be read, got absent.py: No such file or directory"),
        (["folder.py"], "FILE must be a Python file that can be read, got folder.py: Is a directory"),
        (["kernel.cu"], "FILE must be a Python file, or one of hopper, triton, torch, reference, got 'kernel.cu'"),
        (["plain.py", "--stage", "x"], "--stage must be one of prepare, factors, solve, state, output, got 'x'"),
        (["torch", "--stage", "state"], "--stage must be given with a file, got 'torch'"),
        (["plain.py", "--problem", "T=0"], "--problem must be T, B, H, HV, K or V with a number above 0, or dtype"),
        (["hopper", "--problem", "V=100"], "--problem must be K and V that hopper serves, got K=64,V=100"),
        (["plain.py", "--problem", "H=2,HV=3"], "--problem must be HV a multiple of H, got H=2,HV=3"),
        (["plain.py", "--families", "^nothing$"], "--families must be an expression that finds one of random, "),
        (["plain.py", "--families", "("], "--families must be a regular expression, got '('"),
        (["plain.py", "--target", "sm_1"], "--target must be one of sm_80, "),
        (["plain.py", "--spec", "gla"], "--spec must be kda, kda_step or a contract's file, got gla: "),
        (["plain.py", "--inputs", "absent.safetensors"], ""),
    ],
)
def test_bad_usage_is_one_line_and_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], says: str
) -> None:
    write(tmp_path, "plain.py")
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["verify", *args, "--json"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kda2: {says}") and done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("runs/verify/*/ledger.jsonl"))


@pytest.mark.parametrize("args", [["plain.py", "--no-such-option"], ["plain.py", "--timeout", "0"], []])
def test_bad_options_are_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str]) -> None:
    write(tmp_path, "plain.py")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["verify", *args])
    assert (done.exit_code, done.stdout) == (2, "")


def test_a_folder_that_holds_a_ledger_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "ledger.jsonl").write_text("{}\n")
    done = CliRunner().invoke(app, ["verify", write(tmp_path, "plain.py"), "--out", "here"])
    assert done.exit_code == 2 and "--out must be a folder without a ledger, got here" in done.stderr
    assert (tmp_path / "here" / "ledger.jsonl").read_text() == "{}\n"


# Other operators.

STEP = ("--spec", "kda_step", "--problem", "B=3,H=1,HV=2,K=8,V=8")


def invoked(*args: str) -> Any:
    return CliRunner().invoke(app, ["verify", *args])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.py").write_text((KERNELS / "step.py").read_text())
    return tmp_path


def test_a_step_kernel_is_judged(here: Path) -> None:
    done = invoked("step.py", *STEP, "--families", "^(random|state_pool|padded_rows)$", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["verdict"] == "correct on every probe" and told["verdicts"]["L0"] == "pass"
    assert told["families"] == ["random", "state_pool", "padded_rows"] and "T" not in told["sizes"]
    assert [line.partition(":")[0] for line in told["margins"]] == ["L3 o", "L3 state"]


def test_a_wrong_step_kernel_is_refused(here: Path) -> None:
    text = (here / "step.py").read_text()
    assert "slot == pad_slot" in text
    (here / "step.py").write_text(text.replace("slot == pad_slot", "False"))
    done = invoked("step.py", *STEP, "--families", "^(random|padded_rows)$")
    assert done.exit_code == 1 and "step.py: refused" in done.stdout
    assert "\nL3 padded_rows: " in done.stdout and "state is off: relative L2 " in done.stdout


def test_arguments_of_another_operator_are_refused_before_anything_runs(here: Path) -> None:
    (here / "plain.py").write_text((KERNELS / "plain.py").read_text())
    told = json.loads(invoked("plain.py", *STEP, "--families", "^random$", "--json").stdout)
    assert told["verdicts"]["L0"] == "fail" and told["verdict"] == "refused"
    assert told["reasons"]["L0"][0].startswith(
        "arguments: run asks for cu_seqlens, initial_state and does not take state, state_indices, pad_slot"
    )


SWIGLU = OpSpec(
    name="swiglu", version=1, source="a gate and what goes through it",
    inputs=(TensorSpec("x", ("N", "2*D"), ("bf16",)),), outputs=(TensorSpec("y", ("N", "D"), ("bf16",)),),
    options={}, oracle="file:run", flops="", bytes="", families=(), tolerances=(),
    reference_source=(
        "import torch\n\ndef run(x):\n    a, b = x.chunk(2, -1)\n    return torch.nn.functional.silu(a) * b\n"
    ),
)  # fmt: skip
OWN = """def run(x):
    a, b = x.float().chunk(2, -1)
    return {"y": (a * a.sigmoid() * b).to(x.dtype)}
"""


@pytest.fixture
def swiglu(here: Path) -> Path:
    (here / "swiglu.json").write_text(SWIGLU.to_json())
    (here / "own.py").write_text(OWN)
    return here


def test_a_contract_from_a_file(swiglu: Path) -> None:
    done = invoked("own.py", "--spec", "swiglu.json", "--problem", "N=5,D=8", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["verdict"] == "correct on every probe" and told["families"] == ["random"]
    assert told["sizes"] == {"N": 5, "D": 8} and told["margins"][0].startswith("L3 y: ")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--problem", "N=5"], "kda2: x's axis D must be an extent, got none; name it: --problem D=64\n"),
        (["--problem", "M=5"], "kda2: --problem must be D, N with a number above 0, got M=5\n"),
        (["--problem", "N=0,D=8"], "kda2: --problem must be D, N with a number above 0, got N=0\n"),
        (
            ["--problem", "N=5,D=8", "--stage", "solve"],
            "kda2: --stage must be absent beside --inputs and",
        ),
    ],
)
def test_sizes_of_a_contract_that_are_bad_usage(swiglu: Path, args: list[str], says: str) -> None:
    done = invoked("own.py", "--spec", "swiglu.json", *args)
    assert done.exit_code == 2 and done.stderr.startswith(says)


def test_an_oracle_that_raises_is_one_line(swiglu: Path) -> None:
    broken = replace(SWIGLU, reference_source="def run(x):\n    raise ValueError('no oracle')\n")
    (swiglu / "broken.json").write_text(broken.to_json())
    done = invoked("own.py", "--spec", "broken.json", "--problem", "N=5,D=8")
    assert done.exit_code == 1
    assert done.stderr.startswith("kda2: the oracle of swiglu does not answer: it raised ValueError: no oracle")
    assert done.stderr.count("\n") == 1
