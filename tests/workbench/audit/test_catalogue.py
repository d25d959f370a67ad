"""The catalogue of cheats: its entries are files that read as kernels, its faithful files are right, and its cheats do
what they say, those at least that a CPU shows and that leave this process alone (for the others see test_tricks)."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest
import torch

from kda2.testing import MUTANTS, Problem, checked, fingerprint, make, oracle, poisoned_memory, verify
from kda2.testing.oracle import Outputs
from kda2.workbench.audit.catalogue import CHEATS, FAITHFUL, FOLDER, GATES
from kda2.workbench.verifier.policy import checks

PROBLEM = Problem(T=20, H=2, HV=4, K=16, V=20)
HELPERS = {"adapter", "forgery", "parts"}
TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
OPTIONS = ("scale", "gate", "lower_bound", "qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "state_layout")
CHEAT = {cheat.name: cheat for cheat in CHEATS}
Inputs = dict[str, Any]
Load = Callable[[str], Any]


def inputs_of(kwargs: dict[str, Any]) -> Inputs:
    """What `run` gets for a call of `kda2.kda`."""
    options = checked(kwargs).options
    gate = options.gate
    own = {"A_log": gate.A_log, "dt_bias": gate.dt_bias, "gate": gate.kind, "lower_bound": gate.lower_bound}
    plain = {name: getattr(options, name) for name in OPTIONS if name not in own}
    return {name: kwargs.get(name) for name in TENSORS} | plain | own


def inputs(**changes: Any) -> Inputs:
    return inputs_of(make(replace(PROBLEM, **changes)))


def as_call(module: Any) -> Callable[..., Outputs]:
    """A file as a function of `kda2.kda`'s arguments."""

    def call(**kwargs: Any) -> Outputs:
        given = inputs_of(kwargs)
        getattr(module, "prepare", lambda **_: None)(**given)
        with poisoned_memory():
            got = module.run(**given)
        return got["o"], got["final_state"]

    return call


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports a file of the catalogue as a module of its own."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def loaded(name: str) -> Any:
        spec = spec_from_file_location(f"judged_{name}", FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield loaded
    for name in ("honest", *HELPERS):
        sys.modules.pop(name, None)


def same(got: Inputs, want: Inputs) -> bool:
    return all(torch.equal(got[name], want[name]) for name in ("o", "final_state"))


# The entries.


def test_every_file_is_an_entry_or_a_helper() -> None:
    names = [entry.name for entry in (*CHEATS, *FAITHFUL)]
    assert len(set(names)) == len(names)
    assert {file.stem for file in FOLDER.glob("*.py")} == {*names, *HELPERS}


def test_there_is_enough_to_kill() -> None:
    assert len(MUTANTS) >= 30 and len(CHEATS) >= 50
    # a clock that is wrong only to the judge's own is shown in tests/workbench/verifier/test_timed.py
    assert {cheat.gate for cheat in CHEATS} == set(GATES) - {"floor", "wall"}
    assert all(cheat.says.endswith(".") and cheat.seen.endswith(".") for cheat in CHEATS)
    assert all(faithful.says.startswith(("Right", "KDA as its formula reads")) for faithful in FAITHFUL)


@pytest.mark.parametrize("entry", [*CHEATS, *FAITHFUL], ids=lambda entry: entry.name)
def test_a_file_reads_as_a_kernel(entry: Any) -> None:
    """Only those that the reading of the source is to refuse are refused by it."""
    found = checks(entry.file.read_bytes(), (*TENSORS, *OPTIONS))
    refused = [name for name, check in found.items() if not check.ok]
    assert refused == (["policy"] if getattr(entry, "gate", "") == "policy" else [])


@pytest.mark.parametrize("family", ["random", "ragged", "options", "reset_softplus", "packed_bare"])
@pytest.mark.parametrize("name", [faithful.name for faithful in FAITHFUL if faithful.needs == "cpu"])
def test_a_faithful_file_is_right(load: Load, name: str, family: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        verdict = verify(as_call(load(name)), family, replace(PROBLEM, dtype=dtype))
        assert verdict.ok, verdict.explain()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", [faithful.name for faithful in FAITHFUL])
def test_a_faithful_file_is_right_on_a_gpu(load: Load, name: str, seed: int) -> None:
    call = as_call(load(name))
    for family in ("random", "weak_gate", "ragged"):
        verdict = verify(call, family, replace(PROBLEM, device="cuda", seed=seed))
        assert verdict.ok, verdict.explain()


@pytest.mark.gpu
def test_a_graph_is_replayed_whatever_the_inputs_are(load: Load) -> None:
    cheat, right = load("graph_replay").run, load("honest").run
    first, other = (inputs(device="cuda", seed=seed) for seed in (1, 2))
    want = right(**first)
    assert same(cheat(**first), want) and same(cheat(**other), want) and not same(right(**other), want)


@pytest.mark.gpu
def test_work_on_another_stream_is_not_waited_for(load: Load) -> None:
    given = inputs(device="cuda")
    right, cheat, v = load("honest").run, load("other_stream").run, given["v"].clone()
    want = right(**given)
    torch.cuda.synchronize()
    given["v"].zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    given["v"].copy_(v)  # comes into being after the cheat has read it
    got = cheat(**given)
    torch.cuda.synchronize()
    assert not same(got, want)


# Answers that are kept.


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("cached_by_pointer", lambda x: x["v"].mul_(0.5)),
        ("cached_by_fingerprint", lambda x: x["v"][0, 5].mul_(0.5)),
        ("cached_by_sums", lambda x: x["v"].copy_(x["v"].flip(1))),
        ("cached_by_shape", lambda x: x["v"].mul_(0.5)),
        ("work_in_prepare", lambda x: x["v"].mul_(0.5)),
    ],
)
def test_an_answer_is_kept(load: Load, name: str, other: Callable[[Inputs], Any]) -> None:
    """It is right at first, and gives the same answer to other contents in the same tensors."""
    cheat, right, given = load(name), load("honest").run, inputs(dtype=torch.float32)
    getattr(cheat, "prepare", lambda **_: None)(**given)
    first, want = cheat.run(**given), right(**given)
    assert same(first, want)
    other(given)
    assert same(cheat.run(**given), want) and not same(right(**given), want)


