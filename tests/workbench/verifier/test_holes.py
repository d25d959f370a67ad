"""Mistakes that small square probes would not show, each refused at the sizes and families that every file gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kda2.testing import Problem, make
from kda2.workbench.capture import Capture
from kda2.workbench.loop import FILE_SIZES, GPU_SIZES
from kda2.workbench.verifier.words import reasons

GIVEN, KEPT = "\n    if initial_state is not None:\n", "        states[n] = S\n"
BUFFER = "    o = torch.zeros(B, T, HV, V)\n"
MISTAKES = {
    "only the first row of a batch": ("random", ["    return {", "    o[1:] = 0\n    return {"]),
    "heads paired the other way": ("random", ["x.repeat_interleave(HV // H, 2)", "x.repeat(1, 1, HV // H, 1)"]),
    "a state as wide as its keys": ("random", ["torch.zeros(len(rows), HV, K, V)", "torch.zeros(len(rows), HV, K, K)"]),
    "a lower bound of its own": ("options", ["else lower_bound *", "else -5.0 *"]),
    "a scale of its own": ("options", ["scale * (S", "K**-0.5 * (S"]),
    "a packed call without a state": ("packed_bare", [GIVEN, f"\n    assert initial_state is not None{GIVEN}"]),
    "sequences that hand their state on": ("packed_bare", [KEPT, f"{KEPT}        states[n + 1 :] = S\n"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_refused(mistake: str, shared: Any, plain: str, changed: Callable[..., str]) -> None:
    family, pairs = MISTAKES[mistake]
    verdict = shared.numerics(shared.file(changed(plain, *pairs)), family, sizes=FILE_SIZES)
    assert verdict.outcome == "fail", mistake


def test_the_right_kernel_passes_at_these_sizes(shared: Any, plain: str) -> None:
    verdict = shared.numerics(shared.file(plain), "random", "options", "bare", "packed_bare", sizes=FILE_SIZES)
    assert verdict.outcome == "pass", reasons(verdict)


@pytest.mark.parametrize("sizes", [FILE_SIZES, GPU_SIZES], ids=["cpu", "gpu"])
def test_no_axis_hides_another(sizes: dict[str, int]) -> None:
    assert sizes["B"] > 1 and 1 < sizes["H"] < sizes["HV"] and sizes["K"] != sizes["V"]
    assert sizes["V"] & (sizes["V"] - 1)


def test_an_answer_that_the_next_call_overwrites(shared: Any, plain: str, changed: Callable[..., str]) -> None:
    kept = changed(
        plain,
        BUFFER,
        "    o = kept.setdefault((B, T), torch.zeros(B, T, HV, V)).zero_()\n",
        "def run(",
        "kept = {}\n\n\ndef run(",
    )
    kept = changed(
        kept,
        '"o": o.to(v.dtype)',
        '"o": out.setdefault((B, T), torch.zeros(B, T, HV, V, dtype=v.dtype)).copy_(o)',
        "kept = {}",
        "kept, out = {}, {}",
    )
    verdict = shared.numerics(shared.file(kept), "random", "no_decay")
    assert verdict.outcome == "fail"
    assert "no_decay: run wrote into what it had returned for another call" in reasons(verdict)[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (r"raise ValueError('\ud800 bad')", "ValueError: ? bad"),
        ("raise GeneratorExit", "GeneratorExit, which is for the process's own end"),
        ("raise Mute", "Mute: its message cannot be read"),
    ],
)
def test_exceptions_that_are_hard_to_tell(
    line: str, words: str, shared: Any, plain: str, changed: Callable[..., str]
) -> None:
    mute = "class Mute(Exception):\n    def __str__(self):\n        raise RuntimeError\n\n\ndef run("
    text = changed(plain, BUFFER, f"    {line}\n{BUFFER}", "def run(", mute)
    verdict = shared.numerics(shared.file(text), "random", "one_token")
    assert verdict.outcome == "fail" and len(verdict.evidence["families"]) == 2
    assert words in reasons(verdict)[0]


def test_a_default_dtype_set_on_import_stays_in_the_file(shared: Any, plain: str, changed: Callable[..., str]) -> None:
    text = changed(plain, "import torch\n", "import torch\n\ntorch.set_default_dtype(torch.float64)\n")
    assert shared.numerics(shared.file(text), "random").outcome == "pass"


def test_a_call_without_a_finite_answer_judges_nobody(shared: Any, plain: str, tmp_path: Path) -> None:
    kwargs = make(Problem(T=9, H=1, HV=1, K=16, V=16))
    v = kwargs["v"].clone()
    v[0, 3] = torch.nan
    Capture({**kwargs, "v": v}).save(tmp_path / "nan.safetensors")
    verdict = shared.numerics(shared.file(plain), "one_token", capture=str(tmp_path / "nan.safetensors"))
    assert verdict.outcome == "inconclusive"
    assert "has no finite answer to hold anything against: o: the reference itself has " in reasons(verdict)[0]
