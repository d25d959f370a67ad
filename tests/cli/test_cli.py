"""The command line: exit codes, plain words, and the small commands for real."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kda2 import device
from kda2.cli.app import app
from kda2.workbench import doctor as findings
from kda2.workbench.ledger import Ledger

runner = CliRunner()
TINY = """
suite = "kda-tiny"
op = "kda"
samples = 2
impls = ["kda2:torch", "kda2:reference"]
gates = ["weak"]
max_rel_err = 2e-2

[[case]]
heads = 1
seqlens = [9]
k = 16
v = 16
dtype = "bf16"
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_help_lists_every_command() -> None:
    text = runner.invoke(app, ["--help"]).output
    for command in ("plan", "run", "verify", "capture", "bench", "doctor", "ledger", "tune", "spec", "records"):
        assert command in text


def test_bench_writes_records_and_a_table(tiny: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["bench", str(tiny), "--device", "cpu", "--out", str(tmp_path / "records")])
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "records" / "kda-tiny.jsonl").read_text().splitlines()
    assert [json.loads(line)["impl"] for line in lines] == ["kda2:torch", "kda2:reference"]
    assert "H1-9-weak" in result.output


def test_bench_narrows(tiny: Path, tmp_path: Path) -> None:
    arguments = ["bench", str(tiny), "--device", "cpu", "--out", str(tmp_path), "--impls", "torch", "--gates", "strong"]
    result = runner.invoke(app, [*arguments, "--samples", "1"])
    assert result.exit_code == 0, result.output
    (line,) = (tmp_path / "kda-tiny.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["impl"], record["case"]["gate"], record["samples"]) == ("kda2:torch", "strong", 1)


def test_bench_gives_errors_of_a_family_and_times_none(tiny: Path, tmp_path: Path) -> None:
    tiny.write_text(TINY + 'family = "repeated_keys"\ngate = "own"\n')
    result = runner.invoke(app, ["bench", str(tiny), "--device", "cpu", "--out", str(tmp_path), "--impls", "torch"])
    assert result.exit_code == 0, result.output
    assert re.search(r"H1-9-own-K16-V16-repeated_keys +kda2:torch +o \d\.\de-\d+, state \d\.\de-\d+\n", result.output)
    assert " us" not in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "no-such-suite"], "suite must be"),
        (["bench", "kda-step", "--device", "cpu", "--gates", "odd"], "--gates must be"),
        (["bench", "kda-step", "--device", "cpu", "--cases", "zzz"], "cases must be"),
        (["bench", "kda-step", "--device", "warp"], "--device must be"),
        (["bench", "kda-step", "--device", "meta"], "--device must be"),
        (["bench", "kda-step", "--device", "cpu", "--gates", ","], "--gates must be at least one name"),
        (["bench", "kda-step", "--device", "cpu", "--impls", ","], "--impls must be at least one name"),
        (["bench", "kda-step", "--device", "cpu", "--impls", "fastest"], "impl must be"),
    ],
)
def test_bad_usage_of_bench(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = runner.invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gla"], "op must be 'kda'"),
        (["kda", "--target", "sm_1"], "--target must be one of sm_80"),
        (["kda", "--gate", "hard"], "--gate must be softplus or bounded"),
        (["kda", "--inputs", "none.safetensors"], "does not exist"),
        (["kda", "--inputs", "none.safetensors", "--gate", "bounded"], "--gate must be absent beside --inputs"),
        (["kda", "--inputs", "none.safetensors", "--tokens", "64"], "--tokens must be absent beside --inputs"),
        (["kda", "--inputs", "/"], "--inputs must be a safetensors file"),
        (["kda", "--families", "("], "--families must be a regular expression"),
        (["kda", "--families", "no-such"], "--families must be an expression that finds one of random"),
        (["kda", "--seed", "-1"], "--seed must be at least 0 and below 2**31"),
        (["kda", "--seed", "2147483648"], "--seed must be at least 0 and below 2**31"),
        (["kda", "--tokens", "99999"], "--tokens must be what the example can give"),
        (["kda", "--budget", "soon"], "--budget must be a time such as 90s, 10m or 1h, got 'soon'"),
        (["kda", "--budget", "0m"], "--budget must be a time"),
        (["kda", "--budget", "\u0663s"], "--budget must be a time"),
        (["kda", "--budget", "9" * 400], "--budget must be a time"),
        (["kda", "--resume"], "--resume must be absent beside --out"),
        (["kda", "--kernel", "none.py"], "FILE must be a Python file that can be read, got none.py"),
    ],
)
def test_bad_usage_of_run(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = runner.invoke(app, ["run", *arguments, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert words in result.stderr
    assert not result.stdout.strip()
    assert not list(tmp_path.iterdir())  # nothing was begun


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('suite = "kda-tiny"', 'suite = "../outside"', "suite must be a valid suite file"),
        ("seqlens = [9]", "", "seqlens"),
        ("seqlens = [9]", "seqlens = 9", "seqlens"),
        ("seqlens = [9]", "seqlens = [9, -1]", "seqlens"),
        ("heads = 1", "heads = 1\nkv_heads = -1", "kv_heads"),
        ("k = 16", "k = 0", "greater than 0"),
        ('suite = "kda-tiny"', 'suite = "gpu-tests"', "gpu-tests.jsonl holds the records of test runs"),
        ("[[case]]", "[[cases]]", "case"),
    ],
)
def test_bad_suites(tiny: Path, tmp_path: Path, old: str, new: str, words: str) -> None:
    tiny.write_text(TINY.replace(old, new))
    result = runner.invoke(app, ["bench", str(tiny), "--device", "cpu", "--out", str(tmp_path / "records")])
    assert result.exit_code == 2
    assert words in result.stderr
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_case_that_the_operator_refuses_is_a_record(tiny: Path, tmp_path: Path) -> None:
    tiny.write_text(TINY.replace("k = 16", "k = 300"))
    result = runner.invoke(app, ["bench", str(tiny), "--device", "cpu", "--out", str(tmp_path / "records")])
    assert result.exit_code == 1
    lines = (tmp_path / "records" / "kda-tiny.jsonl").read_text().splitlines()
    words = "unsupported(q must be [..., K] with 1 <= K <= 256, got K = 300)"
    assert [json.loads(line)["status"] for line in lines] == [words, words]


def test_an_implementation_named_twice_is_measured_once(tiny: Path, tmp_path: Path) -> None:
    impls = ["--impls", "reference,torch,kda2:reference,torch"]
    result = runner.invoke(app, ["bench", str(tiny), "--device", "cpu", "--out", str(tmp_path), *impls])
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "kda-tiny.jsonl").read_text().splitlines()
    assert [json.loads(line)["impl"] for line in lines] == ["kda2:reference", "kda2:torch"]


