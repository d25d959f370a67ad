"""Ablation: the rule that names a bound, launches left out and doubled, and times that never pass for records."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import typer
from torch import Tensor
from triton.runtime.jit import JITFunction
from typer.testing import CliRunner

import kda2
from kda2.cli.ablate import ablate as ablate_command
from kda2.cli.ablate import tell
from kda2.device import interpreted
from kda2.errors import InvalidValue, KDA2Error
from kda2.testing import Problem, checked, make, verify_call
from kda2.workbench import ledger as ledgers
from kda2.workbench import page
from kda2.workbench.capture import Capture
from kda2.workbench.journal import Journal
from kda2.workbench.profiler.ablation import LABEL, Ablation, Floor, Measured, classify
from kda2.workbench.profiler.ablation import measure as measuring
from kda2.workbench.profiler.ablation.intercept import altered, emptied, record
from kda2.workbench.profiler.ablation.measure import ablate, halved
from kda2.workbench.profiler.ablation.planned import arithmetic_floors
from kda2.workbench.profiler.timing import Timing
from kda2.workbench.records import BadRecord, BenchRecord, TestRun

pytestmark = pytest.mark.skipif(interpreted(), reason="launches of the interpreter are no launches")
CPU = torch.device("cpu")


# --- the rule ---


def full(**changes: Any) -> Measured:
    """A stage of 528 programs on 132 multiprocessors, two at once on each, that nothing binds yet."""
    facts: dict[str, Any] = {
        "us": 100.0, "call_us": 20.0, "launches": 1, "empty_us": 3.0, "memory": Floor(20.0, "85 MB at 4.24 TB/s"),
        "arithmetic": Floor(10.0, "7 GFLOP at 708 TFLOP/s"), "programs": 528, "resident": 2, "sms": 132,
        "one_us": 23.0, "more_us": 25.0, "more": 2.0,
    }  # fmt: skip
    return Measured(**{**facts, **changes})


@pytest.mark.parametrize(
    ("changes", "name", "says"),
    [
        ({"memory": Floor(61.0, "259 MB at 4.24 TB/s")}, "memory", "259 MB at 4.24 TB/s take 61.0 us, 61% of the time"),
        ({"memory": Floor(59.0, "a")}, "latency", "a take 59.0 us, 59% of the time"),
        ({"memory": Floor(130.0, "a")}, "latency", "a take 130.0 us, 130% of the time: the cache serves them"),
        ({"arithmetic": Floor(80.0, "57 GFLOP")}, "arithmetic", "57 GFLOP take 80.0 us, 80% of the time"),
        ({"memory": Floor(70.0, "a"), "arithmetic": Floor(80.0, "b")}, "arithmetic", "b take 80.0 us"),
        ({"memory": Floor(90.0, "a"), "arithmetic": Floor(80.0, "b")}, "memory", "a take 90.0 us"),
        ({"empty_us": 50.0}, "launches", "1 empty launch takes 50.0 us, 50% of 100.0"),
        ({"empty_us": 60.0, "launches": 20, "memory": Floor(90.0, "a")}, "launches", "20 empty launches take 60.0 us"),
        ({"call_us": 150.0}, "launches", "the host takes 150.0 us to enqueue what the device does in 100.0"),
        ({"host_paced": True}, "launches", "more launches than the device's queue holds"),
        ({}, "latency", "one program on each multiprocessor takes 23.0 us, 2 take 25.0: one more costs 0.10 of the"),
        ({"more_us": 41.0}, "arithmetic", "one more costs 0.90 of the first, so they compete for issue slots"),
        # eight more programs at a fifth of the first's price each
        ({"more_us": 55.0, "more": 9.0}, "latency", "9 take 55.0: one more costs 0.20 of the first"),
        ({"one_us": None, "resident": 1}, "latency", "one program at a time fits on a multiprocessor"),
        ({"one_us": None, "programs": 64}, "latency", "its 64 programs have 132 multiprocessors"),
        ({"programs": 66, "arithmetic": Floor(35.0, "b")}, "arithmetic",
         "b take 70.0 us on the 50% of multiprocessors that have a program, 70% of the time"),
        ({"one_us": None}, "unclear", "nothing was timed that tells waiting from competing"),
        ({"one_us": None, "programs": None, "half_us": 50.0}, "unclear", "no launch was seen"),
        ({"one_us": None, "programs": None, "half_us": 85.0}, "latency", "0.85 of the time"),
    ],
)  # fmt: skip
def test_the_rule(changes: Mapping[str, Any], name: str, says: str) -> None:
    found = classify(full(**changes))
    assert found.name == name
    assert says in "; ".join(found.evidence)


def test_a_bound_is_named_from_what_there_is() -> None:
    assert classify(Measured(us=10.0)).name == "unclear"
    assert classify(Measured(us=10.0, memory=Floor(9.0, "a"))).name == "memory"


# --- launches ---


@triton.jit
def first(x, n):  # type: ignore[no-untyped-def]
    pass


@triton.jit
def second(x, y, BLOCK: triton.language.constexpr = 64):  # type: ignore[no-untyped-def]
    pass


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """What reaches a launcher that launches nothing: the kernel's name and its grid."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        shape = grid({"BLOCK": 64, **kwargs}) if callable(grid) else grid
        seen.append((self.fn.__name__, tuple(shape)))
        metadata = SimpleNamespace(num_warps=4, shared=100_000)
        return SimpleNamespace(n_regs=64, metadata=metadata)

    monkeypatch.setattr(JITFunction, "run", run)
    return seen


