"""The profiler: sources without comments, timing that does not see differences where none are, suites, small runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kda2.errors import InvalidValue
from kda2.workbench.files import AppendError
from kda2.workbench.profiler import bench, cold, environment, peers, problems, suites
from kda2.workbench.records import BenchRecord

CPU = torch.device("cpu")
SMALL = {"heads": 2, "k": 16, "v": 24, "dtype": "bf16"}
PREFILL = {**SMALL, "seqlens": [20, 13], "gate": "weak"}
STEP = {**SMALL, "batch": 3, "state_dtype": "bf16", "gate": "strong"}


def suite(
    op: str, *cases: dict[str, Any], impls: tuple[str, ...] = ("kda2:torch",), limit: float = 2e-2
) -> suites.Suite:
    return suites.Suite(
        suite="kda-small", op=op, impls=impls, max_rel_err=limit, case=cases, gates=("weak",), samples=3
    )


def plan(given: suites.Suite) -> bench.Plan:
    return bench.Plan(given, tuple(given.cases()), given.impls, given.samples, CPU)


def test_comments_and_docstrings_do_not_change_a_source() -> None:
    bare = environment.bare_source("def f(x):\n    return x + 1\n")
    assert environment.bare_source('"""M."""\n# why\ndef f(x):\n    "d"\n    return x + 1  # so\n') == bare
    assert environment.bare_source("def f(x):\n    return x + 2\n") != bare


def test_the_source_hash_is_that_of_the_kernels() -> None:
    impls = (None, "hopper", "triton", "torch", "reference")
    every, hopper, *others = (environment.source_hash("kda", impl) for impl in impls)
    assert len(every) == len(hopper) == len(others[0]) == 64
    assert len(set(others)) == 1 and len({every, hopper, others[0]}) == 3


@pytest.mark.parametrize(
    ("changed", "impls"),
    [
        ("ops/kda/hopper/fused.py", {None, "hopper"}),
        ("backends/gluon/__init__.py", {None, "hopper"}),
        ("tables/kda/hopper.json", {None, "hopper"}),
        ("ops/kda/triton/state.py", {None, "triton", "torch"}),
        ("ops/kda/torch/stages.py", {None, "triton", "torch"}),
        ("tables/kda/triton.json", {None, "triton", "torch"}),
        ("backends/triton/launch.py", set()),
    ],
)
def test_a_source_counts_where_it_is_used(
    changed: str, impls: set[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(environment.PACKAGE, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(environment.resources, "files", lambda package: tmp_path)
    hashed = environment.source_hash.__wrapped__

    def hashes() -> dict[str | None, str]:
        return {impl: hashed("kda", impl) for impl in (None, "hopper", "triton", "torch")}

    before = hashes()
    with (tmp_path / changed).open("a") as file:
        file.write("\nCHANGED = True\n")
    assert {impl for impl, now in hashes().items() if now != before[impl]} == impls


def test_the_shipped_suites_hold_the_cases_they_promise() -> None:
    prefill, step = suites.load_suite("kda-prefill"), suites.load_suite("kda-step")
    assert len(prefill.cases()) == 24
    assert {suites.case_name(c) for c in prefill.cases(["strong"])} == {
        f"H{h}-{s}-strong"
        for h in (64, 96)
        for s in ("1024", "2048", "4096", "8192", "1300+547+2048+963+271+3063", "8x1024")
    }
    assert {(c["batch"], c["state_dtype"]) for c in step.cases()} == {
        (b, s) for b in (1, 16, 64, 256) for s in ("fp32", "bf16")
    }
    for given in (prefill, step):
        for case in given.cases():
            bench.typed_case(given.op, case)


def test_selecting_cases() -> None:
    cases = suites.load_suite("kda-prefill").cases()
    assert [suites.case_name(c) for c in suites.select(cases, "H96-8192")] == ["H96-8192-strong", "H96-8192-weak"]
    for pattern in ("nothing", "("):
        with pytest.raises(InvalidValue, match="cases must be"):
            suites.select(cases, pattern)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "H4-1024-weak"),
        ({"kv_heads": 4, "k": 128, "v": 128, "dtype": "bf16", "state": "fp32-in-out"}, "H4-1024-weak"),
        ({"kv_heads": 8}, "H4-1024-weak-HV8"),
        ({"k": 64}, "H4-1024-weak-K64"),
        ({"v": 64}, "H4-1024-weak-V64"),
        ({"dtype": "fp32"}, "H4-1024-weak-fp32"),
        ({"state": "none"}, "H4-1024-weak-state-none"),
        ({"family": "tiny_rows"}, "H4-1024-weak-tiny_rows"),
        ({"cold": True}, "H4-1024-weak-cold"),
        ({"kv_heads": 8, "k": 64, "dtype": "fp16", "cold": True}, "H4-1024-weak-HV8-K64-fp16-cold"),
    ],
)
def test_cases_that_differ_have_different_names(change: dict[str, Any], name: str) -> None:
    assert suites.case_name({"heads": 4, "seqlens": [1024], "gate": "weak", **change}) == name


def test_a_step_without_a_state_dtype_has_the_default_in_its_name() -> None:
    assert suites.case_name({"heads": 32, "batch": 16, "gate": "weak"}) == "H32-B16-fp32-weak"


@pytest.mark.parametrize(
    ("change", "words"),
    [({"case": ()}, "case"), ({"impls": ()}, "impls"), ({"gates": ()}, "gates"), ({"suite": "gpu-tests"}, "test runs")],
)
def test_suites_that_measure_nothing_or_write_elsewhere(change: dict[str, Any], words: str) -> None:
    given = suite("kda", PREFILL).model_dump()
    with pytest.raises(ValueError, match=words):
        suites.Suite.model_validate({**given, **change})


def test_a_case_that_names_its_gate_has_no_other() -> None:
    given = suite("kda", {**SMALL, "seqlens": [20]}, PREFILL | {"gate": "none"})
    assert [case["gate"] for case in given.cases(["strong", "weak"])] == ["strong", "weak", "none"]


def test_bad_suites(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"one of \['kda-errors', 'kda-lineage', 'kda-prefill', 'kda-step'\]"):
        suites.load_suite("kda-nothing")
    path = tmp_path / "bad.toml"
    path.write_text('suite = "x"\nop = "kda"\n')
    with pytest.raises(InvalidValue, match="valid suite file"):
        suites.load_suite(str(path))
    with pytest.raises(InvalidValue, match="PrefillCase"):
        bench.typed_case("kda", {**PREFILL, "heads": 0})


@pytest.mark.parametrize("gate", ["strong", "weak", "mixed", "none"])
def test_gate_regimes(gate: str) -> None:
    case = problems.PrefillCase.model_validate({**SMALL, "seqlens": [200], "gate": gate})
    problem = problems.make_problem(case, CPU, 0)
    again = problems.make_problem(case, CPU, 0)
    assert all(torch.equal(x, again.tensors[name]) for name, x in problem.tensors.items())
    decay = problems.LOWER_BOUND * torch.sigmoid(
        problem.tensors["A_log"].exp()[:, None] * (problem.tensors["g"].float() + problem.tensors["dt_bias"])
    )
    mean = decay.mean().item()
    assert {"strong": mean < -2, "weak": -0.1 < mean < 0, "mixed": -2.5 < mean < 0, "none": mean == 0}[gate]


def test_softplus_has_the_inputs_of_strong_and_a_gate_without_a_bound() -> None:
    cases = [bench.typed_case("kda", {**PREFILL, "gate": gate}) for gate in ("strong", "softplus")]
    strong, softplus = (problems.make_problem(case, CPU, 0) for case in cases)
    assert all(torch.equal(x, softplus.tensors[name]) for name, x in strong.tensors.items())
    assert (softplus.gate.kind, softplus.gate.lower_bound) == ("softplus", None)
    assert not torch.allclose(problems.oracle(strong)["o"], problems.oracle(softplus)["o"])


def test_costs_count_every_tensor_once() -> None:
    case = problems.PrefillCase.model_validate({**PREFILL, "kv_heads": 4})
    problem = problems.make_problem(case, CPU, 0)
    tensors = sum(x.nbytes for name, x in problem.tensors.items() if name != "cu_seqlens")
    outputs = problem.tensors["v"].nbytes + problem.tensors["initial_state"].nbytes
    assert problem.costs["bytes"] == tensors + outputs
    assert problem.costs["flops"] == 7 * 33 * 4 * 16 * 24


@pytest.mark.parametrize(("op", "case"), [("kda", PREFILL), ("kda_step", STEP)])
def test_a_run_checks_then_times(op: str, case: dict[str, Any]) -> None:
    said: list[str] = []
    given = suite(op, case, impls=("kda2:torch", "kda2:reference", "flash_kda"))
    records = list(bench.run(plan(given), said.append))
    assert [r.impl for r in records] == ["kda2:torch", "kda2:reference"]
    for r in records:
        assert r.status == "ok"
        assert r.median_us is not None and r.samples == 3 and r.p95_us is None
        assert 0 < r.rel_err["o"] < 6e-3
        assert r.source == environment.source_hash("kda", "torch")
    assert any("flash_kda is not measured" in text for text in said)


def test_a_wrong_result_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = peers._kda2

    def wrong(impl: str, problem: problems.Problem) -> peers.Bound:
        right = bind(impl, problem)
        return peers.Bound(right.call, lambda result: {n: 1.1 * x for n, x in right.read(result).items()})

    monkeypatch.setattr(peers, "_kda2", wrong)
    (record,) = bench.run(plan(suite("kda", PREFILL)), lambda _: None)
    assert record.status.startswith("unsupported(wrong result: relative error o 1.0e-01")
    assert record.median_us is None


def test_a_failing_implementation_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = peers._kda2

    def failing(impl: str, problem: problems.Problem) -> peers.Bound:
        if impl == "torch":
            raise RuntimeError("device-side assert\nand more")
        return bind(impl, problem)

    monkeypatch.setattr(peers, "_kda2", failing)
    torch_, reference = bench.run(plan(suite("kda", PREFILL, impls=("kda2:torch", "kda2:reference"))), lambda _: None)
    assert torch_.status == "unsupported(RuntimeError: device-side assert)"
    assert reference.status == "ok"


def test_an_implementation_that_cannot_serve_says_why() -> None:
    (record,) = bench.run(plan(suite("kda", PREFILL, impls=("kda2:triton",))), lambda _: None)
    wanted = "impl='triton' does not serve this call: tensors are on cpu, wants cuda or interpreter"
    assert record.status.startswith(f"unsupported(UnsupportedTarget: {wanted}")


def test_a_case_that_the_operator_refuses_is_recorded_and_the_next_is_measured() -> None:
    given = suite("kda", {**PREFILL, "k": 400}, PREFILL, impls=("kda2:torch", "kda2:reference"))
    *refused, torch_, reference = bench.run(plan(given), lambda _: None)
    assert [r.impl for r in refused] == ["kda2:torch", "kda2:reference"]
    for r in refused:
        assert r.status == "unsupported(q must be [..., K] with 1 <= K <= 256, got K = 400)"
        assert r.case["k"] == 400 and r.median_us is None
    assert (torch_.status, reference.status) == ("ok", "ok")


def test_a_step_leaves_no_state_behind_between_check_and_clock() -> None:
    problem = problems.make_problem(problems.StepCase.model_validate(STEP), CPU, 0)
    before = problem.tensors["state"].clone()
    bound = peers.find("torch").bind(problem)
    got, _ = bench._first_answer(bound, problem, CPU)
    assert torch.equal(problem.tensors["state"], before)
    assert problems.relative_error(got["state"], problems.oracle(problem)["state"]) < 6e-3


def test_unknown_implementation() -> None:
    with pytest.raises(InvalidValue, match="impl must be one of"):
        peers.find("fastest")


def test_a_peer_that_serves_other_cases_only_says_so() -> None:
    problem = problems.make_problem(problems.PrefillCase.model_validate(PREFILL), CPU, 0)
    with pytest.raises(peers.NotServed, match="K = V = 128 only"):
        peers._flash_kda(None, problem)


def test_cold_start_in_a_new_process() -> None:
    (record,) = cold.run(plan(suite("kda", PREFILL)), lambda _: None)
    assert record.status == "ok"
    assert record.case["cold"] is True
    assert record.median_us is not None and record.samples == 1
    assert record.rel_err["o"] < 6e-3


def test_a_full_disk_tears_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (record,) = bench.run(plan(suite("kda", PREFILL)), lambda _: None)
    write_record, write = bench.Writer(tmp_path, "kda-small"), os.write
    write_record(record)
    before = write_record.path.read_bytes()
    with monkeypatch.context() as m:
        m.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        with pytest.raises(AppendError, match="only 10 of"):
            write_record(record)
    assert write_record.path.read_bytes() == before
    write_record.path.write_bytes(before[:-5])
    with pytest.raises(AppendError, match="torn"):
        bench.Writer(tmp_path, "kda-small")


def test_records_are_written_one_by_one(tmp_path: Path) -> None:
    write = bench.Writer(tmp_path / "new", "kda-small")
    for i, record in enumerate(bench.run(plan(suite("kda", PREFILL, {**PREFILL, "seqlens": [5]})), print), 1):
        write(record)
        assert len(write.path.read_text().splitlines()) == i
    assert BenchRecord.model_validate(json.loads(write.path.read_text().splitlines()[0])).suite == "kda-small"
