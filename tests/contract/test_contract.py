"""The contracts: specs are data with a stable hash, configurations round-trip, capabilities say why they refuse."""

from __future__ import annotations

import dataclasses
import json
from importlib import import_module
from typing import Any

import pytest

from kda2.contract import Capability, Check, KernelConfig, OpSpec, Query
from kda2.ops.kda.spec import KDA, KDA_STEP, SPECS, bytes_moved, flops
from kda2.testing import FAMILIES

QUERY = Query("kda", "cuda", 90, False, "bf16", 128, 128, needs_grad=False)
CAPABILITY = Capability(
    frozenset({"cuda", "interpreter"}), frozenset({"bf16"}), backward=False, min_arch=80, max_K=256, max_V=512
)

NARROW = Capability(
    frozenset({"cuda"}), frozenset({"bf16", "fp16"}), backward=False, min_arch=90, max_arch=90,
    Ks=frozenset({64, 128}), Vs=frozenset({32}),
)  # fmt: skip


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_specs_are_data(spec: OpSpec) -> None:
    assert json.loads(spec.to_json())["name"] == spec.name
    assert dataclasses.replace(spec).content_hash == spec.content_hash
    assert dataclasses.replace(spec, version=spec.version + 1).content_hash != spec.content_hash


def test_shipped_families_are_in_the_spec() -> None:
    assert set(KDA.families) == set(FAMILIES) and set(KDA_STEP.families) < set(FAMILIES)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_names_in_specs_exist(spec: OpSpec) -> None:
    for dotted in (spec.oracle, spec.flops, spec.bytes):
        module, _, function = dotted.rpartition(".")
        assert callable(getattr(import_module(module), function))


def test_tolerance_of_an_unknown_dtype_names_the_known() -> None:
    general = [t.relative_l2 for t in KDA.tolerances if t.dtype == "bf16"]
    assert KDA.tolerance("bf16").relative_l2 == max(general) < 2e-2
    with pytest.raises(KeyError, match=r"no tolerance for fp8; it has \['bf16', 'fp16', 'fp32'\]"):
        KDA.tolerance("fp8")


def case(**changes: Any) -> dict[str, Any]:
    axes = {"seqlens": [10, 22], "heads": 4, "k": 128, "v": 128, "dtype": "bf16", "state": "none"}
    return {**axes, **changes}


def test_cost_of_prefill() -> None:
    assert flops(case()) == 7 * 32 * 4 * 128 * 128
    per_token_and_head, learned = 1282, 4 * 4 * 129
    assert bytes_moved(case()) == 32 * 4 * per_token_and_head + learned
    state = 4 * 128 * 128
    assert bytes_moved(case(state="fp32-in-out")) - bytes_moved(case()) == 2 * 2 * 4 * state
    assert bytes_moved(case(state="bf16-out")) - bytes_moved(case()) == 2 * 2 * state
    assert bytes_moved(case()) - bytes_moved(case(qk_heads=1)) == 32 * 2 * 3 * 128 * 2


def test_cost_of_a_step() -> None:
    step = {"batch": 256, "heads": 32, "k": 128, "v": 128, "dtype": "bf16", "state_dtype": "fp32"}
    states = 2 * 256 * 32 * 128 * 128 * 4
    assert bytes_moved(step) == states + 256 * 32 * 1282 + 4 * 32 * 129
    assert flops(step) == 7 * 256 * 32 * 128 * 128


def test_workloads_are_cases() -> None:
    assert len(KDA.workloads) == 24 and len(KDA_STEP.workloads) == 8
    for w in (*KDA.workloads, *KDA_STEP.workloads):
        assert flops({**w.axes, **w.options}) > 0 and bytes_moved({**w.axes, **w.options}) > 0


def test_configs_round_trip_and_hash_by_value() -> None:
    values = {"BT": 64, "BK": 32, "num_warps": 4, "num_stages": 2}
    config = KernelConfig.from_dict(values)
    assert config.as_dict() == values and config.tiles == {"BT": 64, "BK": 32}
    assert hash(config) == hash(KernelConfig(4, 2, {"BK": 32, "BT": 64}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "tensors are on cpu, wants cuda or interpreter"),
        ({"arch": 75}, "compute capability 7.5, wants 8.0 or newer"),
        ({"dtype": "fp64"}, "dtype fp64, wants bf16"),
        ({"K": 257}, "K = 257, wants at most 256"),
        ({"V": 513}, "V = 513, wants at most 512"),
        ({"needs_grad": True}, "an input requires grad or has a tangent, or torch.func transforms the call"),
    ],
)
def test_refusals_say_what_and_why(changes: dict[str, Any], reason: str) -> None:
    check = CAPABILITY.check(dataclasses.replace(QUERY, **changes))
    assert not check.ok and str(check).startswith(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arch": 89}, "compute capability 8.9, wants 9.0"),
        ({"arch": 100}, "compute capability 10.0, wants 9.0"),
        ({"K": 96}, "K = 96, wants 64 or 128"),
        ({"K": 256}, "K = 256, wants 64 or 128"),
        ({"V": 64}, "V = 64, wants 32"),
        ({"device": "cpu", "interpreted": True}, "tensors are on cpu, wants cuda"),
    ],
)
def test_refusals_of_what_serves_little(changes: dict[str, Any], reason: str) -> None:
    query = dataclasses.replace(QUERY, V=32)
    assert NARROW.check(query).ok
    assert str(NARROW.check(dataclasses.replace(query, **changes))) == reason


def test_a_range_of_architectures_is_named_by_its_ends() -> None:
    capability = dataclasses.replace(CAPABILITY, max_arch=90)
    refusal = capability.check(dataclasses.replace(QUERY, arch=120))
    assert str(refusal) == "compute capability 12.0, wants 8.0 to 9.0"


@pytest.mark.parametrize(("K", "served"), [(1, 64), (64, 64), (65, 128), (128, 128), (256, 128)])
def test_the_nearest_channels_that_are_served(K: int, served: int) -> None:
    assert NARROW.channels(K, 20) == (served, 32)
    assert CAPABILITY.channels(K, 20) == (K, 20)


def test_what_is_within_limits_is_served() -> None:
    assert CAPABILITY.check(QUERY).ok
    assert CAPABILITY.check(dataclasses.replace(QUERY, device="cpu", arch=0, interpreted=True)).ok
    assert CAPABILITY.check(dataclasses.replace(QUERY, deterministic=True)).ok
    loose = dataclasses.replace(CAPABILITY, deterministic=False)
    assert not loose.check(dataclasses.replace(QUERY, deterministic=True)).ok


def test_check_reads_as_a_sentence() -> None:
    assert str(Check(False, "T = 127", "a multiple of 128", "pad to 128")) == (
        "T = 127, wants a multiple of 128; pad to 128"
    )