def test_a_folder_with_a_ledger_takes_no_other_run(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.jsonl").append("run", {})
    before = (tmp_path / "ledger.jsonl").read_bytes()
    result = runner.invoke(app, ["run", "kda", "--tokens", "8", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith("kda2: --out must be a new folder, or one of this very run, got")
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


def test_resume_takes_the_newest_run_that_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["run", "kda", "--resume"])
    assert result.exit_code == 2 and "--resume must be given where a run was interrupted" in result.stderr
    for name, kind in (
        ("20260101T000000Z-0", "stopped"),
        ("20260102T000000Z-0", "verdict"),
        ("20260103T000000Z-0", "choice"),
    ):
        Ledger(tmp_path / "runs" / "kda" / name / "ledger.jsonl").append(kind, {})
    result = runner.invoke(app, ["run", "kda", "--resume", "--tokens", "8"])
    assert result.exit_code == 2 and "20260102T000000Z-0" in result.stderr  # found, and not this job's


def test_a_run_that_cannot_write_its_capture_is_one_line(tmp_path: Path) -> None:
    code = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (9000, 9000)); from kda2.cli import main; main()"
    command = [sys.executable, "-B", "-c", code, "run", "kda", "--tokens", "64", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("kda2: a capture cannot be written")
    assert str(tmp_path / "capture.safetensors") in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "ledger.jsonl").exists() and not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "kda-step", "--device", "cpu", "--out", "{file}"],
        ["run", "kda", "--tokens", "8", "--out", "{file}"],
        ["ledger", "log", "{folder}"],
        ["ledger", "log", "{folder}/none"],
        ["records", "page", "--folder", "{folder}"],
    ],
)
def test_files_that_cannot_be_used_are_one_line(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "README.md").mkdir()  # where the page would go
    (tmp_path / "file").touch()
    places = {"file": str(tmp_path / "file"), "folder": str(tmp_path)}
    result = runner.invoke(app, [a.format(**places) for a in arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("kda2: ") and str(tmp_path) in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_doctor() -> None:
    found = json.loads(runner.invoke(app, ["doctor", "--json"]).output)
    assert found["Software"]["kda2"]
    assert found["Implementations that run here"]["kda, reference"].startswith("yes")
    assert set(found["Platforms"]) >= {"WSL 2", "ROCm", "macOS, Windows"}
    text = runner.invoke(app, ["doctor"]).output
    assert "Implementations that run here" in text


def test_doctor_says_what_is_missing_and_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra's brackets are no markup."""
    monkeypatch.setattr(findings, "EXTRAS", {"test": ("no_such_package",)})
    monkeypatch.setattr(findings.platform, "python_version", lambda: "3.19.0")
    text = runner.invoke(app, ["doctor"]).output
    assert "missing no_such_package: pip install '.[test]'" in text
    assert "3.19.0 (not tested; tested: 3.11, 3.12)" in text


def test_doctor_knows_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if device.gpus():
        pytest.skip("it looks at the GPU")
    rows = {}
    for on in ("0", "1"):
        monkeypatch.setenv("TRITON_INTERPRET", on)
        found = json.loads(runner.invoke(app, ["doctor", "--json"]).output)
        rows[on] = found["Implementations that run here"]["kda, triton"]
    assert rows["0"].startswith("no: ")
    assert rows["1"].startswith("yes")


def test_ledger_verify_and_log(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path).append("note", {"name": "hello"})
    assert "1 lines hold" in runner.invoke(app, ["ledger", "verify", str(path)]).output
    assert "hello" in runner.invoke(app, ["ledger", "log", str(path)]).output
    assert json.loads(runner.invoke(app, ["ledger", "verify", str(path), "--json"]).stdout)["ok"] is True
    (line,) = json.loads(runner.invoke(app, ["ledger", "log", str(path), "--json"]).stdout)
    assert (line["kind"], line["payload"]) == ("note", {"name": "hello"})
    path.write_text(path.read_text().replace("hello", "world"))
    result = runner.invoke(app, ["ledger", "verify", str(path)])
    assert result.exit_code == 1
    assert "line 1 was changed" in result.output
    as_json = runner.invoke(app, ["ledger", "verify", str(path), "--json"])
    assert as_json.exit_code == 1 and "line 1 was changed" in json.loads(as_json.stdout)["problem"]
    assert runner.invoke(app, ["ledger", "log", str(path)]).exit_code == 1


def test_a_ledger_without_a_choice_is_unfinished_and_has_a_report(tmp_path: Path) -> None:
    path, page = tmp_path / "ledger.jsonl", tmp_path / "page.html"
    old = Path(__file__).parents[2] / "docs" / "notes" / "2026-11-30-design-loop" / "captured-2048-tokens.jsonl"
    lines = old.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))  # stopped while the best were timed once more
    assert [json.loads(line)["kind"] for line in lines[-2:]] == ["judged", "choice"]
    assert "it has no end" in runner.invoke(app, ["ledger", "verify", str(path)]).output
    assert json.loads(runner.invoke(app, ["ledger", "verify", str(path), "--json"]).stdout)["unfinished"] is True
    assert "it has no end" not in runner.invoke(app, ["ledger", "verify", str(old)]).output
    assert runner.invoke(app, ["ledger", "report", str(path), "--out", str(page)]).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")


