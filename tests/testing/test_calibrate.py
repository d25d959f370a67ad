"""Where tolerances come from: what faithful implementations measured, and the limits that follow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import kda2
from kda2.contract.calibration import Calibration, dump, load, merged, rounded_up, tolerances
from kda2.errors import InvalidValue, KDA2Error
from kda2.ops.kda.spec import CALIBRATIONS, KDA
from kda2.testing import FAMILIES, Problem, calibrate
from kda2.testing.calibrate import FAITHFUL, SIZES, Size, changes, loose, measure
from kda2.testing.oracle import Outputs
from kda2.testing.verify import trial
from kda2.workbench import loop

ONE = Calibration(
    "one", "cpu", "2026-11-30", {"torch": "2.13"}, 20, ("T70",),
    {"bf16": {"random": {"o": (2.1e-3, 0.021), "final_state": (1.4e-3, 0.07)}, "ragged": {"o": (7e-4, 0.0)}}},
)  # fmt: skip
TWO = replace(ONE, impl="two", device="NVIDIA H200", errors={"bf16": {"random": {"o": (7e-4, 0.035)}}})


@pytest.mark.parametrize(
    ("x", "up"),
    [(0.0, 0.0), (0.0042, 0.0042), (0.00411, 0.0042), (0.00995, 0.01), (1e-7, 1e-7), (3.01e-8, 3.1e-8), (12.1, 13.0)],
)
def test_two_digits_never_less(x: float, up: float) -> None:
    assert rounded_up(x) == up and rounded_up(up) == up


def test_a_limit_is_the_worst_error_over_the_headroom() -> None:
    found = {(t.dtype, t.family, t.output): t for t in tolerances([ONE, TWO])}
    assert {row: (t.relative_l2, t.element_rms) for row, t in found.items()} == {
        ("bf16", "", ""): (0.003, 0.1),
        ("bf16", "random", "o"): (0.003, 0.05),
        ("bf16", "random", "final_state"): (0.002, 0.1),
        ("bf16", "ragged", "o"): (0.001, 3.9e-6),  # never below the resolution of fp32 products in tf32
    }
    says = found["bf16", "random", "o"].provenance
    assert says == "worst of one, two on NVIDIA H200: 0.0021 (one), element 0.035 (two on NVIDIA H200), over 0.7"


def test_merging_replaces_the_same_implementation_on_the_same_device_and_nothing_else() -> None:
    again = replace(ONE, date="2026-12-24")
    assert merged([TWO, ONE], [again]) == (ONE, TWO)  # it says the same: nothing changes, not even the date
    worse = replace(again, errors={"bf16": {"random": {"o": (0.1, 0.1)}}})
    rest = {family: rows for family, rows in ONE.errors["bf16"].items() if family != "random"}
    assert rest
    assert merged([ONE, TWO], [worse]) == (replace(worse, errors={"bf16": {**rest, **worse.errors["bf16"]}}), TWO)
    fp32 = replace(again, errors={"fp32": {"random": {"o": (1e-6, 1e-5)}}})
    assert merged([ONE], [fp32]) == (replace(fp32, errors={**ONE.errors, **fp32.errors}),)
    elsewhere = replace(worse, device="interpreter")
    assert merged([ONE], [elsewhere]) == (ONE, elsewhere)


def test_the_file_comes_back_as_it_was() -> None:
    text = dump([ONE, TWO])
    assert load(text) == (ONE, TWO) and dump(load(text)) == text
    assert '\n          "random": {"final_state": [0.0014, 0.07], "o": [0.0021, 0.021]}\n' in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "calibrations must be JSON, got text that is not"),
        ("[]", 'calibrations must be an object with "schema": 1 and "calibrations"'),
        ('{"schema": 2, "calibrations": []}', 'calibrations must be an object with "schema": 1'),
        ('{"schema": 1, "calibrations": [{"impl": 3}]}', "calibrations[0].device must be given, got nothing"),
    ],
)
def test_what_is_no_calibration_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidValue) as e:
        load(text)
    assert str(e.value).startswith(says)


@pytest.mark.parametrize("errors", [[0.1], [0.1, 0.2, 0.3], [-0.1, 0.1]])
def test_errors_are_two_and_not_negative(errors: list[float]) -> None:
    plain = json.loads(dump([ONE]))
    plain["calibrations"][0]["errors"]["bf16"]["random"]["o"] = errors
    with pytest.raises(InvalidValue, match=r"^bf16\.random\.o of one must be two errors, got "):
        load(json.dumps(plain))


def test_changes_and_loose_limits() -> None:
    before, after = tolerances([ONE, TWO]), tolerances([TWO])
    rows = [(old and old.family, new and new.family) for old, new in changes(before, after)]
    assert rows == [("", ""), ("ragged", None), ("random", None), ("random", "random")]
    assert [(old.family, old.relative_l2, new.relative_l2) for old, new in loose(before, after)] == []
    lower = tolerances([replace(TWO, errors={"bf16": {"random": {"o": (6e-4, 0.035)}}})])
    assert [(old.output, old.relative_l2, new.relative_l2) for old, new in loose(before, lower)] == [
        ("", 0.003, 0.00086), ("o", 0.003, 0.00086),
    ]  # fmt: skip


# What ships.


def test_the_shipped_limits_follow_from_the_shipped_measurements() -> None:
    text = CALIBRATIONS.read_text()
    stored = load(text)
    assert dump(stored) == text and KDA.tolerances == tolerances(stored)
    assert all(c.versions["torch"] and c.seeds >= 1 and c.sizes and c.date for c in stored)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_each_family_that_is_held_to_limits_has_some_of_several_implementations(dtype: str) -> None:
    rows = {(t.family, t.output): t for t in KDA.tolerances if t.dtype == dtype}
    judged = [f.name for f in FAMILIES.values() if f.judge == "tolerance"]
    # a state of 16 bits has the limits of its own dtype
    coarser = {"fp32": ("options", "plain_packed"), "fp16": ("options",), "bf16": ()}[dtype]
    missing = {(name, "final_state") for name in coarser}
    wanted = {(name, output) for name in judged for output in ("o", "final_state")} - missing
    assert set(rows) == {("", ""), *wanted}
    for row in wanted:
        impls = [c for c in load(CALIBRATIONS.read_text()) if row[1] in c.errors.get(dtype, {}).get(row[0], {})]
        assert len({c.impl for c in impls}) >= 2
    assert rows["", ""].relative_l2 == max(t.relative_l2 for t in rows.values())
    assert rows["", ""].element_rms == max(t.element_rms for t in rows.values())


def test_the_sizes_of_the_verifier_are_measured() -> None:
    measured = [size.changes for size in SIZES]
    for sizes in (loop.FILE_SIZES, loop.GPU_SIZES, {"B": 1, **loop.INTERPRETER_SIZES}):
        assert sizes in measured


# Measuring.

SMALL = Size({"T": 40, "B": 2, "H": 1, "HV": 2, "K": 24, "V": 8})


@pytest.fixture
def two_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is held to limits and one that amplifies roundings, in one size."""
    monkeypatch.setattr(calibrate, "SIZES", (SMALL,))
    monkeypatch.setattr(calibrate, "FAMILIES", {name: FAMILIES[name] for name in ("random", "repeated_keys")})