def three_launches() -> str:
    x = torch.zeros(1000)
    first[(4, 2)](x, 3)
    second[lambda meta: (256 // meta["BLOCK"],)](x, torch.zeros(10), num_warps=8)
    first[(5,)](x, 4)
    return "done"


def test_launches_are_recorded_while_they_run(made: list[Any]) -> None:
    found = record(three_launches, 90)
    assert made == [("first", (4, 2)), ("second", (4,)), ("first", (5,))]
    assert [(x.stage, x.programs, x.resident) for x in found] == [("first", 8, 2), ("second", 4, 2), ("first", 5, 2)]
    assert [x.nbytes for x in found] == [4000, 4040, 4000]
    found[1].again()
    assert made[3:] == [("second", (4,))]


def test_the_librarys_own_launches_are_seen_with_their_bytes(made: list[Any]) -> None:
    """Behind TMA descriptors too; a tensor that is handed over twice counts once."""
    from kda2.ops.kda.hopper import launches as fused_launches
    from kda2.ops.kda.triton import launches as staged_launches

    call = checked(make(Problem(T=64, H=2, HV=2, K=128, V=128)))
    tokens = 64 * 2 * 128
    # q, k, v, g, o in bf16; beta; A_log, dt_bias; both states in fp32
    once = 5 * 2 * tokens + 64 * 2 * 2 + 4 * 2 + 4 * 2 * 128 + 2 * 4 * 2 * 128 * 128
    (fused,) = record(lambda: [launch.run() for launch in fused_launches(call)], 90)
    assert (fused.stage, fused.nbytes) == ("kda_fused", once)
    found = {x.stage: x for x in record(lambda: [launch.run() for launch in staged_launches(call)], 90)}
    assert list(found) == ["kda_prepare", "kda_state", "kda_output"]
    # two chunks of 32 tokens a head: Qd, Vn [64, 128], S [2, 128, 128] in bf16, q, k, g, o, and what the gate learned
    assert found["kda_output"].nbytes == 2 * (6 * tokens + 2 * 2 * 128 * 128) + 4 * 2 + 4 * 2 * 128


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({"without": "first"}, ["second"]),
        ({"without": "second"}, ["first", "first"]),
        ({"twice": "second"}, ["first", "second", "second", "first"]),
        ({"twice": "first"}, ["first", "first", "second", "first", "first"]),
        ({}, ["first", "second", "first"]),
    ],
)
def test_a_stage_is_left_out_or_doubled_with_all_its_launches(
    made: list[Any], how: dict[str, Any], left: list[str]
) -> None:
    assert altered(three_launches, **how)() == "done"
    assert [name for name, _ in made] == left


