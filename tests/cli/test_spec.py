"""`kda2 spec`: a contract in words and as JSON, out to FlashInfer-Trace and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kda2.cli import spec as command
from kda2.cli.spec import app
from kda2.contract import OpSpec
from kda2.contract.calibration import Calibration, dump, load
from kda2.ops.kda.spec import KDA, KDA_STEP, SPECS
from kda2.testing import FAMILIES, calibrate

runner = CliRunner()


@pytest.mark.parametrize("op", SPECS)
def test_show_in_words(op: str) -> None:
    result = runner.invoke(app, ["show", op])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    spec = SPECS[op]
    assert spec.content_hash in words and "gate: log, softplus, bounded" in words
    for name in (*(t.name for t in spec.inputs), *spec.families, *(t.dtype for t in spec.tolerances)):
        assert name in words
    assert "[B, T, H, K]" in words or op == "kda_step"
    assert spec.workloads[0].name in words and "any other" in words
    general = spec.tolerance("bf16")
    assert f"{general.relative_l2:g}, {general.element_rms:g}" in words


def test_show_as_json_is_one_document() -> None:
    result = runner.invoke(app, ["show", "kda", "--json"])
    assert result.exit_code == 0
    assert OpSpec.from_json(result.stdout) == KDA and json.loads(result.stdout)["schema"] == 1


def test_there_and_back(tmp_path: Path) -> None:
    result = runner.invoke(app, ["export", "kda_step", str(tmp_path)])
    assert result.exit_code == 0, result.output
    paths = [Path(line) for line in result.output.splitlines()]
    assert len(paths) == 7 and all(path.is_file() for path in paths)
    definition = next(path for path in paths if path.parts[-3] == "definitions")
    back = runner.invoke(app, ["import", str(definition), "--json"])
    assert back.exit_code == 0 and OpSpec.from_json(back.stdout) == KDA_STEP
    assert KDA_STEP.content_hash in runner.invoke(app, ["import", str(definition)]).output


def test_one_workload(tmp_path: Path) -> None:
    result = runner.invoke(app, ["export", "kda_step", str(tmp_path), "--workload", "b16-bf16"])
    assert result.exit_code == 0 and len(result.output.splitlines()) == 4
    (lines,) = (tmp_path / "workloads/kda_step").iterdir()
    back = runner.invoke(app, ["import", str(next((tmp_path / "definitions/kda_step").iterdir())), "--workloads",
                               str(lines), "--json"])  # fmt: skip
    assert back.exit_code == 0 and OpSpec.from_json(back.stdout) == KDA_STEP


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "gemm"], "kda2: op must be one of kda, kda_step, got 'gemm'"),
        (["export", "kda", "out", "--workload", "x"], "kda2: workload must be one of h64-1024-strong, "),
        (["import", "nosuch.json"], "kda2: definition must be a file, got nosuch.json, which does not exist"),
        (["calibrate", "kda_step"], "kda2: op must be 'kda', got 'kda_step'"),
        (["calibrate", "kda", "--impls", "fla"], "kda2: impls must be among reference, torch, triton, hopper, rounded"),
        (["calibrate", "kda", "--device", "tpu"], "kda2: --device must be cpu or cuda, got 'tpu'"),
        (["calibrate", "kda", "--merge", "x.json"], "kda2: --merge must be a file that --out wrote, got x.json, which"),
    ],
)
def test_bad_input_is_one_line_and_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith(says) and len(result.stderr.splitlines()) == 1


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = runner.invoke(app, ["export", "kda_step", str(tmp_path / "file")])
    assert result.exit_code == 1 and "Not a directory" in result.stderr


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table with one entry, and one family in one size to be measured."""
    path = tmp_path / "tolerances.json"
    errors = {"bf16": {"random": {"o": (0.5, 0.5), "final_state": (1e-4, 1e-4)}}}
    path.write_text(dump([Calibration("elsewhere", "NVIDIA H200", "2026-11-30", {"torch": "2.13"}, 20, (), errors)]))
    monkeypatch.setattr(command, "CALIBRATIONS", path)
    monkeypatch.setattr(calibrate, "SIZES", (calibrate.Size({"T": 40, "B": 2, "K": 24, "V": 8}),))
    monkeypatch.setattr(calibrate, "FAMILIES", {"random": FAMILIES["random"]})
    return path


CALIBRATE = ["calibrate", "kda", "--seeds", "1", "--impls", "reference,rounded_16,hopper"]


def test_calibrate_says_what_would_change_and_changes_nothing(table: Path) -> None:
    before = table.read_text()
    result = runner.invoke(app, CALIBRATE)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "Margins: error / limit" in words and "was not run: hopper: tensors are on cpu, wants cuda" in words
    assert "bf16, random, final_state: 0.00015 and 0.00015 -> 0.00" in words
    assert "fp32, any other: none -> " in words and "limits would change; --write changes them" in words
    assert "bf16, random, o" not in words  # what was measured elsewhere is worse, and stays
    assert table.read_text() == before


def test_calibrate_as_json_is_one_document(table: Path) -> None:
    result = runner.invoke(app, [*CALIBRATE, "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert set(said) == {"margins", "not_run", "faults", "changes", "too_loose"} and list(said["not_run"]) == ["hopper"]
    rows = {(m["dtype"], m["family"], m["output"]): m["margins"] for m in said["margins"]}
    assert set(rows["fp16", "random", "o"]) == {"reference", "rounded_16"}


def test_calibrations_are_written_and_merged(table: Path, tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    assert runner.invoke(app, [*CALIBRATE, "--out", str(file)]).exit_code == 0
    assert [c.impl for c in load(file.read_text())] == ["reference", "rounded_16"]
    merge = ["calibrate", "kda", "--merge", str(file), "--write"]
    assert "limits changed" in runner.invoke(app, merge).stdout
    merged = table.read_text()
    assert [c.impl for c in load(merged)] == ["elsewhere", "reference", "rounded_16"]
    assert runner.invoke(app, merge).stdout.endswith("0 limits changed\n") and table.read_text() == merged


def test_check_fails_for_an_implementation_beyond_its_limits(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.invoke(app, [*CALIBRATE, "--check"]).exit_code == 0
    monkeypatch.setitem(calibrate.FAITHFUL, "wrong", lambda kwargs: tuple(1.5 * x for x in calibrate_right(kwargs)))
    result = runner.invoke(app, ["calibrate", "kda", "--seeds", "1", "--impls", "wrong", "--check"])
    assert result.exit_code == 1 and "beyond its limits: wrong, bf16, T40 B2 K24 V8, seed 0: [random] o is" in (
        result.stdout
    )


calibrate_right = calibrate.FAITHFUL["torch"]


def test_check_fails_for_a_limit_that_is_far_too_loose(table: Path) -> None:
    (entry,) = load(table.read_text())
    table.write_text(dump([replace(entry, impl="rounded_16", device="cpu")]))
    result = runner.invoke(app, ["calibrate", "kda", "--seeds", "1", "--impls", "rounded_16", "--check"])
    assert result.exit_code == 1 and "a limit is too loose: bf16, random, o: 0.72 and 0.72, measured 0.00" in (
        result.stdout
    )
    assert runner.invoke(app, ["calibrate", "kda", "--seeds", "1", "--impls", "rounded_16"]).exit_code == 0