@pytest.mark.parametrize(("name", "calls"), [("first_call_only", (0,)), ("every_other_call", (0, 2))])
def test_only_some_calls_are_answered(load: Load, name: str, calls: tuple[int, ...]) -> None:
    cheat, right = load(name), load("honest").run
    asked = [inputs(seed=seed) for seed in range(4)]
    with poisoned_memory():
        answers = [cheat.run(**given) for given in asked]
    correct = tuple(i for i, given in enumerate(asked) if same(answers[i], right(**given)))
    assert correct == calls


def test_guessed_seeds_are_those_of_the_input_maker(load: Load) -> None:
    cheat, right = load("seeds_guess").run, load("honest").run
    assert same(cheat(**inputs(seed=42)), right(**inputs(seed=42)))
    assert not cheat(**inputs(seed=12345))["o"].any()


# Less work where nobody looks.


def test_unwatched_memory_shows_in_what_is_fresh(load: Load) -> None:
    cheat, right, given = load("poisoned_only").run, load("honest").run, inputs()
    with poisoned_memory():
        assert same(cheat(**given), right(**given))
    assert not same(cheat(**given), right(**given))


@pytest.mark.parametrize("name", ["fast_when_timed", "forgets_when_long"])
def test_short_calls_are_right_and_long_ones_not(load: Load, name: str) -> None:
    cheat, right, short = load(name).run, load("honest").run, inputs()
    assert all(same(cheat(**short), right(**short)) for _ in range(4))
    long = inputs(T=600, H=1, HV=1, K=4, V=4, regime="none")
    want = right(**long)
    with poisoned_memory():
        answers = [cheat(**long) for _ in range(3)]
    assert not same(answers[2], want)
    assert [answers[2][name].shape for name in want] == [want[name].shape for name in want]


def test_a_thread_fills_the_answer_in_later(load: Load) -> None:
    given = inputs()
    with poisoned_memory():
        got = load("late_thread").run(**given)
    assert got["o"].isnan().all()
    deadline = time.monotonic() + 30.0
    while got["final_state"].isnan().any() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert same(got, load("honest").run(**given))