def test_a_verification_ends_with_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    verify = ["ledger", "verify", str(path), "--json"]
    ledger = Ledger(path)
    ledger.append("run", {"op": "kda", "sizes": {"T": 70}})
    assert json.loads(runner.invoke(app, verify).stdout)["unfinished"] is True
    ledger.append("judged", {"name": "mine.py", "correct": False, "latency_us": None})
    assert json.loads(runner.invoke(app, verify).stdout)["unfinished"] is False


def test_records_page_and_check(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    folder = ["--folder", str(tmp_path)]
    assert runner.invoke(app, ["records", "check", *folder]).exit_code == 1
    assert runner.invoke(app, ["records", "page", *folder]).exit_code == 0
    assert runner.invoke(app, ["records", "check", *folder]).exit_code == 0
    (tmp_path / "README.md").write_text("edited")
    result = runner.invoke(app, ["records", "check", *folder])
    assert result.exit_code == 1
    assert "kda2 records page" in result.output


@pytest.mark.parametrize("case", [{"gate": "odd"}, {"gate": "weak", "heads": 4}, {"heads": 4, "seqlens": [8]}, {}])
def test_a_record_that_no_page_could_show_is_named(case: dict[str, object], tmp_path: Path) -> None:
    record = {
        "run": "r", "utc": "2026-01-01T00:00:00Z", "suite": "kda-x", "case": case, "impl": "fla", "status": "oom",
        "device": "cpu", "torch": "2.11.0", "version": "1",
    }  # fmt: skip
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "kda-x.jsonl").write_text(json.dumps(record) + "\n")
    for command in ("page", "check"):
        result = runner.invoke(app, ["records", command, "--folder", str(tmp_path)])
        assert result.exit_code == 1
        assert f"{tmp_path / 'records' / 'kda-x.jsonl'}:1 is not a BenchRecord" in result.stderr
    assert not (tmp_path / "README.md").exists()


