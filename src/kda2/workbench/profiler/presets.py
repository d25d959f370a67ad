"""Criteria of others, applied to what was measured. They say what they say; what is correct, and which times are
valid, is not theirs to decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kda2.errors import InvalidValue
from kda2.workbench.records import BenchRecord

OK, NOT_OK = "ok", "not ok"
_MOST_ABS_ERR = 1e-3
_LEAST_GAIN = 0.30


@dataclass(frozen=True)
class Criterion:
    """`asks` is what it wants, in words. `holds` takes a record and its baseline's, and answers "ok (what was seen)",
    "not ok (...)" or "not measured (why)"."""

    asks: str
    holds: Callable[[BenchRecord, BenchRecord | None], str]


def _answer(holds: bool, seen: str) -> str:
    return f"{OK if holds else NOT_OK} ({seen})"


def _absolute_error(record: BenchRecord, base: BenchRecord | None) -> str:
    if not record.max_abs_err:
        return f"not measured ({record.status if record.status != 'ok' else 'the record has no absolute errors'})"
    seen = ", ".join(f"{name} {error:.1e}" for name, error in record.max_abs_err.items())
    return _answer(max(record.max_abs_err.values()) < _MOST_ABS_ERR, seen)


def _p95_gain(record: BenchRecord, base: BenchRecord | None) -> str:
    if base is None:
        return "not measured (no baseline)"
    if record.p95_us is None or base.p95_us is None:
        return "not measured (p95 needs a time of both, and 1000 samples)"
    gain = 1.0 - record.p95_us / base.p95_us
    return _answer(gain >= _LEAST_GAIN, f"{record.p95_us:.1f} us beside {base.impl}'s {base.p95_us:.1f} us")


# "source-notes" are the numerical and the latency gate of the notes that this project answers to (docs/claims.md, B5).
# The largest error of an element grows with the outputs' size, and a share of a baseline's time with how slow that is:
# neither tells right from wrong, or fast from slow, by itself.
PRESETS: dict[str, tuple[Criterion, ...]] = {
    "default": (),
    "source-notes": (
        Criterion(f"largest absolute error below {_MOST_ABS_ERR:.0e}", _absolute_error),
        Criterion(f"p95 at least {_LEAST_GAIN:.0%} below the baseline's", _p95_gain),
    ),
}


def check(preset: str) -> None:
    """Raise `InvalidValue` for a preset that there is not."""
    if preset not in PRESETS:
        raise InvalidValue("--preset", f"one of {', '.join(PRESETS)}", repr(preset))


def apply(preset: str, records: Sequence[BenchRecord]) -> Iterable[dict[str, Any]]:
    """For each record {case, impl, verdict, criteria: {what it asks: the answer}}; nothing where the preset has no
    criteria. The baseline is what the record was compared with, in the same run."""
    by_name = {(r.run, r.name, r.impl): r for r in records}
    for r in records if PRESETS[preset] else ():
        base = by_name.get((r.run, r.name, r.against or ""))
        answers = {c.asks: c.holds(r, base) for c in PRESETS[preset]}
        yield {"case": r.name, "impl": r.impl, "verdict": r.verdict, "criteria": answers}