@pytest.mark.usefixtures("two_families")
def test_measuring() -> None:
    said: list[str] = []
    found = measure(["reference", "rounded_16", "hopper"], "cpu", 2, say=said.append)
    assert said == [f"{d} {f}" for d in ("bf16", "fp16", "fp32") for f in ("random", "repeated_keys")]
    assert list(found.missing) == ["hopper"] and "wants cuda" in found.missing["hopper"]
    assert found.faults == [] and [c.key for c in found.calibrations] == [("reference", "cpu"), ("rounded_16", "cpu")]
    reference, rounded = found.calibrations
    assert rounded.seeds == 2 and rounded.sizes == (str(SMALL),) and "triton" not in rounded.versions
    assert all(set(rows) == {"random"} for rows in rounded.errors.values())
    # an fp32 state of exact inputs, and one of rounded operands
    assert reference.errors["bf16"]["random"]["final_state"][0] < 1e-6
    assert 1e-3 < rounded.errors["bf16"]["random"]["final_state"][0] < 7e-3
    margins = found.margins["bf16", "repeated_keys", "o"]
    assert set(margins) == {"reference", "rounded_16"} and 0 < max(margins.values()) <= 1


@pytest.mark.usefixtures("two_families")
def test_measuring_again_gives_the_same() -> None:
    first, second = (measure(["torch"], "cpu", 1, ["fp16"]).calibrations for _ in range(2))
    assert dump(first) == dump(second) and list(first[0].errors) == ["fp16"]


