from __future__ import annotations

import pytest

from kda2.workbench.profiler.ncu.model import short_name
from kda2.workbench.profiler.ncu.units import decimal_sign, is_scaled, normal, number


@pytest.mark.parametrize(
    ("text", "decimal", "value"),
    [
        ("29,994,504", ".", 29994504.0),
        ("90.528000", ".", 90.528),
        ("2,374.5", ".", 2374.5),
        ("0", ".", 0.0),
        ("-1.5e3", ".", -1500.0),
        ("1.901.234,50", ",", 1901234.5),
        ("90,528", ",", 90.528),
        ("29\u202f994\u00a0504", ".", 29994504.0),
        ("29'994'504", ".", 29994504.0),
        ("350 (1; 0; 349)", ".", 350.0),
    ],
)
def test_a_number_in_any_locale(text: str, decimal: str, value: float) -> None:
    assert number(text, decimal) == value


@pytest.mark.parametrize("text", ["n/a", "", "nan", "inf", "(!) n/a", "No-CC", "NVIDIA H200", "-", "(256, 1, 1)", "."])
def test_what_is_no_number_is_none(text: str) -> None:
    assert number(text) is None


@pytest.mark.parametrize(
    ("cells", "sign"),
    [
        (["90.528000", "29,994,504"], "."),
        (["90,528000", "29.994.504"], ","),
        (["1.234", "5,678"], "."),  # could be either: what ncu prints unless told otherwise
        (["1.234,5", "1.234"], ","),
        (["1 234,5", "7"], ","),
        ([], "."),
    ],
)
def test_the_decimal_sign_is_found(cells: list[str], sign: str) -> None:
    assert decimal_sign(cells) == sign


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (90528.0, "ns", (90.528, "us")),
        (90528.0, "nsecond", (90.528, "us")),
        (0.5, "ms", (500.0, "us")),
        (2.0, "second", (2e6, "us")),
        (22.272, "Kbyte/block", (22272.0, "byte/block")),
        (75.5, "Mbyte", (75.5e6, "byte")),
        (1.5, "Tbyte/s", (1.5e12, "byte/s")),
        (1.5, "Gbyte/second", (1.5e9, "byte/s")),
        (57.5, "sector/ns", (57.5e9, "sector/s")),
        (1.75, "cycle/nsecond", (1.75e9, "cycle/s")),
        (1.756, "Ghz", (1.756e9, "hz")),
        (14.0, "%/Kbyte", (0.014, "%/byte")),
        (32.0, "register/thread", (32.0, "register/thread")),
        (132.0, "SM", (132.0, "SM")),
        (7.0, "", (7.0, "")),
    ],
)
def test_units_become_one(value: float, unit: str, expected: tuple[float, str]) -> None:
    number, name = normal(value, unit)
    assert (pytest.approx(number), name) == expected


def test_which_units_come_at_several_scales() -> None:
    assert [u for u in ("%", "us", "inst", "Kbyte", "inst/cycle", "sector/ns", "Ghz", "") if is_scaled(u)] == [
        "us", "Kbyte", "sector/ns", "Ghz",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void _flash_kda_fwd_prepare<TiledCopy<Copy_Atom<A, B>>, (int)4>(T1 *, int)", "_flash_kda_fwd_prepare"),
        ("void at::native::elementwise<4, at::native::Add<float> >(int, T2)", "elementwise"),
        ("(anonymous namespace)::copy(float *)", "copy"),
        ("kda_prepare", "kda_prepare"),
        ("_Z12daxpy_kernelidPdS_", "_Z12daxpy_kernelidPdS_"),
        ("", ""),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short
