"""`kda2 spec`: a contract in words and as JSON, out to FlashInfer-Trace and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kda2.cli.spec import app
from kda2.contract import OpSpec
from kda2.ops.kda.spec import KDA, KDA_STEP, SPECS

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
    assert "0.006" in words and spec.workloads[0].name in words


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
