"""Choosing an implementation: order, reasons, and that nothing falls back silently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import kda2
from kda2 import device
from kda2.contract import Capability, Implementation, Query
from kda2.dispatch import choose, explain_choice, register, registered, select
from kda2.testing import Problem, make, make_step, upcast

BF16 = frozenset({"bf16"})


def implementation(name: str, devices: set[str], backward: bool = False) -> Implementation:
    return Implementation(name, Capability(frozenset(devices), BF16, backward), lambda: lambda call: name)


@pytest.fixture
def op() -> Iterator[str]:
    fast, plain = implementation("fast", {"cuda"}), implementation("plain", {"cpu", "cuda"}, backward=True)
    register("test-op", [fast, plain])
    yield "test-op"
    del select._REGISTRY["test-op"]


def query(op: str, **changes: Any) -> Query:
    facts = {"device": "cuda", "arch": 90, "interpreted": False, "dtype": "bf16", "K": 8, "V": 8, "needs_grad": False}
    return Query(op=op, **{**facts, **changes})


def test_auto_takes_the_first_that_can(op: str) -> None:
    assert choose(query(op)).name == "fast"
    assert choose(query(op, device="cpu", arch=0)).name == "plain"
    assert choose(query(op, needs_grad=True)).name == "plain"


def test_a_named_one_is_taken_or_refused(op: str) -> None:
    assert choose(query(op), "plain").name == "plain"
    with pytest.raises(
        kda2.UnsupportedTarget, match=r"^impl='fast' does not serve this call: tensors are on cpu, wants"
    ):
        choose(query(op, device="cpu", arch=0), "fast")


def test_none_that_can(op: str) -> None:
    with pytest.raises(kda2.UnsupportedTarget) as caught:
        choose(query(op, dtype="fp32"))
    assert str(caught.value).count("refused: dtype fp32, wants bf16") == 2


def test_registering_again_replaces_what_was_chosen(op: str) -> None:
    assert choose(query(op)).name == "fast"
    register(op, [implementation("faster", {"cuda"})])
    assert choose(query(op)).name == "faster"


def test_tangents_and_transforms_count_as_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation without derivatives would drop them silently."""
    kwargs = make(Problem(T=8, dtype=torch.float32))

    def chosen(q: torch.Tensor) -> str | None:
        return kda2.explain(kda2.kda, **{**kwargs, "q": q}).chosen

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert chosen(kwargs["q"]) == "triton"
    with forward_ad.dual_level():
        assert chosen(forward_ad.make_dual(kwargs["q"], torch.ones_like(kwargs["q"]))) == "torch"
        assert chosen(kwargs["q"]) == "triton"
    seen = []
    torch.func.vmap(lambda q: (seen.append(chosen(q)), q)[1])(kwargs["q"][None])
    assert seen == ["torch"]


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("ON", True), ("0", False), ("no", False)])
def test_the_interpreters_switch_is_read_as_triton_reads_it(
    value: str, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert device.interpreted() == on


def test_an_op_that_nobody_imported() -> None:
    with pytest.raises(kda2.InvalidValue, match=r"op must be one of \[.*'kda'.*\], got 'gla'.*import its public call"):
        registered("gla")


def test_unknown_name(op: str) -> None:
    with pytest.raises(kda2.InvalidValue, match=r"impl must be 'auto' or one of \['fast', 'plain'\], got 'fats'"):
        choose(query(op), "fats")


def test_explanation_has_a_reason_for_each(op: str) -> None:
    text = str(explain_choice(query(op)))
    assert text.splitlines() == [
        "test-op on cuda sm_90, bf16, K = 8, V = 8, impl = 'auto': fast",
        "  fast   chosen",
        "  plain  can serve; a preferred one comes first",
    ]
    assert "can serve; not asked for" in str(explain_choice(query(op), "plain"))


def test_explain_runs_nothing_and_checks_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = make_step(Problem(B=2))
    before = kwargs["state"].clone()
    explanation = kda2.explain(kda2.kda_step, **kwargs, impl="torch")
    assert explanation.chosen == "torch" and torch.equal(kwargs["state"], before)
    assert [name for name, _ in explanation.verdicts] == ["triton", "torch", "reference"]
    with pytest.raises(kda2.InvalidValue, match="state must be"):
        kda2.explain(kda2.kda_step, **{**kwargs, "state": before[:1]})


PREFILL = {
    "device": "cuda", "arch": 90, "interpreted": False, "dtype": "bf16", "K": 128, "V": 64, "needs_grad": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, ""),
        ({"dtype": "fp16", "K": 64, "deterministic": True}, ""),
        ({"dtype": "fp32"}, "dtype fp32, wants bf16, fp16"),
        ({"arch": 80}, "compute capability 8.0, wants 9.0"),
        ({"arch": 100}, "compute capability 10.0, wants 9.0"),
        ({"K": 96}, "K = 96, wants 64 or 128"),
        ({"V": 256}, "V = 256, wants 64 or 128"),
        ({"device": "cpu", "arch": 0, "interpreted": True}, "tensors are on cpu, wants cuda"),
    ],
)
def test_hopper_is_preferred_where_it_serves(changes: dict[str, Any], refusal: str) -> None:
    explanation = explain_choice(Query(op="kda", **{**PREFILL, **changes}))
    assert explanation.verdicts[0][0] == "hopper" and str(explanation.verdicts[0][1]) == refusal
    assert explanation.chosen == ("triton" if refusal else "hopper")


def test_gradients_are_not_for_hopper() -> None:
    explanation = explain_choice(Query(op="kda", **{**PREFILL, "needs_grad": True}))
    assert explanation.chosen == "torch" and "has no derivatives" in str(explanation.verdicts[0][1])


def test_each_op_has_its_implementations() -> None:
    assert [i.name for i in registered("kda")] == ["hopper", "triton", "torch", "reference"]
    assert [i.name for i in registered("kda_step")] == ["triton", "torch", "reference"]


def test_explain_after_a_failed_explain_still_runs_calls() -> None:
    kwargs = make(Problem(T=4))
    with pytest.raises(kda2.InvalidValue):
        kda2.explain(kda2.kda, **{**kwargs, "scale": float("nan")})
    o, _ = kda2.kda(**kwargs, impl="torch")
    assert o.isfinite().all()


def test_explaining_a_refusal_does_not_raise() -> None:
    kwargs = {**make(Problem(T=4, dtype=torch.float32)), "impl": "triton", "deterministic": True}
    explanation = kda2.explain(kda2.kda, **{name: upcast(x) for name, x in kwargs.items()})
    assert explanation.chosen is None and explanation.query.dtype == "fp64" and explanation.query.deterministic
    verdicts = dict(explanation.verdicts)
    assert not verdicts["triton"].ok and verdicts["torch"].ok and verdicts["reference"].ok


def test_explain_of_something_else() -> None:
    with pytest.raises(TypeError, match="function must be a public call of kda2"):
        kda2.explain(max, 1, 2)
    with pytest.raises(kda2.InvalidType, match="function must be a public call of kda2, got NoneType"):
        kda2.explain(None)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"])
def test_any_input_that_requires_grad_counts(name: str) -> None:
    kwargs = make(Problem(T=4, dtype=torch.float32))
    gate = kwargs["gate"]
    tensor = getattr(gate, name) if name in ("A_log", "dt_bias") else kwargs[name]
    tensor.requires_grad_()
    assert kda2.explain(kda2.kda, **kwargs).query.needs_grad
    with torch.no_grad():
        assert not kda2.explain(kda2.kda, **kwargs).query.needs_grad