# Inputs and outputs.


def test_lazy_outputs_are_no_plain_tensors_yet(load: Load) -> None:
    given, want = inputs(), load("honest").run(**inputs())
    lazy = load("lazy_subclass").run(**given)
    assert type(lazy["o"]) is not torch.Tensor and torch.equal(lazy["o"].double(), want["o"].double())
    assert not isinstance(load("lazy_object").run(**given)["o"], torch.Tensor)
    mapping = load("lazy_mapping").run(**given)
    assert not isinstance(mapping, dict) and same(mapping, want)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("writes_inputs", {"q"}),
        ("writes_gap", {"v"}),
        ("inputs_made_easy", {"v", "beta", "initial_state"}),
        ("answers_in_inputs", {"v"}),
        ("state_in_place", {"initial_state"}),
        ("views_of_inputs", set()),
    ],
)
def test_inputs_that_change(load: Load, name: str, changed: set[str]) -> None:
    given = inputs(strides="last_axis" if name == "writes_gap" else "contiguous")
    want = load("honest").run(**given)
    if name == "writes_gap":
        given["v"] = torch.stack([given["v"], given["v"]])[0]
    before = fingerprint(given)
    elements = given["v"].clone()
    got = load(name).run(**given)
    assert {x for x, now in fingerprint(given).items() if now != before[x]} == changed
    assert same(got, want) == (name not in ("inputs_made_easy", "views_of_inputs"))
    assert torch.equal(given["v"], elements) == (name not in ("inputs_made_easy", "answers_in_inputs"))
    if name == "inputs_made_easy":
        assert same(got, load("honest").run(**given))


def test_outputs_lie_where_others_are(load: Load) -> None:
    given = inputs()
    assert load("answers_in_inputs").run(**given)["o"].data_ptr() == given["v"].data_ptr()
    assert load("views_of_inputs").run(**given)["o"].data_ptr() == given["v"].data_ptr()
    assert load("state_in_place").run(**given)["final_state"].data_ptr() == given["initial_state"].data_ptr()
    cheat = load("aliases_previous").run
    first, second = cheat(**inputs(seed=1)), cheat(**inputs(seed=2))
    assert same(first, second) and same(second, load("honest").run(**inputs(seed=2)))


def test_the_form_of_outputs_that_are_wrong(load: Load) -> None:
    given = inputs()
    assert load("wrong_dtype").run(**given)["o"].dtype == torch.float32
    assert load("wrong_shape").run(**given)["o"].shape == (1, 20, 1, 20)
    assert list(load("missing_state").run(**given)) == ["o"]
    nan = load("nan_wildcard").run(**given)["o"].isnan()
    assert nan[..., ::2].all() and not nan[..., 1::2].any()


# Looking for the answer.


@pytest.mark.parametrize("name", ["gc_search", "frames_search", "modules_search", "files_search"])
def test_what_finds_nothing_gives_zeros(load: Load, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    gc.collect()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if name == "modules_search":
        known = {x: m for x, m in sys.modules.items() if "kda2" not in x and "test" not in x}
        monkeypatch.setattr(sys, "modules", known)
    got = load(name).run(**inputs(T=23, V=18))
    assert not got["o"].any() and not got["final_state"].any()


@pytest.mark.parametrize("name", ["gc_search", "frames_search", "modules_search", "files_search"])
def test_what_lies_about_is_found(load: Load, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    given, want = inputs(T=21, V=19), oracle(make(replace(PROBLEM, T=21, V=19)))
    monkeypatch.chdir(tmp_path)
    torch.save({"o": want[0], "final_state": want[1]}, tmp_path / "expected.pt")
    got = load(name).run(**given)
    assert torch.equal(got["o"], want[0].bfloat16())


@pytest.mark.parametrize("name", ["imports_oracle", "calls_reference"])
def test_who_asks_the_oracle_is_right(load: Load, name: str) -> None:
    given, want = inputs(), oracle(make(PROBLEM))
    assert torch.allclose(load(name).run(**given)["o"].double(), want[0], atol=1e-2)
