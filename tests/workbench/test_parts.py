"""GPUs to plan for: which one a target and a count of multiprocessors mean."""

from __future__ import annotations

import pytest

import kda2
from kda2.workbench import predict
from kda2.workbench.parts import PARTS, part_for


@pytest.mark.parametrize(
    ("target", "sms", "name", "wanted"),
    [
        ("sm_90", None, None, "H200 SXM"),
        ("sm_90a", 132, None, "H200 SXM"),
        ("sm_90", 78, None, "H20"),
        ("sm_80", 108, None, "A100 80GB SXM"),
        ("sm_86", None, None, "RTX 3090"),
        ("sm_90", None, "h100", "H100 SXM"),
        ("sm_90", None, "H20", "H20"),
        ("sm_90", None, "NVIDIA H200", "H200 SXM"),
        ("sm_89", None, "rtx 4090", "RTX 4090"),
    ],
)
def test_which_part(target: str, sms: int | None, name: str | None, wanted: str) -> None:
    part = part_for(target, sms, name)
    assert part.name == wanted and not part.note


def test_measured_rates_where_somebody_measured() -> None:
    h200, h100 = part_for("sm_90"), part_for("sm_90", name="H100")
    assert (h200.memory_rate.per_second, h200.memory_rate.source) == (4.24e12, "measured")
    assert (h200.tensor_rate.per_second, h200.tensor_rate.source) == (708e12, "measured")
    assert (h100.memory_rate.per_second, h100.tensor_rate.source) == (3.35e12, "datasheet")
    assert h200.special_rate.per_second == 132 * 16 * 1.98e9 and h200.issue_rate.per_second == 132 * 4 * 1.98e9
    assert h200.shared_per_sm == 228 * 1024 and h200.shared_per_cta == 227 * 1024


def test_scaling_keeps_what_an_sm_does_and_the_memory() -> None:
    part = part_for("sm_90", 66)
    assert part.name == "H200 SXM with 66 SMs" and "66/132" in part.note
    assert part.memory_rate.per_second == 4.24e12 and part.tensor_rate.per_second == 354e12
    assert part.tensor_rate.source == "measured, scaled" and part.fp32 == 33.5e12
    assert part_for("sm_90", 39, "H20").tensor == 74e12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sm_99",), "target must be one of sm_80, .*got 'sm_99'"),
        (("90",), "target must be one of"),
        (("sm_90", 0), "sms must be at least 1, got 0"),
        (("sm_90", None, "B300"), "gpu must be one of A100 80GB SXM, .*, got 'B300'"),
        (("sm_90", None, ""), "gpu must be one of"),
        (("sm_90", None, "A100"), "gpu must be a part of sm_90, got 'A100'; the A100 80GB SXM is sm_80"),
    ],
)
def test_refusals(arguments: tuple[str, int | None, str | None], words: str) -> None:
    with pytest.raises(kda2.InvalidValue, match=words):
        part_for(*arguments)


def test_an_architecture_without_a_part() -> None:
    with pytest.raises(kda2.UnsupportedTarget, match="no part of sm_100 is known to plan for; known: sm_80, sm_86"):
        part_for("sm_100")


def test_the_model_of_times_uses_the_same_parts() -> None:
    assert predict.PARTS is PARTS and all(PARTS[arch].arch == arch for arch in PARTS)
