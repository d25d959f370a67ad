"""Captures: what a layer called kda2 with, kept whole or not at all, read back exactly, its gate in numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kda2
from kda2.errors import InvalidValue
from kda2.testing import Problem, make
from kda2.workbench import capture as captures
from kda2.workbench.capture import Capture, call


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_the_example_layer_is_captured(gate: str) -> None:
    capture = captures.from_example(64, gate)
    facts = capture.facts()
    assert (facts["tokens"], facts["heads"], facts["K"], facts["V"]) == (64, 4, 128, 128)
    assert facts["gate"] == gate
    assert facts["qk_l2norm"] and facts["beta_sigmoid"] and facts["output_final_state"]
    assert facts["origin"]["text"] == "attention.txt"
    half_life = facts["regime"]["half_life_tokens"]
    assert half_life["p1"] < 4 < 20 < half_life["p99"]  # some channels forget at once, some remember


def test_the_example_is_the_same_every_time() -> None:
    a, b = captures.from_example(32, "softplus"), captures.from_example(32, "softplus")
    assert torch.equal(a.kwargs["q"], b.kwargs["q"])


def test_the_example_text_is_long_enough() -> None:
    assert captures.from_example(2048, "bounded").kwargs["q"].shape[1] == 2048
    with pytest.raises(ValueError, match="at least 9999 bytes"):
        captures.from_example(9999, "softplus")


@pytest.mark.parametrize("lengths", [None, (5, 0, 9)])
@pytest.mark.parametrize("gate", ["log", "log_bounded", "softplus", "bounded"])
def test_saved_and_loaded(tmp_path: Path, gate: str, lengths: tuple[int, ...] | None) -> None:
    capture = Capture(make(Problem(T=9, lengths=lengths, gate=gate, K=16, V=8, HV=4, layout="vk")), {"layer": "none"})
    path = tmp_path / "deep" / "c.safetensors"
    digest = capture.save(path)
    loaded = Capture.load(path)
    assert loaded.facts() == capture.facts()
    assert loaded.save(tmp_path / "again.safetensors") == digest
    for got, want in zip(kda2.kda(**loaded.kwargs), kda2.kda(**capture.kwargs), strict=True):
        assert torch.equal(got, want)


def test_first_tokens() -> None:
    capture = captures.from_example(64, "softplus")
    o, _ = kda2.kda(**capture.first(10).kwargs)
    whole, _ = kda2.kda(**capture.kwargs)
    torch.testing.assert_close(o, whole[:, :10])


def test_the_half_life_is_the_gates() -> None:
    kwargs = make(Problem(T=8, gate="log"))
    kwargs["g"] = torch.full_like(kwargs["g"], math.log(0.5) / 4, dtype=torch.float32)
    kwargs["g"][:, 0] = -torch.inf
    regime = Capture(kwargs).facts()["regime"]
    assert regime["half_life_tokens"]["p50"] == pytest.approx(4, rel=1e-5)
    assert regime["resets"] == kwargs["g"][:, 0].numel()
    assert sum(regime["histogram"]["count"]) == kwargs["g"][:, 1:].numel()


def test_what_is_no_capture(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="does not exist"):
        Capture.load(tmp_path / "none.safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"hello")
    with pytest.raises(InvalidValue, match="--inputs must be a safetensors file"):
        Capture.load(tmp_path / "x.safetensors")


def change(about: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        about = about[parent]
    about[name] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", 2),
        ("options", None),
        ("options.qk_l2norm", "no"),
        ("options.scale", "1"),
        ("options.unknown", 1),
        ("gate.kind", "sigmoid"),
        ("gate", "softplus"),
        ("facts", {}),
        ("facts.origin", 3),
    ],
)
def test_metadata_that_kda2_did_not_write(tmp_path: Path, path: str, value: Any) -> None:
    file = tmp_path / "c.safetensors"
    Capture(make(Problem(T=4))).save(file)
    tensors, about = contents(file)
    change(about, path, value)
    save_file(tensors, file, metadata={"kda2": json.dumps(about)})
    with pytest.raises(InvalidValue, match="--inputs must be a safetensors file with kda2's metadata"):
        Capture.load(file)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [("dt_bias", "dt_bais", r"with \['dt_bais'\]"), ("q", "Q", r"without \['q'\]"), ("A_log", None, "A_log must be")],
)
def test_tensors_under_other_names(tmp_path: Path, old: str, new: str | None, words: str) -> None:
    file = tmp_path / "c.safetensors"
    Capture(make(Problem(T=4))).save(file)
    tensors, about = contents(file)
    tensor = tensors.pop(old)
    save_file(tensors | ({} if new is None else {new: tensor}), file, metadata={"kda2": json.dumps(about)})
    with pytest.raises((kda2.InvalidValue, kda2.InvalidType), match=words):
        Capture.load(file)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_file_cut_short(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "c.safetensors"
    Capture(make(Problem(T=4))).save(file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(InvalidValue, match="--inputs must be a safetensors file"):
        Capture.load(file)


def contents(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the metadata of a capture file."""
    with safe_open(file, framework="pt") as f:
        return {name: f.get_tensor(name) for name in f.keys()}, json.loads(f.metadata()["kda2"])  # noqa: SIM118


def test_a_call_that_kda2_refuses_is_no_capture() -> None:
    kwargs = make(Problem(T=4))
    with pytest.raises(InvalidValue, match="v must be"):
        Capture({**kwargs, "v": kwargs["v"][:, :3]})


def test_a_capture_that_cannot_be_written_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "c.safetensors").mkdir()
    with pytest.raises(OSError, match="a capture cannot be written") as e:
        Capture(make(Problem(T=4))).save(tmp_path / "c.safetensors")
    assert e.value.filename == str(tmp_path / "c.safetensors")


def test_half_a_file_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes between: what stood there stays, and nothing stands beside it."""
    file = tmp_path / "c.safetensors"
    Capture(make(Problem(T=4))).save(file)
    before = file.read_bytes()

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        Capture(make(Problem(T=5))).save(file)
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]
    assert file.read_bytes() == before


def test_tokens_of_no_sequence_have_no_regime() -> None:
    kwargs = make(Problem(lengths=(3, 2), tail=4, gate="log", HV=2))
    kwargs["g"] = torch.full_like(kwargs["g"], -0.25, dtype=torch.float32)
    kwargs["g"][:, 5:] = torch.nan
    regime = Capture(kwargs).facts()["regime"]
    assert regime["log_decay"]["p1"] == regime["log_decay"]["p99"] == -0.25
    assert sum(regime["histogram"]["count"]) == kwargs["g"][:, :5].numel()


def test_a_huge_call_is_told_from_some_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = make(Problem(T=10, gate="log"))
    monkeypatch.setattr(call, "_SAMPLED", kwargs["g"].numel() // 4)
    regime = Capture(kwargs).facts()["regime"]
    assert sum(regime["histogram"]["count"]) + regime["resets"] == kwargs["g"][:, ::4].numel()
