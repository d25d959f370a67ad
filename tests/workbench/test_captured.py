"""Benchmarks on captured calls: the case of a call, the same checks and clock as a suite's, peers with its options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kda2
from kda2.errors import InvalidValue
from kda2.testing import Problem as Inputs
from kda2.testing import make
from kda2.workbench import page
from kda2.workbench.capture import Capture, translate
from kda2.workbench.profiler import bench, captured, cold, environment, peers, problems, suites
from kda2.workbench.records import BenchRecord

CPU = torch.device("cpu")
SMALL = Inputs(B=2, T=6, H=1, HV=2, K=8, V=6, dtype=torch.float32)
PACKED = replace(SMALL, B=1, lengths=(4, 0, 3), tail=2)
CALLS = {
    "as in a suite": SMALL,
    "packed, tokens of nobody": PACKED,
    "softplus": replace(SMALL, gate="softplus", dt_bias=False),
    "log": replace(SMALL, gate="log", qk_l2norm=False, beta_sigmoid=False),
    "log, promised": replace(SMALL, gate="log_bounded", scale=0.5),
    "negative eigenvalues": replace(SMALL, neg_eigval=True, layout="vk"),
    "no states": replace(SMALL, state=None, final_state=False),
    "state out": replace(PACKED, state=None, layout="vk"),
    "state in": replace(SMALL, final_state=False, lower_bound=-2.0),
}


def saved(folder: Path, inputs: Inputs = SMALL, **changes: Any) -> Path:
    path = folder / "call.safetensors"
    Capture({**make(inputs), **changes}).save(path)
    return path


def plan(path: Path, *impls: str) -> bench.Plan:
    suite = captured.suite(path)
    return bench.Plan(suite, suite.case, impls, 2, CPU, path)


def problem_of(path: Path) -> problems.Problem:
    (raw,) = captured.suite(path).case
    return bench.problem_of(bench.typed_case("kda", raw), CPU, 0, path)


def test_the_case_of_a_call(tmp_path: Path) -> None:
    path = saved(tmp_path, replace(PACKED, gate="softplus", layout="vk", dtype=torch.bfloat16, g_dtype=torch.float32))
    suite = captured.suite(path)
    digest = environment.file_hash(path)[:12]
    assert (suite.suite, suite.op, len(suite.case)) == ("captured", "kda", 1)
    assert suite.case[0] == {
        "heads": 1, "kv_heads": 2, "k": 8, "v": 6, "dtype": "bf16", "gate": "captured", "seqlens": [4, 0, 3],
        "state": "fp32-in-out",
        "capture": {
            "sha256": digest, "gate": "softplus", "lower_bound": None, "scale": 8**-0.5, "qk_l2norm": True,
            "beta_sigmoid": True, "allow_neg_eigval": False, "state_layout": "vk", "packed": True, "tail": 2,
            "g_dtype": "fp32",
        },
    }  # fmt: skip
    assert suites.case_name(suite.case[0]) == f"H1-4+0+3-captured-HV2-K8-V6-{digest}"


@pytest.mark.parametrize(
    ("inputs", "state"),
    [
        (SMALL, "fp32-in-out"),
        (replace(SMALL, state=torch.bfloat16, final_state=False), "bf16-in"),
        (replace(SMALL, state=None), "fp32-out"),
        (replace(SMALL, state=None, final_state=False), "none"),
    ],
)
def test_states_and_their_bytes(tmp_path: Path, inputs: Inputs, state: str) -> None:
    problem = problem_of(saved(tmp_path, inputs))
    case = problem.case
    assert isinstance(case, problems.CapturedCase) and case.state == state
    assert case.seqlens == (6, 6)
    item = 2 if "bf16" in state else 4
    states = (("in" in state) + ("out" in state)) * item * 2 * 2 * 8 * 6
    tokens = 2 * 6 * 4 * (2 * 8 + 2 * 2 * 6 + 2 * 8 + 2)
    assert problem.costs["bytes"] == tokens + states + 4 * 2 * (8 + 1)


@pytest.mark.parametrize("name", CALLS)
def test_correct_then_timed(tmp_path: Path, name: str) -> None:
    records = list(bench.run(plan(saved(tmp_path, CALLS[name]), "kda2:torch", "kda2:reference", "fla"), lambda _: None))
    assert [(r.impl, r.status, r.suite) for r in records] == [
        ("kda2:torch", "ok", "captured"),
        ("kda2:reference", "ok", "captured"),
    ]
    for r in records:
        assert r.median_us is not None and r.samples == 2
        assert set(r.rel_err) == ({"o", "state"} if CALLS[name].final_state else {"o"})
        assert max(r.rel_err.values()) < 1e-5
        assert BenchRecord.from_line(r.line()) == r


def test_cold(tmp_path: Path) -> None:
    (record,) = cold.run(plan(saved(tmp_path, PACKED), "kda2:torch"), lambda _: None)
    assert (record.status, record.samples) == ("ok", 1)
    assert record.rel_err["o"] < 1e-5


def test_a_call_without_an_answer_is_not_timed(tmp_path: Path) -> None:
    path = saved(tmp_path, SMALL, v=make(SMALL)["v"].fill_(torch.nan))
    (record,) = bench.run(plan(path, "kda2:torch"), lambda _: None)
    assert record.status == "unsupported(the oracle's own answer holds NaN or infinity)"


def test_calls_that_no_benchmark_takes(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="suite must be a capture file"):
        captured.suite(tmp_path / "none.safetensors")
    with pytest.raises(InvalidValue, match="suite must be a call in bf16, fp16, fp32"):
        captured.suite(saved(tmp_path, replace(SMALL, dtype=torch.float64)))
    for empty in (replace(SMALL, lengths=(), tail=3), replace(SMALL, lengths=(0, 0)), replace(SMALL, T=0)):
        with pytest.raises(InvalidValue, match="suite must be a call with a token in a sequence"):
            captured.suite(saved(tmp_path, empty))


def test_a_file_that_changes_under_a_run(tmp_path: Path) -> None:
    given = plan(saved(tmp_path), "kda2:torch")
    saved(tmp_path, replace(SMALL, seed=1))
    with pytest.raises(InvalidValue, match="which has changed"):
        list(bench.run(given, lambda _: None))


def fla_chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    """As FLA's, by the translation that is held to FLA's formula elsewhere."""
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, **options}
    return kda2.kda(**translate.chunk_kda(given), impl="reference")


def cudnn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **options: Any) -> Any:
    """As cuDNN documents its own: packed, states [N, HV, V, K], an empty final state unless asked for."""
    assert options.pop("plan_name") is None
    gate = kda2.Gate.log()
    learned = options.pop("a_log"), options.pop("dt_bias"), options.pop("gate_lower_bound")
    if options.pop("safe_gate"):
        gate = kda2.Gate.bounded(*learned)
    o, state = kda2.kda(
        *(x[None] for x in (q, k, v, g, beta)), gate=gate, cu_seqlens=cu_seqlens, state_layout="vk", impl="reference",
        qk_l2norm=options.pop("use_qk_l2norm_in_kernel"), beta_sigmoid=options.pop("use_beta_sigmoid_in_kernel"),
        **options,
    )  # fmt: skip
    return o[0], v.new_empty(0) if state is None else state


@pytest.mark.parametrize("name", CALLS)
def test_fla_is_asked_the_same(tmp_path: Path, name: str) -> None:
    assert_right(
        peers._fla(SimpleNamespace(chunk_kda=fla_chunk_kda), problem_of(saved(tmp_path, CALLS[name]))), tmp_path
    )


@pytest.mark.parametrize("name", [name for name in CALLS if name != "softplus"])
def test_cudnn_is_asked_the_same(tmp_path: Path, name: str) -> None:
    module = SimpleNamespace(kimi_delta_attention=cudnn)
    assert_right(peers._cudnn(module, problem_of(saved(tmp_path, CALLS[name]))), tmp_path)


def assert_right(bound: peers.Bound, folder: Path) -> None:
    problem = problem_of(folder / "call.safetensors")
    want, got = problems.oracle(problem), problem.owned(bound.read(bound.call()))
    assert set(got) == ({"o", "state"} if problem.options.output_final_state else {"o"})
    assert max(problems.relative_error(x, want[name]) for name, x in got.items()) < 1e-5


LARGE = Inputs(T=3, H=1, HV=1, K=128, V=128, gate="bounded")


def flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, out: Tensor, A_log: Tensor,
    dt_bias: Tensor, lower_bound: float, initial_state: Tensor | None, final_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:  # fmt: skip
    """As FlashKDA's: everything inside, outputs written."""
    o, state = kda2.kda(
        q, k, v, g, beta, gate=kda2.Gate.bounded(A_log, dt_bias, lower_bound), scale=scale, qk_l2norm=True,
        beta_sigmoid=True, initial_state=initial_state, output_final_state=True, state_layout="vk",
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    out.copy_(o)
    if final_state is not None and state is not None:
        final_state.copy_(state)


@pytest.mark.parametrize(
    "inputs",
    [
        LARGE,
        replace(LARGE, state=None, dt_bias=False),
        replace(LARGE, final_state=False, layout="vk", lower_bound=-2.0),
    ],
)
def test_flash_kda_is_asked_the_same(tmp_path: Path, inputs: Inputs) -> None:
    problem = problem_of(saved(tmp_path, inputs))
    bound = peers._flash_kda(SimpleNamespace(fwd=flash_fwd), problem)
    want, got = problems.oracle(problem), bound.read(bound.call())
    assert set(got) == ({"o", "state"} if inputs.final_state else {"o"})
    assert max(problems.relative_error(x, want[name]) for name, x in got.items()) < 6e-3


@pytest.mark.parametrize(
    ("bind", "inputs", "words"),
    [
        (peers._flash_kda, SMALL, "K = V = 128 only"),
        (peers._flash_kda, replace(LARGE, HV=2), "no grouped value heads"),
        (peers._flash_kda, replace(LARGE, gate="softplus"), "its gate is bounded, not softplus"),
        (peers._flash_kda, replace(LARGE, gate="log"), "its gate is bounded, not log"),
        (peers._flash_kda, replace(LARGE, qk_l2norm=False), "norms of q and k"),
        (peers._flash_kda, replace(LARGE, beta_sigmoid=False), "sigmoid of beta"),
        (peers._flash_kda, replace(LARGE, neg_eigval=True), "no negative eigenvalues"),
        (peers._flash_kda, replace(LARGE, beta_dtype=torch.float32), "g and beta in bf16 only"),
        (peers._cudnn, replace(SMALL, gate="softplus"), "it has no softplus gate"),
        (peers._cudnn, replace(SMALL, state=torch.float16), "its states are fp32 or bf16"),
        (peers._fla, replace(SMALL, state=torch.bfloat16), "its initial state is fp32"),
    ],
)
def test_what_a_peer_does_not_serve(tmp_path: Path, bind: Any, inputs: Inputs, words: str) -> None:
    with pytest.raises(peers.NotServed, match=words):
        bind(None, problem_of(saved(tmp_path, inputs)))


def test_captured_calls_are_on_no_page(tmp_path: Path) -> None:
    write = bench.Writer(tmp_path / "records", "captured")
    for record in bench.run(plan(saved(tmp_path), "kda2:torch"), lambda _: None):
        write(record)
    records = page.load(tmp_path / "records")
    assert records.suites == {}
    assert "captured" not in page.page(records) and page.stale(records) == {}


def test_no_suite_takes_the_name_or_the_gate(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "benchmarks" / "suites" / "kda-step.toml").read_text()
    path = tmp_path / "x.toml"
    for old, new, words in (
        ('suite = "kda-step"', 'suite = "captured"', "suite must be of another name than 'captured'"),
        ('gates = ["strong", "weak"]', 'gates = ["captured"]', "suite must be a valid suite file"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(InvalidValue, match=words):
            suites.load_suite(str(path))