def halved(kwargs: Mapping[str, Any]) -> Outputs:
    o, state = kda2.kda(**kwargs, impl="torch")
    return o / 2, state


def spoilt(kwargs: Mapping[str, Any]) -> Outputs:
    o, state = kda2.kda(**kwargs, impl="torch")
    return o * torch.nan, state


@pytest.mark.usefixtures("two_families")
def test_an_implementation_that_is_not_faithful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAITHFUL, "halved", halved)
    found = measure(["halved"], "cpu", 1)
    assert len(found.faults) == 6 and found.margins["bf16", "random", "o"]["halved"] > 50
    assert "halved, bf16, T40 B2 H1 HV2 K24 V8, seed 0: [random] o is off: relative L2 5.00e-01" in found.faults[0]
    monkeypatch.setitem(FAITHFUL, "spoilt", spoilt)
    with pytest.raises(KDA2Error, match=r"spoilt is not faithful in bf16, .*: .random. o: .* elements are NaN"):
        measure(["spoilt"], "cpu", 1)


def test_an_unknown_implementation_or_dtype_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"impls must be among reference, torch, .*, got 'nosuch'"):
        measure(["torch", "nosuch"], "cpu", 1)
    with pytest.raises(InvalidValue, match="dtypes must be among bf16, fp16, fp32, got 'fp8'"):
        measure(["torch"], "cpu", 1, ["fp8"])


@pytest.mark.usefixtures("two_families")
def test_few_numbers_are_judged_and_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SIZES", (Size({"T": 2, "H": 1, "HV": 1, "K": 8, "V": 2}),))
    found = measure(["rounded_32"], "cpu", 3)
    assert found.faults == [] and found.calibrations == ()
    assert 0 < found.margins["bf16", "random", "o"]["rounded_32"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["reference", "torch", "rounded_16", "rounded_32", "rounded_64"])
def test_faithful_implementations_pass_seeds_that_no_limit_was_made_from(name: str, dtype: torch.dtype) -> None:
    for family in FAMILIES.values():
        for size in (size for size in SIZES if size.share == 1):
            for seed in range(1000, 1003):
                on = trial(family, replace(Problem(dtype=dtype, seed=seed), **size.changes))
                verdict = on.judge(FAITHFUL[name](on.kwargs))
                assert verdict.ok, f"{size}, seed {seed}: {verdict.explain()}"


def test_an_interrupt_keeps_the_families_that_were_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    def say(line: str) -> None:
        heard.append(line)
        if len(heard) == 3:
            monkeypatch.setattr(calibrate, "_measure_call", stop)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "SIZES", calibrate.SIZES[:1])
    found = calibrate.measure(["torch"], "cpu", 1, ["bf16"], say)
    assert found.stopped == heard[-1] == "bf16 no_decay"
    (entry,) = found.calibrations
    assert list(entry.errors["bf16"]) == ["random", "saturated_gate"]
