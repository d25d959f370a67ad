"""Numbers that carry the product they come from, so that a reader can check each by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kda2.workbench.blockplan import Count, Floor
from kda2.workbench.parts import Rate

_PREFIXES = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


@dataclass(frozen=True)
class Amount:
    """A whole number as a sum of products: `symbols` names the factors, `numbers` gives them."""

    value: int
    symbols: str
    numbers: str

    def __add__(self, other: Amount) -> Amount:
        if not other.value:
            return self
        if not self.value:
            return other
        return Amount(
            self.value + other.value, f"{self.symbols} + {other.symbols}", f"{self.numbers} + {other.numbers}"
        )

    def count(self, unit: str = "") -> Count:
        """The number with its unit and its product in words."""
        if not self.value and self.symbols == ZERO.symbols:
            return Count(amount=0, unit=unit, counted="none")
        text = human(self.value, unit)
        return Count(amount=self.value, unit=unit, counted=f"{self.symbols} = {self.numbers} = {text}")


ZERO = Amount(0, "none", "0")


def product(sizes: Mapping[str, int], axes: str, factor: int = 1, note: str = "", unit: str = "") -> Amount:
    """The product of the named axes and a factor; `note` says what the factor counts, `unit` what it is counted in."""
    names = axes.split()
    value, symbols, numbers = factor, list(names), [str(sizes[name]) for name in names]
    for name in names:
        value *= sizes[name]
    if factor != 1:
        symbols.append(f"{factor} {unit}".rstrip())
        numbers.append(str(factor))
    return Amount(value, " x ".join(symbols) + (f" ({note})" if note else ""), " x ".join(numbers))


def total(*amounts: Amount) -> Amount:
    """Their sum; nothing at all is ZERO."""
    found = ZERO
    for amount in amounts:
        found = found + amount
    return found


def human(value: float, unit: str = "") -> str:
    """Four digits and a decimal prefix: 134.2 MB, 94.49 Gflop; bare counts below 100000 in full."""
    if not unit and abs(value) < 100_000:
        return f"{value:,.0f}"
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.4g} {prefix}{unit}" if abs(scaled) < 1000 else f"{scaled:,.0f} {prefix}{unit}"
    return f"{value:.4g} {unit}".rstrip()


def per_second(rate: Rate, unit: str) -> str:
    """A rate with its source: 4.24 TB/s (measured)."""
    return f"{human(rate.per_second, unit)}/s ({rate.source})"


def floor(resource: str, value: int, unit: str, rate: Rate, weight: int = 1, note: str = "") -> Floor:
    """The microseconds that `value`, taken `weight` times, needs at a rate."""
    us = value * weight / rate.per_second * 1e6
    times = f" x {weight}{f' ({note})' if note else ''}" if weight != 1 else ""
    return Floor(
        resource=resource, us=us, counted=f"{human(value, unit)}{times} / {per_second(rate, unit)} = {us:.2f} us"
    )