def test_the_page_in_the_checkout_is_current() -> None:
    assert runner.invoke(app, ["records", "check"]).exit_code == 0


def test_records_tests_counts_a_pytest_run(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("import pytest\ndef test_a(): pass\n@pytest.mark.skip\ndef test_b(): pass\n")
    arguments = ["records", "tests", "kda-small", "--out", str(tmp_path), "--", "-q", "-c", "/dev/null", str(tmp_path)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "gpu-tests.jsonl").read_text())
    assert (record["suite"], record["passed"], record["failed"], record["skipped"]) == ("kda-small", 1, 0, 1)
    (tmp_path / "test_x.py").write_text("def test_a(): assert False\n")
    assert runner.invoke(app, arguments).exit_code == 1


@pytest.mark.parametrize("suite", ["", "gla-gpu", "kda_step-gpu", "../kda-gpu", "common-x"])
def test_records_tests_wants_a_suite_of_an_op_before_it_runs(suite: str, tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("open(__file__ + '.ran', 'w')\ndef test_a(): pass\n")
    arguments = [suite, "--out", str(tmp_path / "new"), "--", "-q", "-c", "/dev/null", str(tmp_path)]
    result = runner.invoke(app, ["records", "tests", *arguments])
    assert result.exit_code == 2
    assert "suite must be <op>-<what> for an op of kda" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["test_x.py"]


def test_records_tests_looks_at_its_file_before_it_runs(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("open(__file__ + '.ran', 'w')\ndef test_a(): pass\n")
    (tmp_path / "gpu-tests.jsonl").write_text('{"schema": 1')
    for out in (tmp_path, tmp_path / "gpu-tests.jsonl"):
        arguments = ["kda-x", "--out", str(out), "--", "-q", "-c", "/dev/null", str(tmp_path)]
        result = runner.invoke(app, ["records", "tests", *arguments])
        assert result.exit_code == 1
        assert result.stderr.startswith("kda2: ")
    assert not (tmp_path / "test_x.py.ran").exists()


@pytest.mark.parametrize("arguments", [["--no-such-option"], ["-k", "nothing"], ["none.py"], ["--collect-only"]])
def test_records_tests_records_no_run_without_tests(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("def test_a(): pass\n")
    arguments = ["kda-x", "--out", str(tmp_path), "--", "-q", "-c", "/dev/null", str(tmp_path), *arguments]
    result = runner.invoke(app, ["records", "tests", *arguments])
    assert result.exit_code == 1
    assert "nothing is recorded" in result.stderr
    assert not (tmp_path / "gpu-tests.jsonl").exists()


def test_a_missing_extra_is_named() -> None:
    """As on an installation without the workbench's packages."""
    code = "import sys; sys.modules['typer'] = None; from kda2.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "typer" in done.stderr and "pip install '.[workbench]'" in done.stderr
    assert "Traceback" not in done.stderr
