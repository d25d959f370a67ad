"""Commands run with their calls recorded: real processes, the way `kda2 capture` starts them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kda2
from kda2.errors import InvalidValue
from kda2.workbench.capture import Capture, command
from kda2.workbench.capture.command import Result, run

SRC = Path(kda2.__file__).parent.parent
# FLA's signatures, with a result that tells which function was called.
FLA = {
    "fla/__init__.py": "",
    "fla/ops/__init__.py": "",
    "fla/ops/kda/__init__.py": """
from .chunk import chunk_kda
from .fused_recurrent import fused_recurrent_kda
""",
    "fla/ops/kda/chunk.py": """
import torch
def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs,
):
    return 2 * v, None
""",
    "fla/ops/kda/fused_recurrent.py": """
import torch
def fused_recurrent_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    lower_bound=None, state_v_first=False, cu_seqlens=None, **kwargs,
):
    return 3 * v, None
""",
    "layer.py": "from fla.ops.kda import chunk_kda, fused_recurrent_kda\n",
}
TOKENS = """
import torch
def tokens(T):
    torch.manual_seed(T)
    return *(torch.randn(1, T, 1, 4) for _ in range(3)), -torch.rand(1, T, 1, 4), torch.rand(1, T, 1)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs, which runs of them stand in and import from."""
    folder = tmp_path / "programs"
    for name, text in {**FLA, "tokens.py": TOKENS}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SRC), str(folder)]))
    monkeypatch.chdir(folder)
    return folder


def python(code: str, *options: str) -> list[str]:
    return [sys.executable, "-B", *options, "-c", code]


def captures(result: Result) -> list[Capture]:
    return [Capture.load(kept.path) for kept in result.files]


def test_a_program_of_kda2(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "model.py").write_text("""
import sys, torch
from kda2 import Gate, kda, kda_step
from tokens import tokens
for T in (3, 3, 2):
    o, state = kda(*tokens(T), qk_l2norm=True, output_final_state=True, impl="torch")
q, k, v, g, beta = (x[:, 0] for x in tokens(1))
kda_step(q, k, v, g, beta, state, gate=Gate.softplus(torch.zeros(1)), impl="torch")
try:
    kda(*tokens(5), impl="none")
except ValueError:
    print("refused", *sys.argv[1:])
sys.exit(7)
""")
    result = run([sys.executable, "-B", "model.py", "--x"], tmp_path / "out")
    assert (result.status, result.exit_code, result.skipped, result.trouble) == (7, 7, (), ())
    assert capfd.readouterr().out == "refused --x\n"
    assert [k.facts["origin"]["function"] for k in result.files] == ["kda2.kda", "kda2.kda", "kda2.kda_step"]
    three, two, step = captures(result)
    assert (three.kwargs["q"].shape[1], two.kwargs["q"].shape[1], step.kwargs["q"].shape[1]) == (3, 2, 1)
    torch.manual_seed(3)
    assert torch.equal(three.kwargs["q"], torch.randn(1, 3, 1, 4))
    assert three.kwargs["qk_l2norm"] is True and three.origin["argv"] == ["model.py", "--x"]
    _, state = kda2.kda(**two.kwargs, impl="torch")
    assert state is not None and torch.equal(step.kwargs["initial_state"], state)
    assert step.gate.kind == "softplus"
    assert all(f"-{kept.facts['origin']['pid']}-" in kept.path.name for kept in result.files)


def test_calls_of_fla_by_other_modules_in_other_processes(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And a sitecustomize of the program's own still runs."""
    (place / "sitecustomize.py").write_text("import os\nos.environ['THEIRS'] = __name__\n")
    (place / "child.py").write_text("""
import os, sys, sitecustomize, layer
from tokens import tokens
q, k, v, g, beta = tokens(4)
o, _ = layer.chunk_kda(q, k, v, g, beta, use_gate_in_kernel=True, A_log=v[0, 0, :, 0], lower_bound=-5.0)
assert (o == 2 * v).all()
q.zero_()
o, _ = layer.fused_recurrent_kda(q=q, k=k, v=v, g=g, beta=beta, initial_state=v.new_ones(1, 1, 4, 4))
assert (o == 3 * v).all()
layer.chunk_kda(q, k, v, g, beta, cp_context=object())
print(os.environ["THEIRS"], os.path.dirname(sitecustomize.__file__) == os.getcwd(), "site" in "".join(sys.path[:2]))
""")
    parent = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-B', 'child.py']).returncode)"
    result = run(python(parent), tmp_path / "out")
    assert result.status == 0
    assert capfd.readouterr().out == "sitecustomize True False\n"
    chunk, recurrent = captures(result)
    assert chunk.origin["function"] == "fla.ops.kda.chunk_kda"
    assert (chunk.gate.kind, chunk.gate.lower_bound) == ("bounded", -5.0)
    assert chunk.kwargs["q"].any() and not recurrent.kwargs["q"].any()
    assert recurrent.kwargs["initial_state"].sum() == 16
    assert result.skipped == ("fla.ops.kda.chunk_kda: cp_context: kda2 has no context parallelism",)