@pytest.mark.parametrize(
    ("most", "cut"), [(8, (4, 2)), (100, (4, 2)), (6, (4, 1)), (4, (4, 1)), (3, (3, 1)), (1, (1, 1))]
)
def test_a_grid_is_cut_to_its_beginning(made: list[Any], most: int, cut: tuple[int, ...]) -> None:
    launched = record(three_launches, 90)[0]
    assert launched.cut(most) == cut
    launched.over(cut)
    assert made[-1] == ("first", cut)


def test_empty_kernels_have_the_grids_of_those_they_stand_for(made: list[Any]) -> None:
    launched = record(three_launches, 90)
    made.clear()
    emptied(launched, torch.zeros(1))()
    assert made == [("_nothing", (4, 2)), ("_nothing", (4,)), ("_nothing", (5,))]
    assert [x.warps for x in launched] == [4, 8, 4]


def test_afterwards_launches_are_as_before(made: list[Any]) -> None:
    launcher = JITFunction.run

    def fails() -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        altered(fails, without="first")()
    assert JITFunction.run is launcher


# --- measuring, on a clock that is not there ---

PROBLEM = Problem(T=20, H=2, HV=2, K=8, V=8)


def with_launches(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """KDA in torch that also launches `first` and `second`, which do nothing here."""
    o, state = kda2.kda(**kwargs, impl="torch")
    first[(kwargs["q"].shape[2],)](o, 3)
    second[(kwargs["q"].shape[2],)](o, o)
    return o, state


def simulated(us: Callable[[Sequence[str]], float], made: list[Any]) -> Callable[..., dict[str, Timing]]:
    """A clock for calls by what they launch: `us` of the names of their launches."""

    def interleave(calls: Mapping[str, Sequence[Any]], samples: int, where: Any, **rest: Any) -> dict[str, Timing]:
        found = {}
        for name, own in calls.items():
            made.clear()
            own[0]()
            time = us([kernel for kernel, _ in made])
            found[name] = Timing((time,) * samples, (1.0,) * samples)
        return found

    return interleave


def by_kernel(names: Sequence[str]) -> float:
    return sum({"first": 60.0, "second": 30.0, "_nothing": 1.0}[n] for n in names) + 5.0


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch, made: list[Any]) -> Ablation:
    monkeypatch.setattr(measuring, "interleave", simulated(by_kernel, made))
    return ablate(with_launches, "torch and more", Capture(make(PROBLEM)), CPU)


def test_each_stage_is_left_out_and_doubled(ablation: Ablation) -> None:
    times = {v.name: v.device_us for v in ablation.variants}
    assert times == {
        "as it is": 95.0, "without first": 35.0, "first twice": 155.0, "without second": 65.0, "second twice": 125.0,
        "empty launches": 7.0, "half the heads": 95.0,
    }  # fmt: skip
    stages = {s.name: (s.alone_us, s.saves_us, s.adds_us, s.launches, s.programs) for s in ablation.stages}
    assert stages == {"first": (65.0, 60.0, 60.0, 1, 2), "second": (35.0, 30.0, 30.0, 1, 2)}


def test_the_longest_stage_names_the_bound(ablation: Ablation) -> None:
    assert ablation.evidence[0] == "first takes 65.0 us by itself, 65% of all stages"
    assert ablation.bound == next(s.bound for s in ablation.stages if s.name == "first")


def test_stages_that_are_not_what_takes_the_time_do_not_name_it(
    monkeypatch: pytest.MonkeyPatch, made: list[Any]
) -> None:
    """Most of the call is kernels that nobody saw launched."""
    clock = simulated(lambda names: by_kernel(names) + (500.0 if "second" in names and len(names) > 1 else 0.0), made)
    monkeypatch.setattr(measuring, "interleave", clock)
    found = ablate(with_launches, "torch and more", Capture(make(PROBLEM)), CPU)
    assert found.evidence[0] == "its stages take 100.0 of 595.0 us by themselves: most is not theirs"


def test_variants_are_labelled(ablation: Ablation) -> None:
    assert {v.name for v in ablation.variants if not v.wrong} == {"as it is", "half the heads"}
    assert ablation.label == LABEL == "wrong on purpose"


