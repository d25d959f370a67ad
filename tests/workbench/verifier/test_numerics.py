"""L3 on files: right kernels pass, and each kind of wrong one is refused for its own reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kda2.testing import FAMILIES
from kda2.workbench.verifier import Subject, questions, stages
from kda2.workbench.verifier.questions import AGAIN, OTHER_DTYPES
from kda2.workbench.verifier.words import reasons

FIRST = "    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]\n"
RETURNS = 'return {"o": o.to(v.dtype), "final_state": (states if state_layout == "kv" else states.mT).to(dtype)}'
QUICK = ("random", "reset_log", "repeated_keys", "one_token", "ragged", "all_empty", "nan_neighbour", "large_state")


def test_a_right_kernel_in_plain_torch_passes(shared: Any, plain: str) -> None:
    verdict = shared.numerics(shared.file(plain), *QUICK)
    assert (verdict.stage, verdict.outcome) == ("L3", "pass")
    assert list(verdict.evidence["families"]) == ["random", *AGAIN, *QUICK[1:], *OTHER_DTYPES]
    assert 0 < verdict.evidence["families"]["random"]["quantities"]["o"]["relative_l2"] < 6e-3


@pytest.mark.slow
def test_a_right_kernel_passes_every_family(shared: Any, plain: str) -> None:
    assert shared.numerics(shared.file(plain), *FAMILIES).outcome == "pass"


def test_a_right_kernel_in_triton_passes(shared: Any, recurrent: str) -> None:
    assert shared.numerics(shared.file(recurrent), "random", "all_empty").outcome == "pass"


@pytest.mark.slow
def test_a_right_kernel_in_triton_passes_every_family(shared: Any, recurrent: str) -> None:
    assert shared.numerics(shared.file(recurrent), *FAMILIES).outcome == "pass"


LOST = "            S = S * g[b, t].exp()"
WRONG = {
    "no delta": (
        "random", ["v32[b, t] - (S * k[b, t][..., None]).sum(1)", "v32[b, t]"],
        "It computes KDA without the delta correction",
    ),
    "state not handed on": (
        "weak_gate", [LOST, f"            S = S if t % 32 or t == start else 0 * S\n{LOST}"],
        "every chunk of 32 tokens but the first started from an empty state",
    ),
    "wrong base": ("random", ["g[b, t].exp()", "g[b, t].exp2()"], "exp2 of the log decay, without the factor log2(e)"),
    "one head": ("random", ["            o[b, t] = ", "            S[1] *= 1.01\n            o[b, t] = "],
                 "Only head 1 of 2 is wrong"),
    "partial chunk": (
        "random", ["range(start, end)", "range(start, start + (end - start) // 32 * 32)"],
        "Only the last 6 tokens are wrong: the partial chunk",
    ),
    "scale": ("random", ["scale * (S", "(S"], "o is 4 times what is wanted, everywhere: the scale K^-0.5 is missing"),
    "transposed state": ("random", ["(states if state", "(states.mT if state"], "the other state_layout"),
    "nan": ("random", ["g[b, t].exp()", "(g[b, t] * torch.nan).exp()"], "2240 elements are NaN or inf, the first at"),
    "skips": ("random", [
        "            o[b, t] = ", "            if t % 7 == 3:\n                continue\n            o[b, t] = ",
        "o = torch.zeros(", "o = torch.empty(",
    ], "o: 320 elements are NaN or inf, the first at batch 0, token 3"),
    "skips, by name": ("random", [
        "            o[b, t] = ", "            if t % 7 == 3:\n                continue\n            o[b, t] = ",
        "o = torch.zeros(", "o = empty(", "import torch\n", "import torch\nfrom torch import empty\n",
    ], "o: 320 elements are NaN or inf, the first at batch 0, token 3"),
    "dtype": ("random", ["o.to(v.dtype)", "o"], "o: wanted dtype torch.bfloat16, got torch.float32"),
    "shape": ("random", ["o.to(v.dtype)", "o.to(v.dtype)[:, 1:]"], "wanted shape (1, 70, 2, 16), got (1, 69, 2, 16)"),
    "writes inputs": ("random", [FIRST, f"    beta.zero_()\n{FIRST}"], "It wrote into its inputs (changed: beta)"),
    "state in place": (
        "random", ["    dtype = torch", "    initial_state.copy_(states)\n    dtype = torch"],
        "It wrote into its inputs (changed: initial_state); they belong to the caller.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_named(shared: Any, plain: str, changed: Callable[..., str], name: str) -> None:
    family, pairs, phrase = WRONG[name]
    outcome, says = shared.says(shared.file(changed(plain, *pairs)), family)
    assert outcome == "fail" and says.startswith(f"{family}: ")
    assert phrase in says


def test_a_wrong_answer_says_where_and_how_far(shared: Any, plain: str, changed: Callable[..., str]) -> None:
    text = changed(plain, "            o[b, t] = ", "            S[1] *= 1.01\n            o[b, t] = ")
    _, says = shared.says(shared.file(text))
    assert "o is off: relative L2 " in says and " (limit " in says and "); worst element at batch 0, token " in says
    assert "head 1, channel " in says and says.endswith("The family random probes the formula itself.")


NO_ANSWER = {
    "tuple": ([RETURNS, "return o, states"], "run must return a dict of o, final_state; it returned a tuple"),
    "none": ([RETURNS, "return"], "it returned None"),
    "missing": ([RETURNS, 'return {"o": o}'], "final_state is missing, it returned o"),
    "nothing": ([RETURNS, "return {}"], "o, final_state is missing, it returned none"),
    "extra": (["return {", 'return {"q": q, '], "it also returned q"),
    "numpy": (["o.to(v.dtype)", "o.numpy()"], "as tensors; o is a ndarray"),
    "meta": (["o.to(v.dtype)", 'o.to("meta")'], "o is on the meta device, sparse or nested"),
    "lazy": ([RETURNS, f"o = o.to(v.dtype)\n    o.detach = lambda: o\n    {RETURNS}"], "o.detach is not torch's own"),
    "sparse": (["o.to(v.dtype)", "o.to_sparse()"], "o is on the meta device, sparse or nested"),
    "raise": ([FIRST, f'{FIRST}    raise ValueError("no\\n good")\n'], "it raised ValueError: no good (kernel.py, "),
    "exit": ([FIRST, f"{FIRST}    raise SystemExit(3)\n"], "it raised SystemExit: 3 (kernel.py, line 13 in run)"),
    "prepare": ([FIRST, FIRST, "def run(", "def prepare(**x):\n    raise OSError('no')\n\n\ndef run("],
                "it raised OSError: no (kernel.py, line 9 in prepare)"),
    "reads stdin": ([FIRST, f"{FIRST}    input()\n"], "it raised EOFError"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_ANSWER)
def test_no_answer_is_named(shared: Any, plain: str, changed: Callable[..., str], name: str) -> None:
    pairs, phrase = NO_ANSWER[name]
    outcome, says = shared.says(shared.file(changed(plain, *pairs)))
    assert outcome == "fail" and phrase in says


def test_the_same_reason_is_told_once(shared: Any, plain: str, changed: Callable[..., str]) -> None:
    path = shared.file(changed(plain, FIRST, f"{FIRST}    raise ValueError\n"))
    told = reasons(shared.numerics(path, *QUICK))
    assert told == ["random, reset_log, repeated_keys and 5 more: it raised ValueError (kernel.py, line 13 in run)"]


def test_a_refusal_is_inconclusive_and_says_on_what(shared: Any, plain: str, changed: Callable[..., str]) -> None:
    refuse = f'{FIRST}    if cu_seqlens is not None:\n        raise NotImplementedError("packed batches")\n'
    outcome, says = shared.says(shared.file(changed(plain, FIRST, refuse)), "random", "ragged", "all_empty")
    assert outcome == "inconclusive"
    assert says.startswith("ragged, all_empty: it refuses this call: NotImplementedError: packed batches (kernel.py, ")


def test_a_refusal_excuses_no_mistake(shared: Any, plain: str, changed: Callable[..., str]) -> None:
    refuse = f"{FIRST}    if cu_seqlens is not None:\n        raise NotImplementedError\n"
    path = shared.file(changed(plain, FIRST, refuse, "scale * (S", "(S"))
    assert shared.numerics(path, "random", "ragged").outcome == "fail"


@pytest.mark.parametrize("line", ['torch.empty(1, device="cuda")', "assert q.is_cuda", "torch.cuda.synchronize()"])
def test_what_needs_a_gpu_is_not_run_without_one(
    shared: Any, plain: str, changed: Callable[..., str], line: str
) -> None:
    path = shared.file(changed(plain, FIRST, f"{FIRST}    {line}\n"))
    outcome, _ = shared.says(path)
    assert outcome.startswith("not_run(it needs a GPU: it raised ") and "line 13 in run" in outcome
    assert shared.code(path)["L1"].outcome.startswith("not_run(it needs a GPU: it raised ")


def test_what_no_interpreter_runs_is_not_run(shared: Any, recurrent: str, changed: Callable[..., str]) -> None:
    path = shared.file(changed(recurrent, "import triton\n", "import triton\nfrom triton.experimental import gluon\n"))
    assert shared.says(path)[0] == "not_run(no interpreter runs Gluon kernels)"


def test_an_autotuned_kernel_runs_in_its_first_configuration(
    shared: Any, recurrent: str, changed: Callable[..., str]
) -> None:
    tuned = '@triton.autotune([triton.Config({"V": v}) for v in (16, 8)], key=["K"])\n@triton.jit'
    path = shared.file(changed(recurrent, "@triton.jit", tuned, ", HV, K, V, num_warps=4)", ", HV, K)"))
    assert shared.numerics(path).outcome == "pass"


def test_a_fault_inside_a_triton_kernel_has_its_line(shared: Any, recurrent: str, changed: Callable[..., str]) -> None:
    path = shared.file(changed(recurrent, "        b_q, b_k = ", "        tl.nothing(t)\n        b_q, b_k = "))
    assert "line 19 in kda_recurrent" in shared.says(path)[1]


def test_a_file_that_was_changed_is_invalid(shared: Any, plain: str) -> None:
    path = shared.file(plain)
    subject = Subject.of_file(path)
    path.write_text(plain + "\n")
    verdict = shared.numerics(subject)
    assert verdict.outcome == "invalid"
    assert reasons(verdict) == ["random: kernel.py was changed while it was judged; judge it again"]


def test_a_file_that_is_gone_is_invalid(shared: Any, plain: str) -> None:
    path = shared.file(plain)
    subject = Subject.of_file(path)
    path.unlink()
    verdict = shared.numerics(subject)
    assert verdict.outcome == "invalid"
    assert reasons(verdict) == ["random: kernel.py cannot be read any more: No such file or directory"]


def test_an_edit_of_the_same_size_and_second_is_seen(shared: Any, plain: str, changed: Callable[..., str]) -> None:
    path = shared.file(plain)
    assert shared.numerics(path).outcome == "pass"
    path.write_text(changed(plain, "scale * (S", "1.000 * (S"))
    assert shared.numerics(path).outcome == "fail"
    assert not list(path.parent.glob("__pycache__"))


def test_prepare_runs_once_for_each_set_of_shapes(shared: Any, plain: str) -> None:
    path = shared.file(plain)
    log = path.with_name("log")
    path.write_text(
        f"{plain}\n\ndef prepare(q, **inputs):\n    with open({str(log)!r}, 'a') as f:\n        f.write('p')\n"
    )
    assert shared.numerics(path, "random", "no_decay", "one_token").outcome == "pass"
    assert log.read_text() == "pp" + "pp"  # two shapes, and two more dtypes


def test_a_helper_beside_the_file_is_found(shared: Any, plain: str, changed: Callable[..., str]) -> None:
    path = shared.file(changed(plain, "import torch\n", "import torch\nfrom my_factor import FACTOR\n", "scale * (S",
                               "FACTOR * scale * (S"))  # fmt: skip
    (path.parent / "my_factor.py").write_text("FACTOR = 1\n")
    assert shared.numerics(path).outcome == "pass"


@pytest.mark.parametrize("name", ["random.py", "torch.py", "triton.py", "a kernel of mine.v2.py", "kérnel.py"])
def test_any_file_name_will_do(shared: Any, recurrent: str, name: str) -> None:
    path = shared.file(recurrent, name)
    (path.parent / "json.py").write_text("raise ImportError('not this one')\n")
    assert shared.numerics(path, "one_token").outcome == "pass"


def test_a_tensor_of_a_class_of_its_own_is_no_answer(shared: Any, plain: str, changed: Callable[..., str]) -> None:
    odd = "class Odd(torch.Tensor):\n    def detach(self):\n        raise KeyError('odd')\n\n\ndef run("
    path = shared.file(changed(plain, "def run(", odd, "o.to(v.dtype)", "o.to(v.dtype).as_subclass(Odd)"))
    outcome, says = shared.says(path)
    assert outcome == "fail" and "as plain tensors, not of a class of their own; o is a Odd" in says


def test_a_fault_of_the_judge_is_not_the_kernels(shared: Any, plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(*_: object) -> None:
        raise KeyError("odd")

    monkeypatch.setattr(questions.CallQuestion, "judge", odd)
    verdict = shared.numerics(shared.file(plain))
    assert verdict.outcome == "inconclusive"
    assert "the judge failed, which says nothing of the kernel: KeyError: 'odd'" in reasons(verdict)[0]


def test_nothing_asked_is_no_pass() -> None:
    assert stages._outcome({}, ()) == "not_run(no probe was asked for)"
