"""Numbers and units as Nsight Compute writes them, in any locale and at any scale."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_MICROSECONDS = {
    "ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
}  # fmt: skip
_SCALED = re.compile(r"([kmgtp]?)(bytes?|hz)", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_SPACES = re.compile(r"[\s'\u2019]")  # what locales put between thousands
# A number that leaves no doubt which sign is the decimal one: three digits after it could be thousands.
_POINT = re.compile(r"[+-]?(\d{1,3}(,\d{3})+\.\d+|\d+\.(\d{1,2}|\d{4,}))")
_COMMA = re.compile(r"[+-]?(\d{1,3}([.\s'\u2019]\d{3})+,\d+|\d+,(\d{1,2}|\d{4,}))")


def decimal_sign(cells: Iterable[str]) -> str:
    """ "." or ",": what most numbers among `cells` have before their decimals; "." where none tells."""
    point = comma = 0
    for cell in cells:
        point += _POINT.fullmatch(cell) is not None
        comma += _COMMA.fullmatch(cell) is not None
    return "," if comma > point else "."


def number(text: str, decimal: str = ".") -> float | None:
    """The number in a cell, or None where there is none: n/a, nan, inf, words, nothing.

    Of a metric with instances, `4 (1; 3)`, it is the one before them.
    """
    plain = _SPACES.sub("", text.partition("(")[0])
    plain = plain.replace("," if decimal == "." else ".", "").replace(decimal, ".")
    return float(plain) if _NUMBER.fullmatch(plain) else None


def is_scaled(unit: str) -> bool:
    """Whether numbers of this unit come at several scales: times, bytes, frequencies, and anything per second."""
    return any(part in ("us", "byte", "hz", "s") for part in normal(1.0, unit)[1].split("/"))


def normal(value: float, unit: str) -> tuple[float, str]:
    """The same quantity in microseconds, bytes and hertz, and per second; other units stay."""
    above, *below = unit.split("/")
    factor, name = _plain(above)
    names = [name]
    for part in below:
        over, name = _plain(part)
        over, name = (over / 1e6, "s") if name == "us" else (over, name)
        factor /= over
        names.append(name)
    return value * factor, "/".join(names)


def _plain(unit: str) -> tuple[float, str]:
    if unit in _MICROSECONDS:
        return _MICROSECONDS[unit], "us"
    scaled = _SCALED.fullmatch(unit)
    if scaled is None:
        return 1.0, unit
    return _SCALES[scaled[1].lower()], "byte" if scaled[2].lower().startswith("byte") else "hz"
