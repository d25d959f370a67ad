"""Calibrations: the worst errors that faithful implementations were seen to make, and the tolerances that follow.

The errors are kept, never the limits, so a limit always says what it rests on. The file of an operator holds one entry
for each implementation and device; measuring one again replaces its entry and no other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kda2.contract.spec import Tolerance, built
from kda2.errors import InvalidValue

SCHEMA = 1
# What the worst faithful error is of its limit: the next seed may be a little worse.
HEADROOM = 0.7
# The least limits, of the relative error and of one element in RMS: kernels multiply fp32 operands in three products of
# tf32 terms, which are good to 2^-21, and a few of those may meet in one element.
RESOLUTION = 2.0**-21, 2.0**-18
# dtype, family, output: the worst (relative L2, error of one element in RMS)
Errors = Mapping[str, Mapping[str, Mapping[str, tuple[float, ...]]]]


@dataclass(frozen=True)
class Calibration:
    """What one faithful implementation measured on one device, over `seeds` seeds of the smallest `sizes`."""

    impl: str
    device: str
    date: str
    versions: Mapping[str, str]
    seeds: int
    sizes: tuple[str, ...]
    errors: Errors

    @property
    def key(self) -> tuple[str, str]:
        return self.impl, self.device

    def __str__(self) -> str:
        return self.impl if self.device == "cpu" else f"{self.impl} on {self.device}"


def rounded_up(x: float) -> float:
    """The next number with two significant digits: a little noise leaves the file as it was."""
    if x == 0.0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(x)) - 1)
    # what has two digits already must stay, though its quotient may be a hair above them
    return float(f"{math.ceil(round(x / unit, 6)) * unit:.1e}")


def tolerances(calibrations: Iterable[Calibration]) -> tuple[Tolerance, ...]:
    """For each dtype the limits of any other input, which are the largest there are, then those of each family and
    output: the worst error of all implementations over `HEADROOM`."""
    worst: dict[str, dict[tuple[str, str], list[tuple[tuple[float, ...], str]]]] = {}
    for c in calibrations:
        for dtype, family, output, errors in _rows(c.errors):
            worst.setdefault(dtype, {}).setdefault((family, output), []).append((errors, str(c)))
    found = []
    for dtype, rows in sorted(worst.items()):
        found.append(_limit(dtype, "", "", [seen for each in rows.values() for seen in each]))
        found += [_limit(dtype, *row, seen) for row, seen in sorted(rows.items())]
    return tuple(found)


def _rows(errors: Errors) -> Iterator[tuple[str, str, str, tuple[float, ...]]]:
    for dtype, families in errors.items():
        for family, outputs in families.items():
            for output, pair in outputs.items():
                yield dtype, family, output, pair


def _limit(dtype: str, family: str, output: str, seen: list[tuple[tuple[float, ...], str]]) -> Tolerance:
    (l2, by_l2), (element, by_element) = (max((errors[i], who) for errors, who in seen) for i in (0, 1))
    names = list(dict.fromkeys(who for _, who in seen))
    seen_by = f"{l2:.2g} ({by_l2}), element {element:.2g} ({by_element})"
    provenance = f"worst of {', '.join(names)}: {seen_by}, over {HEADROOM}"
    limits = [rounded_up(max(x / HEADROOM, least)) for x, least in zip((l2, element), RESOLUTION, strict=True)]
    return Tolerance(dtype, limits[0], limits[1], provenance, family, output)


def merged(old: Iterable[Calibration], new: Iterable[Calibration]) -> tuple[Calibration, ...]:
    """Entries of `new` in place of those of the same implementation and device; dtypes and families that were not
    measured again stay as they were. One that says the same as before keeps its date, so that measuring again gives the
    same file."""
    entries = {c.key: c for c in old}
    for c in new:
        before = entries.get(c.key, c)
        rows = {dtype: {**before.errors.get(dtype, {}), **families} for dtype, families in c.errors.items()}
        now = replace(c, errors={**before.errors, **rows})
        entries[c.key] = before if replace(now, date=before.date) == before else now
    return tuple(entries[key] for key in sorted(entries))


def dump(calibrations: Iterable[Calibration]) -> str:
    """JSON with a line for each family."""
    entries = [asdict(c) for c in calibrations]
    return _text({"schema": SCHEMA, "calibrations": entries}) + "\n"


def load(text: str) -> tuple[Calibration, ...]:
    """What `dump` wrote. Raises `InvalidValue` with the path of what is wrong."""
    try:
        plain = json.loads(text)
    except ValueError as e:
        raise InvalidValue("calibrations", "JSON", f"text that is not: {e}") from e
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA or not isinstance(plain.get("calibrations"), list):
        raise InvalidValue("calibrations", f'an object with "schema": {SCHEMA} and "calibrations"', f"{text:.40}")
    found = tuple(built(Calibration, x, f"calibrations[{i}]") for i, x in enumerate(plain["calibrations"]))
    for c in found:
        for dtype, family, output, pair in _rows(c.errors):
            if len(pair) != 2 or min(pair) < 0:
                raise InvalidValue(f"{dtype}.{family}.{output} of {c}", "two errors", repr(list(pair)))
    return found


def _text(x: Any, indent: str = "") -> str:
    """JSON, everything that holds objects spread over lines."""
    if not _holds_objects(x):
        return json.dumps(x, sort_keys=True)
    inner = indent + "  "
    if isinstance(x, list):
        return "[\n" + ",\n".join(inner + _text(y, inner) for y in x) + f"\n{indent}]"
    lines = (f"{inner}{json.dumps(name)}: {_text(y, inner)}" for name, y in sorted(x.items()))
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _holds_objects(x: Any) -> bool:
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
    return any(isinstance(y, dict) or _holds_objects(y) for y in parts)