def test_stages_can_be_chosen(monkeypatch: pytest.MonkeyPatch, made: list[Any]) -> None:
    monkeypatch.setattr(measuring, "interleave", simulated(by_kernel, made))
    found = ablate(with_launches, "x", Capture(make(PROBLEM)), CPU, stages="sec")
    assert [v.name for v in found.variants if "first" in v.name] == []
    assert [(s.name, s.saves_us) for s in found.stages] == [("first", None), ("second", 30.0)]
    with pytest.raises(InvalidValue, match="first, second"):
        ablate(with_launches, "x", Capture(make(PROBLEM)), CPU, stages="third")


def test_a_call_without_launches_has_no_stages(monkeypatch: pytest.MonkeyPatch, made: list[Any]) -> None:
    monkeypatch.setattr(measuring, "interleave", simulated(by_kernel, made))
    said: list[str] = []
    run = lambda **kwargs: kda2.kda(**kwargs, impl="torch")  # noqa: E731
    found = ablate(run, "torch", Capture(make(PROBLEM)), CPU, say=said.append)
    assert ([v.name for v in found.variants], found.stages) == (["as it is", "half the heads"], ())
    assert said == ["it makes no launches of Triton's: no stage can be left out"]


def test_a_variant_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, made: list[Any]) -> None:
    """Host code that reads what the stage left out should have written."""
    monkeypatch.setattr(measuring, "interleave", simulated(by_kernel, made))

    def run(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
        before = len(made)
        got = with_launches(**kwargs)
        if ("first", (2,)) not in made[before:] and ("second", (2,)) in made[before:]:
            raise RuntimeError("nothing there\nat all")
        return got

    found = ablate(run, "reads", Capture(make(PROBLEM)), CPU)
    failed = {v.name: v.failed for v in found.variants if v.failed}
    assert failed == {"without first": "RuntimeError: nothing there"}
    assert next(s for s in found.stages if s.name == "first").saves_us is None


def test_a_variant_that_breaks_the_gpu_ends_it(monkeypatch: pytest.MonkeyPatch, made: list[Any]) -> None:
    monkeypatch.setattr(measuring, "interleave", simulated(by_kernel, made))

    def run(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
        before = len(made)
        got = with_launches(**kwargs)
        if [n for n, _ in made[before:]] == ["second"]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return got

    with pytest.raises(KDA2Error, match=r"without first: it broke the GPU .* choose other stages"):
        ablate(run, "breaks", Capture(make(PROBLEM)), CPU)


def test_a_wrong_kernel_is_not_ablated(made: list[Any]) -> None:
    def run(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
        o, state = with_launches(**kwargs)
        return 1.2 * o, state

    with pytest.raises(KDA2Error, match="wrong as it is"):
        ablate(run, "x", Capture(make(PROBLEM)), CPU)


@pytest.mark.parametrize(
    ("problem", "what", "shape"),
    [
        (Problem(T=8, H=2, HV=4, K=8, V=8), "heads", (1, 8, 1, 2)),
        (Problem(B=4, T=8, H=1, HV=2, K=8, V=8), "sequences", (2, 8, 1, 2)),
        (Problem(lengths=(3, 4, 5, 6), H=1, HV=3, K=8, V=8), "sequences", (1, 7, 1, 3)),
    ],
)
def test_half_the_parallel_work_is_a_call_of_its_own(problem: Problem, what: str, shape: tuple[int, ...]) -> None:
    half, named = halved(Capture(make(problem)))
    assert half is not None and named == what
    B, T, H, _ = half.kwargs["q"].shape
    assert (B, T, H, half.kwargs["v"].shape[2]) == shape
    assert verify_call(lambda **kwargs: kda2.kda(**kwargs, impl="torch"), "half", half.kwargs)


def test_one_sequence_of_one_head_has_no_half() -> None:
    assert halved(Capture(make(Problem(T=8, H=1, HV=1, K=8, V=8))))[0] is None


def test_the_plans_operations_are_floors_of_the_librarys_stages() -> None:
    capture = Capture(make(Problem(T=64, H=2, HV=2, K=128, V=128)))
    triton_floors, hopper = (arithmetic_floors(impl, capture, 90) for impl in ("triton", "hopper"))
    assert set(triton_floors) == {"kda_prepare", "kda_state", "kda_output"} and set(hopper) == {"kda_fused"}
    assert all(floor.us > 0 for floor in (*triton_floors.values(), *hopper.values()))
    assert arithmetic_floors("torch", capture, 90) == {} == arithmetic_floors("mine.py", capture, 90)


# --- no record ---


def test_an_ablation_is_no_record(ablation: Ablation, tmp_path: Path) -> None:
    for model in (BenchRecord, TestRun):
        with pytest.raises(BadRecord):
            model.from_line(ablation.line())
    fields = json.loads(ablation.line())
    assert fields["kind"] == "ablation" and fields["label"] == "wrong on purpose"
    assert not {"median_us", "p95_us", "suite", "impl", "status"} & set(fields)
    assert Ablation.from_line(ablation.line()) == ablation


def test_the_page_of_records_ignores_it(ablation: Ablation, tmp_path: Path) -> None:
    (tmp_path / "ablation.json").write_text(ablation.line() + "\n")
    records = page.load(tmp_path)
    assert records.suites == {} and "torch and more" not in page.page(records)


def test_a_ledger_line_of_its_own_kind(monkeypatch: pytest.MonkeyPatch, made: list[Any], tmp_path: Path) -> None:
    monkeypatch.setattr(measuring, "interleave", simulated(by_kernel, made))
    journal = Journal(tmp_path / "ledger.jsonl")
    found = ablate(with_launches, "x", Capture(make(PROBLEM)), CPU, journal=journal)
    (line,) = ledgers.read(tmp_path / "ledger.jsonl")
    assert line.kind == "ablation" and Ablation.model_validate(line.payload) == found
    assert not Journal.reading(tmp_path / "ledger.jsonl").candidates


# --- as a user meets it ---

app = typer.Typer()
app.command()(ablate_command)


def test_what_is_printed_is_labelled(ablation: Ablation, capsys: pytest.CaptureFixture[str]) -> None:
    tell(ablation)
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if "twice" in line or "without" in line]
    assert len(rows) == 4 and all("wrong on purpose" in row for row in rows)
    assert "first (1 launch, 2 programs): 65.0 us by itself; left out it saves 60.0 us, doubled it adds 60.0" in said
    assert f"torch and more is bound by {ablation.bound}" in said
    assert "they enter no table and no record" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["triton", "--out", "records.jsonl"], "--out must be a file whose name ends in .json"),
        (["tritno"], "WHAT must be a Python file, or one of"),
        (["hopper", "--problem", "K=7"], "--problem must be K and V that hopper serves"),
        (["triton", "--problem", "T=9", "--inputs", "x.safetensors"], "--problem must be absent beside --inputs"),
        (["triton", "--problem", "H=3,HV=4"], "--problem must be HV a multiple of H"),
    ],
)
def test_bad_usage(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert words in done.stderr


def test_without_a_gpu_nothing_is_timed() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = CliRunner().invoke(app, ["triton", "--problem", "T=32,H=1", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["ablation"]) == (0, None)


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", pytest.param("hopper", marks=pytest.mark.hopper)])
def test_the_librarys_own_kernels_are_ablated(impl: str) -> None:
    where = torch.device("cuda", 0)
    capture = Capture(make(Problem(T=2048, H=8, HV=8, K=128, V=128)))
    run = lambda **kwargs: kda2.kda(**kwargs, impl=impl)  # noqa: E731
    found = ablate(run, impl, capture, where, samples=40, arithmetic=arithmetic_floors(impl, capture, 90))
    stages = {"triton": ["kda_prepare", "kda_state", "kda_output"], "hopper": ["kda_fused"]}[impl]
    assert [s.name for s in found.stages] == stages
    assert all(s.saves_us is not None and s.adds_us is not None and s.resident for s in found.stages)
    assert not [v.failed for v in found.variants if v.failed]
    assert found.bound in ("memory", "arithmetic", "latency", "launches")
    assert verify_call(run, "afterwards", capture.to(where).kwargs)
