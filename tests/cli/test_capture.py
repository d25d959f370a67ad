"""`kda2 capture`, and `kda2 bench` on what it kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kda2.cli.bench import bench
from kda2.cli.capture import capture
from kda2.testing import Problem, make
from kda2.workbench.capture import Capture

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(bench)
app.command()(capture)
runner = CliRunner()
COMMAND = [sys.executable, "-B", "-c", "from kda2.cli.capture import capture; import typer; typer.run(capture)"]
MODEL = """
import sys, time, torch, kda2
torch.manual_seed(0)
x = torch.randn(1, 5, 2, 4)
kda2.kda(x, x, x, torch.full_like(x, -0.25), x[..., 0], qk_l2norm=True, beta_sigmoid=True, impl="torch")
print("called", flush=True)
time.sleep(float(sys.argv[1]))
"""
BENCH = ["--device", "cpu", "--samples", "2"]


@pytest.fixture
def call(tmp_path: Path) -> Path:
    path = tmp_path / "call.safetensors"
    Capture(make(Problem(T=6, H=1, HV=1, K=8, V=8))).save(path)
    return path


def test_what_was_kept_is_told_on_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [str(tmp_path / "out"), "--limit", "1", "--", sys.executable, "-c", MODEL, "0"]
    result = runner.invoke(app, ["capture", *words])
    (file,) = (tmp_path / "out").iterdir()
    assert (result.exit_code, result.stdout, capfd.readouterr().out) == (0, "", "called\n")
    row = next(line for line in result.stderr.splitlines() if file.name in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        file.name, "kda2.kda", "B1 T5 H2 K4 V4", "float32", "log", "2.77 tokens",
    ]  # fmt: skip
    assert f"next: kda2 run kda --inputs {file}" in result.stderr.splitlines()


def test_json_is_all_there_is_on_stdout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [sys.executable, "-c", f"{MODEL}\nsys.exit(3)", "0"]
    result = runner.invoke(app, ["capture", str(tmp_path / "out"), "--json", "--", *words])
    found, printed = json.loads(result.stdout), capfd.readouterr()
    assert (result.exit_code, result.stderr, printed.out, printed.err) == (3, "", "", "called\n")
    assert (found["status"], found["skipped"], found["trouble"]) == (3, [], [])
    (file,) = found["files"]
    assert (file["function"], file["tokens"], file["heads"], file["gate"]) == ("kda2.kda", 5, 2, "log")
    assert file["half_life_tokens"] == pytest.approx(2.7726, abs=1e-4)
    assert Path(file["file"]).is_file()


def test_what_was_kept_stays_when_it_is_stopped(tmp_path: Path) -> None:
    words = [*COMMAND, str(tmp_path / "out"), "--", sys.executable, "-c", MODEL, "60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stdout.readline() == "called\n"
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=30)
    (file,) = (tmp_path / "out").iterdir()
    assert running.returncode == 130
    assert f"next: kda2 run kda --inputs {file}" in told
    assert Capture.load(file).kwargs["q"].shape == (1, 5, 2, 4)


def test_nothing_captured_is_a_failure_that_says_why(tmp_path: Path) -> None:
    result = runner.invoke(app, ["capture", str(tmp_path / "out"), "--", sys.executable, "-c", "pass"])
    assert result.exit_code == 1
    assert result.stderr == "kda2: nothing was captured: no process imported kda2.kda or fla.ops.kda\n"
    result = runner.invoke(app, ["capture", str(tmp_path / "out"), "--json", "--", "false"])
    assert json.loads(result.stdout)["files"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{folder}", "--", "true"], "OUT must be an empty folder, or a new one"),
        (["{folder}/new", "--", "no-such-program"], "COMMAND must be a program that can be run"),
        (["{folder}/new"], "Missing argument"),
        (["{folder}/new", "--limit", "0", "--", "true"], "limit"),
    ],
)
def test_bad_usage(arguments: list[str], words: str, call: Path) -> None:
    result = runner.invoke(app, ["capture", *(a.format(folder=call.parent) for a in arguments)])
    assert result.exit_code == 2
    assert words in result.stderr
    assert [path.name for path in call.parent.iterdir()] == [call.name]


def test_a_folder_that_cannot_be_made_is_one_line(call: Path) -> None:
    result = runner.invoke(app, ["capture", str(call / "out"), "--", "true"])
    assert result.exit_code == 1
    assert result.stderr.startswith("kda2: ") and len(result.stderr.splitlines()) == 1


def test_bench_takes_a_captured_call(call: Path, tmp_path: Path) -> None:
    arguments = ["bench", str(call), "--out", str(tmp_path / "records"), "--impls", "torch,reference,flash_kda"]
    result = runner.invoke(app, [*arguments, *BENCH])
    assert result.exit_code == 0, result.output
    lines = [json.loads(x) for x in (tmp_path / "records" / "captured.jsonl").read_text().splitlines()]
    assert [(x["impl"], x["status"], x["case"]["gate"]) for x in lines] == [
        ("kda2:torch", "ok", "captured"),
        ("kda2:reference", "ok", "captured"),
    ]
    assert f"H1-6-captured-K8-V8-{lines[0]['case']['capture']['sha256']}" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{call}", "--gates", "weak"], "--gates must be absent beside a captured call"),
        (["{call}", "--cases", "x"], "--cases must be absent beside a captured call"),
        (["none.safetensors"], "suite must be a capture file, got"),
        (["kda-step", "--gates", "captured"], "--gates must be among"),
    ],
)
def test_bad_usage_of_bench(arguments: list[str], words: str, call: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["bench", *(a.format(call=call) for a in arguments), "--out", str(tmp_path), *BENCH])
    assert result.exit_code == 2
    assert words in result.stderr
    assert not list(tmp_path.glob("*.jsonl"))
