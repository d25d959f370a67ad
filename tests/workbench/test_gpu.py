"""The ladder and the loop on a GPU: files of one's own, cheats that only the clock's second question finds, and a
measured choice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kda2.cli.app import app
from kda2.testing import Problem, make
from kda2.workbench import ledger as ledgers
from kda2.workbench import loop
from kda2.workbench.capture import Capture
from kda2.workbench.loop import Options

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "kernels" / "recurrent_triton.py"
# Right whenever it computes: it hands its call to kda2 by way of the public call, as any file may.
LIBRARY = """
import kda2

def run(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale, gate, lower_bound, **options):
    gates = {"log": lambda: kda2.Gate.log(lower_bound), "softplus": lambda: kda2.Gate.softplus(A_log, dt_bias),
             "bounded": lambda: kda2.Gate.bounded(A_log, dt_bias, lower_bound)}
    o, state = kda2.kda(q, k, v, g, beta, gate=gates[gate](), scale=scale, initial_state=initial_state,
                        output_final_state=True, cu_seqlens=cu_seqlens, **options)
    return {"o": o, "final_state": state}
"""
# From the third call on the very tensors on it remembers, so that the clock times a dictionary.
REMEMBERS = (
    LIBRARY.replace("def run(q", "def compute(q")
    + """
answers, calls = {}, {}

def run(**inputs):
    key = tuple(x.data_ptr() if hasattr(x, "data_ptr") else x for x in inputs.values())
    calls[key] = calls.get(key, 0) + 1
    if calls[key] < 3:
        answers[key] = compute(**inputs)
    return answers[key]
"""
)
# Reads the natural log decay as one of base 2.
OTHER_BASE = (
    LIBRARY.replace("def run(", "def right(")
    + """
def run(*, g, gate, **rest):
    return right(g=g * 0.6931471805599453 if gate == "log" else g, gate=gate, **rest)
"""
)


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("call") / "call.safetensors"
    Capture(make(Problem(T=512, H=4, HV=4, K=128, V=128)), {"layer": "none"}).save(path)
    return path


# What takes a minute each, and has tests of its own.
QUICK = ("--no-count", "--check", "")


def verify(text: str, call: Path, folder: Path, *more: str) -> dict[str, object]:
    file = folder / "mine.py"
    file.write_text(text)
    words = ["verify", str(file), "--inputs", str(call), "--families", "random|ragged", "--out", str(folder / "out")]
    words += more or QUICK
    found: dict[str, object] = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    return found


def test_the_example_kernel_goes_up_the_whole_ladder(call: Path, tmp_path: Path) -> None:
    found = verify(EXAMPLE.read_text(), call, tmp_path, "--samples", "100")
    assert found["verdict"] == "correct on every probe", found
    assert found["latency_us"]
    verdicts = found["verdicts"]
    assert isinstance(verdicts, dict)
    assert [verdicts[s] for s in ("L0", "L1", "L2", "L4", "L5", "L6", "L7")] == ["pass"] * 7
    line = [x.payload["verdict"] for x in ledgers.read(tmp_path / "out" / "ledger.jsonl") if x.kind == "verdict"]
    timed = next(v["evidence"] for v in line if v["stage"] == "L6")
    assert timed["median_us"] > timed["floor_us"] > 0
    assert timed["speed"]["verdict"] in ("faster", "slower", "inconclusive")


def test_the_library_against_itself_is_inconclusive_or_close(call: Path, tmp_path: Path) -> None:
    found = verify(LIBRARY, call, tmp_path)
    assert found["verdict"] == "correct on every probe", found
    line = [x.payload["verdict"] for x in ledgers.read(tmp_path / "out" / "ledger.jsonl") if x.kind == "verdict"]
    speed = next(v["evidence"]["speed"] for v in line if v["stage"] == "L6")
    assert 0.9 < speed["value"] < 1.1


def test_an_answer_kept_from_the_timed_calls_is_invalid(call: Path, tmp_path: Path) -> None:
    found = verify(REMEMBERS, call, tmp_path)
    assert found["verdict"] == "refused" and found["latency_us"] is None
    verdicts, reasons = found["verdicts"], found["reasons"]
    assert isinstance(verdicts, dict) and isinstance(reasons, dict)
    assert verdicts["L6"] == "invalid"
    assert "with other contents in the same tensors" in reasons["L6"][0] or "datasheet" in reasons["L6"][0]


def test_a_wrong_kernel_is_named_and_never_timed(call: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OTHER_BASE)
    words = ["verify", str(file), "--inputs", str(call), "--families", "random_depth", "--out", str(tmp_path / "out")]
    words += QUICK
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert found["verdict"] == "refused"
    assert (found["verdicts"]["L4"], found["verdicts"]["L6"]) == ("fail", "not_run(its numerics did not pass)")
    assert "exp2" in found["reasons"]["L4"][0]


def test_a_run_ends_in_a_measured_choice_no_slower_than_what_ships(call: Path, tmp_path: Path) -> None:
    options = Options(tmp_path, 90, call, families=("random",), rounds=1, width=2, trials=1, seed=1)
    outcome = loop.run(options, lambda *_: None)
    assert outcome.ok and outcome.label == "measured"
    times = {entry["name"]: entry["us"] for entry in outcome.ranking}
    assert outcome.chosen is not None and times[outcome.chosen] <= 1.02 * times["triton"]
    assert ledgers.verify(outcome.ledger).ok
    timed = next(v for c in outcome.candidates if c.name == "triton" for v in c.verdicts if v.stage == "L6")
    assert set(timed.evidence["stages_us"]) == {"prepare", "state", "output"}
    assert outcome.rounds[0].why.split()[0] in ("prepare", "state", "output")
