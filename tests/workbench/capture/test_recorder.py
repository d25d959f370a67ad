"""Recording in a program: what is kept, when, under which limits, and that the program never feels it."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import kda2
from kda2.errors import InvalidValue
from kda2.testing import Problem, make, make_step
from kda2.workbench.capture import Capture, recording
from kda2.workbench.capture.recorder import SOURCES, of_process
from kda2.workbench.capture.site import sitecustomize
from kda2.workbench.capture.store import Claims

CALL = make(Problem(T=3, H=1, HV=1, K=4, V=4))
OTHER = make(Problem(T=4, H=1, HV=1, K=4, V=4))


def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float = 1.0, **kwargs: Any) -> Tensor:
    """Stands for FLA's."""
    return v


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of FLA, and a layer that has taken the function from it by name."""
    module, layer = ModuleType("fla.ops.kda.chunk"), ModuleType("layer")
    module.chunk_kda = layer.attend = chunk_kda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.ops.kda.chunk", module)
    monkeypatch.setitem(sys.modules, "layer", layer)
    return layer


def test_what_is_recorded_stays_as_it_was() -> None:
    """Models write their next inputs over the last ones, and learn."""
    kwargs = make(Problem(T=3, gate="softplus"))
    before = {name: x.clone() for name, x in kwargs.items() if isinstance(x, torch.Tensor)}
    gate = kwargs["gate"]
    A_log, dt_bias = gate.A_log.clone(), gate.dt_bias.clone()
    with recording() as calls:
        kda2.kda(**kwargs)
    for x in (*(kwargs[name] for name in before), gate.A_log, gate.dt_bias):
        x.zero_()
    assert {"q", "k", "v", "g", "beta", "initial_state"} <= before.keys()
    for name, x in before.items():
        assert torch.equal(calls[0].kwargs[name], x), name
    assert torch.equal(calls[0].gate.A_log, A_log) and torch.equal(calls[0].gate.dt_bias, dt_bias)


def test_a_call_that_raises_is_not_recorded() -> None:
    kwargs = make(Problem(T=3))
    with recording() as calls:
        with pytest.raises(InvalidValue, match="impl must be"):
            kda2.kda(**kwargs, impl="nothing")
        with pytest.raises(InvalidValue, match="v must be"):
            kda2.kda(**{**kwargs, "v": kwargs["v"][:, :2]})
    assert calls == []


def test_recording_ends() -> None:
    original = kda2.kda
    with recording() as calls:
        kda2.kda(**make(Problem(T=3)))
    kda2.kda(**make(Problem(T=3)))
    assert kda2.kda is original
    assert len(calls) == 1


def test_steps_are_recorded_before_their_state_is_written() -> None:
    step = make_step(Problem(B=2, H=1, HV=1, K=4, V=4, dtype=torch.float32))
    before = step["state"].clone()
    with recording() as calls:
        kda2.kda_step(**step)
    assert torch.equal(calls[0].kwargs["initial_state"], before) and not torch.equal(step["state"], before)
    assert calls[0].kwargs["q"].shape == (2, 1, 1, 4)
    assert calls[0].origin["function"] == "kda2.kda_step"
    assert calls[0].origin["shapes"]["q"] == [2, 1, 4]


def test_whoever_makes_the_call(fla: Any) -> None:
    """By any name in any module, until the recording ends."""
    tokens = [CALL[name] for name in ("q", "k", "v", "g", "beta")]
    with recording() as calls:
        kept = fla.attend
        fla.attend(*tokens, 0.5, use_qk_l2norm_in_kernel=True)
    assert calls[0].kwargs["scale"] == 0.5 and calls[0].kwargs["qk_l2norm"] is True
    assert fla.attend is chunk_kda
    kept(*tokens)
    assert len(calls) == 1


def test_a_call_with_no_words_for_it_is_a_warning(fla: Any) -> None:
    tokens = [CALL[name] for name in ("q", "k", "v", "g", "beta")]
    with recording() as calls, pytest.warns(UserWarning, match="fla.ops.kda.chunk_kda: cp_context"):
        assert fla.attend(*tokens, cp_context=object()) is tokens[2]
    with recording() as calls, pytest.warns(UserWarning, match="k must be"):
        fla.attend(tokens[0], tokens[1][:, :1], *tokens[2:])
    assert calls == []


def test_a_call_inside_a_recorded_one_is_part_of_it(fla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def over_kda2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        return kda2.kda(q, k, v, g, beta)

    monkeypatch.setattr(sys.modules["fla.ops.kda.chunk"], "chunk_kda", over_kda2)
    monkeypatch.setattr(fla, "attend", over_kda2)
    with recording() as calls:
        fla.attend(*(CALL[name] for name in ("q", "k", "v", "g", "beta")))
    assert [c.origin["function"] for c in calls] == ["fla.ops.kda.chunk_kda"]


def test_the_oracle_is_no_model() -> None:
    from kda2.testing import oracle

    with recording() as calls:
        oracle(CALL)
    assert calls == []


def test_a_transformed_call_is_none_on_numbers() -> None:
    with recording() as calls:
        q = CALL["q"].float()
        rest = {name: CALL[name].float() for name in ("k", "v", "g", "beta")}
        torch.func.vmap(lambda x: kda2.kda(x, **rest, impl="reference")[0])(q[None])
    assert calls == []


def test_the_first_call_of_each_kind_is_a_file(tmp_path: Path) -> None:
    with recording(folder=tmp_path) as paths:
        first, _ = kda2.kda(**CALL)
        for kwargs in ({**CALL, "q": -CALL["q"]}, OTHER, {**CALL, "scale": 2.0}, {**CALL, "impl": "torch"}):
            kda2.kda(**kwargs)
    assert [Capture.load(p).kwargs["q"].shape[1] for p in paths] == [3, 4, 3, 3]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert torch.equal(kda2.kda(**Capture.load(paths[0]).kwargs)[0], first)
    origin = Capture.load(paths[3]).origin
    assert (origin["call"], origin["impl"], origin["package"]) == (4, "torch", f"kda2 {kda2.__version__}")


def test_every_call_up_to_a_limit(tmp_path: Path) -> None:
    with recording(folder=tmp_path, limit=2, every=True) as paths:
        for _ in range(4):
            kda2.kda(**CALL)
    assert [Capture.load(p).origin["call"] for p in paths] == [0, 1]


def test_a_second_recording_spoils_no_first_one(tmp_path: Path) -> None:
    for _ in range(2):
        with recording(folder=tmp_path):
            kda2.kda(**CALL)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_call_that_raised_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    step = make_step(Problem(B=1, H=1, HV=1, K=4, V=4, dtype=torch.float32))
    with recording(folder=tmp_path) as paths:
        with pytest.raises(InvalidValue, match="out must be"):
            kda2.kda_step(**step, out=step["state"][0, :, 0][None])
        kda2.kda_step(**step, out=torch.empty_like(step["v"]))
    assert len(paths) == 1


def test_a_full_disk_is_one_warning_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []

    def full(self: Capture, path: Path) -> str:
        tried.append(path)
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Capture, "save", full)
    with warnings.catch_warnings(record=True) as warned, recording(folder=tmp_path) as paths:
        for kwargs in (CALL, OTHER):
            kda2.kda(**kwargs)
    assert (len(tried), paths) == (1, [])
    assert [str(w.message).partition(":")[0] for w in warned] == ["No space left on device"]


def test_one_claimant_gets_a_name(tmp_path: Path) -> None:
    ours, theirs = Claims(tmp_path), Claims(tmp_path)
    assert ours.take("call-1") and not theirs.take("call-1") and theirs.take("call-2")
    ours.give_back("call-1")
    assert ours.take("call-1") and not ours.take("call-1")


def test_processes_share_kinds_and_limit(tmp_path: Path) -> None:
    control, folder = tmp_path / "control", tmp_path / "out"
    control.mkdir()
    (control / "settings.json").write_text(json.dumps({"folder": str(folder), "limit": 2, "every": False}))
    third = make(Problem(T=5, H=1, HV=1, K=4, V=4))
    original = kda2.kda
    for kwargs in (CALL, CALL, OTHER, third):
        of_process(str(control)).call("kda2.kda", original, (), kwargs)  # a process each
    assert len(list(folder.iterdir())) == 2


def test_who_outlives_kda2_capture_is_left_alone(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.mkdir()
    (control / "settings.json").write_text(json.dumps({"folder": str(tmp_path / "out"), "limit": 2, "every": False}))
    recorder = of_process(str(control))
    (control / "settings.json").unlink()
    control.rmdir()
    o, _ = recorder.call("kda2.kda", kda2.kda, (), CALL)
    assert torch.equal(o, kda2.kda(**CALL)[0])
    assert not recorder.sink.open and not (tmp_path / "out").exists()


def test_processes_watch_what_programs_record() -> None:
    watched = {f: (module, name) for module, names in sitecustomize.WATCHED.items() for name, f in names.items()}
    assert watched == SOURCES