def test_a_disk_that_fills_up(place: Path, tmp_path: Path) -> None:
    code = """
import resource, kda2
from tokens import tokens
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
for T in (3, 4):
    kda2.kda(*tokens(T), impl="reference")
"""
    result = run(python(code), tmp_path / "out")
    assert (result.status, result.exit_code, result.files) == (0, 1, ())
    assert len(result.trouble) == 1
    assert result.trouble[0].startswith("nothing was captured: a capture cannot be written")
    assert not (tmp_path / "out").exists()


def test_a_program_that_fails_halfway_keeps_what_it_had(place: Path, tmp_path: Path) -> None:
    code = """
import os, kda2
from tokens import tokens
kda2.kda(*tokens(3), impl="reference")
open(os.path.join(os.environ["OUT"], ".half.safetensors.1.part"), "w").close()
os.kill(os.getpid(), 9)
"""
    out = tmp_path / "out"
    result = run(["env", f"OUT={out}", *python(code)], out)
    assert (result.status, result.exit_code) == (137, 137)
    assert list(out.iterdir()) == [result.files[0].path]


def test_a_python_that_cannot_load_kda2(place: Path, tmp_path: Path) -> None:
    code = """
import sys
sys.modules["pydantic"] = None
import layer
from tokens import tokens
layer.chunk_kda(*tokens(3))
"""
    result = run(python(code), tmp_path / "out")
    assert (result.status, result.exit_code) == (0, 1)
    (text,) = result.trouble
    assert (
        text.startswith("nothing was captured: calls could not be recorded: ModuleNotFoundError") and "pydantic" in text
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (python("pass", "-I"), "no Python was started that lets itself be watched"),
        (python("pass", "-S"), "no Python was started that lets itself be watched"),
        (["true"], "no Python was started that lets itself be watched"),
        (python("pass"), "no process imported kda2.kda or fla.ops.kda"),
        (python("import layer"), "no call was made and returned"),
    ],
)
def test_why_nothing_was_captured(place: Path, tmp_path: Path, words: list[str], why: str) -> None:
    result = run(words, tmp_path / "new" / "out")
    assert (result.status, result.exit_code, result.files) == (0, 1, ())
    assert result.trouble[0].startswith(f"nothing was captured: {why}")
    assert not (tmp_path / "new" / "out").exists()


def test_a_python_that_imports_neither_is_left_as_it_was(place: Path, tmp_path: Path) -> None:
    code = "import sys; sys.exit(len({'torch', 'kda2', 'json', 'sitecustomize'} & set(sys.modules)) - 1)"
    assert run(python(code), tmp_path / "out").status == 0


def test_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(InvalidValue, match="OUT must be an empty folder"):
        run(["true"], tmp_path)
    for words in (["no-such-program"], [str(tmp_path / "x")]):
        with pytest.raises(InvalidValue, match="COMMAND must be a program that can be run"):
            run(words, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(OSError, match="exists"):
        run(["true"], tmp_path / "x")


def test_an_interrupt_from_a_terminal_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, in the same group, has it already."""

    class Child:
        sent: list[Any] = []  # noqa: RUF012
        answers = iter([KeyboardInterrupt(), KeyboardInterrupt(), 130])

        def wait(self) -> int:
            answer = next(self.answers)
            if isinstance(answer, int):
                return answer
            raise answer

        def send_signal(self, number: int) -> None:
            self.sent.append(number)

    told = iter([True, False])
    monkeypatch.setattr(command, "_terminal_told_it", lambda: next(told))
    child = Child()
    assert command._wait(child) == 130  # type: ignore[arg-type]
    assert child.sent == [2]
