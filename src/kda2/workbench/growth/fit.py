"""The law that errors follow as sequences get longer: flat, logarithmic, or a power of T.

Two laws with two parameters each are held against the points, c T^p and a + b ln T, by the residuals of ln(error). The
better one is named only where the other is clearly worse; otherwise the fit says that it is inconclusive. Short
sequences may follow no law yet (a rounding of the output hides what grows), so points are dropped from the left until
one of the laws fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

Law = Literal["flat", "falling", "logarithmic", "sqrt", "linear", "power", "inconclusive", "exact"]
# A line through fewer points says nothing about its own error.
FEWEST = 5
# An order below this is no growth: from 64 to 65536 tokens it comes to less than a quarter.
FLAT = 0.03
# How near an order must be to 1/2 or 1 to bear its name, where its standard error does not allow more.
NEAR = 0.1
# Twice the standard error of an order beyond which the points scatter too much to name anything.
VAGUE = 0.15
# A law fits if its residuals are within this, or within the points' own scatter.
CLOSE, SCATTERS = 0.05, 1.5
# The difference in Akaike's criterion beyond which the worse law has considerably less support (Burnham, Anderson).
CLEAR = 4.0
# No error is known better than this, so residuals below it decide nothing.
_KNOWN = 2e-3


class Fit(BaseModel):
    """The law named, and what it rests on: `order` is p of error ~ T^p with its standard error `order_error`, from
    `from_tokens` on; `power_residual` and `log_residual` are the RMS residuals of ln(error) of either law (None: a
    logarithm that would be negative somewhere)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    law: Law
    says: str
    order: float | None = None
    order_error: float | None = None
    from_tokens: int | None = None
    power_residual: float | None = None
    log_residual: float | None = None


class _Lines(NamedTuple):
    """Both laws through the same points."""

    order: float
    error: float
    power: float
    log: float


def fit(tokens: Sequence[int], errors: Sequence[float]) -> Fit:
    """The law of finite `errors` at the lengths `tokens`, which increase."""
    kept = [(t, e) for t, e in zip(tokens, errors, strict=True) if e > 0.0]
    if tokens and not kept:
        return Fit(law="exact", says="no error at any length")
    if len(kept) < FEWEST:
        return Fit(law="inconclusive", says=f"a law needs {FEWEST} lengths with an error, there are {len(kept)}")
    x, y = np.log([t for t, _ in kept]), np.log([e for _, e in kept])
    for start in range(len(kept) - FEWEST + 1):
        lines = _lines(x[start:], y[start:])
        if min(lines.power, lines.log) <= max(CLOSE, SCATTERS * _scatter(y[start:])):
            return _named(lines, kept[start][0], len(kept) - start)
    last = (y[-1] - y[-2]) / (x[-1] - x[-2])
    says = f"neither law fits; {last:.2f} is the order between the last two lengths"
    return _described(_lines(x, y), kept[0][0], "inconclusive", says)


def _lines(x: np.ndarray, y: np.ndarray) -> _Lines:
    """Least squares of both laws; x = ln T, y = ln(error). Those of the logarithm are weighted so that they count
    relative errors too."""
    n, ones = len(x), np.ones_like(x)
    (_, order), *_ = np.linalg.lstsq(np.stack([ones, x], 1), y, rcond=None)
    off = y - y.mean() - order * (x - x.mean())
    error = math.sqrt((off @ off) / (n - 2) / ((x - x.mean()) @ (x - x.mean())))
    weight = np.exp(-y)
    (a, b), *_ = np.linalg.lstsq(np.stack([weight, weight * x], 1), ones, rcond=None)
    model = a + b * x
    log = _rms(y - np.log(model)) if (model > 0).all() else math.inf
    return _Lines(float(order), error, _rms(off), log)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x * x)))


def _scatter(y: np.ndarray) -> float:
    """The points' own noise, whatever smooth law they follow, from second differences."""
    return _rms(np.diff(y, 2)) / math.sqrt(6)


def _named(lines: _Lines, start: int, n: int) -> Fit:
    order, twice, gain = lines.order, 2 * lines.error, _gain_of_log(lines, n)
    if order > FLAT and gain >= CLEAR:
        return _described(lines, start, "logarithmic", "logarithmic")
    if twice > VAGUE:
        return _described(lines, start, "inconclusive", "the points scatter too much to name a law")
    if abs(order) <= max(FLAT, twice):
        return _described(lines, start, "flat", "flat")
    if order < 0:
        return _described(lines, start, "falling", "falling")
    if gain > -CLEAR:
        says = "a logarithm and a small power of T fit equally well"
        return _described(lines, start, "inconclusive", says)
    law: Law = "linear" if abs(order - 1) <= max(NEAR, twice) else "power"
    if abs(order - 0.5) <= max(NEAR, twice):
        law = "sqrt"
    words = {"linear": "linear", "sqrt": "as the square root of T", "power": "a power of T"}
    return _described(lines, start, law, words[law])


def _gain_of_log(lines: _Lines, n: int) -> float:
    """By how much Akaike's criterion favours the logarithm over the power; both have two parameters."""
    if math.isinf(lines.log):
        return -math.inf
    return n * math.log((lines.power**2 + _KNOWN**2) / (lines.log**2 + _KNOWN**2))


def _described(lines: _Lines, start: int, law: Law, what: str) -> Fit:
    log = None if math.isinf(lines.log) else round(lines.log, 5)
    beside = "no logarithm fits" if log is None else f"of a logarithm {log:.1%}"
    says = (
        f"{what}; order {lines.order:z.3f} \N{PLUS-MINUS SIGN} {lines.error:.3f} from T={start} on "
        f"(residuals of the power {lines.power:.1%}, {beside})"
    )
    return Fit(
        law=law, says=says, order=round(lines.order, 3) + 0.0, order_error=round(lines.error, 3), from_tokens=start,
        power_residual=round(lines.power, 5), log_residual=log,
    )  # fmt: skip
