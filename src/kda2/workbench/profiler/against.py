"""Records of two runs side by side: what moved, and what was not the same.

Turns pair only within a run. Between runs the medians are compared, and a difference counts only beyond what runs of
unchanged kernels on one machine differ by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kda2.errors import InvalidValue
from kda2.workbench.page import newest
from kda2.workbench.profiler.timing import FEWEST_TURNS
from kda2.workbench.records import BenchRecord, Speed, read_lines

# Medians of the same kernels, driver and versions differ by up to 2.8 % between the prefill runs in benchmarks/records.
RUN_NOISE = 0.03
# A clock that differs by less is the same.
_CLOCK_NOISE = 0.02
# What may explain a difference, the likeliest first.
FACTS = ("device", "driver", "torch", "triton", "version", "source", "commit")
# Half a 95 % interval of the logarithm of a median, per quartile distance and root of samples (normal samples).
_MEDIAN_WIDTH = 1.96 * 1.2533 / 1.349


@dataclass(frozen=True)
class Change:
    """One implementation on one case, before and after. `speed` is how many times faster it has become, in an interval
    if both records have quartiles.

    `verdict` is "faster", "slower", or "inconclusive" with `why`; "lost" or "gained" where only one of both has a time,
    with the other's status as `why`. `changed` holds the recorded facts that differ, as (before, after). Host times
    differ by half between runs of the same code: they are shown and not judged.
    """

    case: str
    impl: str
    verdict: str
    why: str = ""
    before_us: float | None = None
    after_us: float | None = None
    speed: Speed | None = None
    before_call_us: float | None = None
    after_call_us: float | None = None
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def worse(self) -> bool:
        return self.verdict in ("slower", "lost")

    def plain(self) -> dict[str, Any]:
        """For JSON; what is absent is left out."""
        fields = {name: x for name, x in asdict(self).items() if x not in (None, "")}
        return fields | ({"speed": self.speed.model_dump()} if self.speed is not None else {})


def load(text: str, option: str = "--against") -> list[BenchRecord]:
    """The newest record of each case and implementation in FILE.jsonl, or of one run in it: FILE.jsonl:RUN. Raises
    `InvalidValue`, or `BadRecord` naming a line."""
    path, run = Path(text), ""
    if not path.is_file():
        name, _, run = text.rpartition(":")
        path = Path(name)
    if not path.is_file():
        raise InvalidValue(option, "a file of records, or FILE:RUN", repr(text))
    records = [r for r in read_lines(path, BenchRecord) if not run or r.run == run]
    if not records:
        raise InvalidValue(option, f"a run in {path}" if run else "a file with records", repr(text))
    return newest(records)


def changes(before: Sequence[BenchRecord], after: Sequence[BenchRecord]) -> Iterator[Change]:
    """What became of every case and implementation that both have, and that has a time in one of them."""
    earlier = {(r.name, r.impl): r for r in before}
    for new in after:
        old = earlier.get((new.name, new.impl))
        if old is not None and (old.median_us or new.median_us):
            yield _change(old, new)


def _change(old: BenchRecord, new: BenchRecord) -> Change:
    verdict, why, speed = _verdict(old, new)
    return Change(
        new.name, new.impl, verdict, why, old.median_us, new.median_us, speed, old.call_us, new.call_us,
        changed(old, new),
    )  # fmt: skip


def _verdict(old: BenchRecord, new: BenchRecord) -> tuple[str, str, Speed | None]:
    if old.median_us is None or new.median_us is None:
        return ("gained", old.status, None) if old.median_us is None else ("lost", new.status, None)
    speed = _speed(old, old.median_us, new, new.median_us)
    for when, r in (("before", old), ("after", new)):
        if r.host_paced:
            return "inconclusive", f"{when}, the time held waits for the host", speed
        if (r.verdict or "").startswith("invalid"):
            return "inconclusive", f"{when}, the time was {r.verdict}", speed
    if min(old.samples, new.samples) < FEWEST_TURNS:
        return "inconclusive", f"fewer than {FEWEST_TURNS} samples", speed
    if speed.low > 1.0 + RUN_NOISE:
        return "faster", "", speed
    if speed.high < 1.0 / (1.0 + RUN_NOISE):
        return "slower", "", speed
    return "inconclusive", f"within {RUN_NOISE:.0%}", speed


def _speed(old: BenchRecord, old_us: float, new: BenchRecord, new_us: float) -> Speed:
    value, width = old_us / new_us, math.exp(math.hypot(_width(old), _width(new)))
    return Speed(low=value / width, value=value, high=value * width)


def _width(r: BenchRecord) -> float:
    """Half the interval of the logarithm of a median; 0 for a record from before quartiles were kept."""
    if r.q25_us is None or r.q75_us is None:
        return 0.0
    return _MEDIAN_WIDTH * math.log(r.q75_us / r.q25_us) / math.sqrt(r.samples)


def changed(old: BenchRecord, new: BenchRecord) -> dict[str, tuple[Any, Any]]:
    """The recorded facts that differ, as (before, after); a fact that one of both lacks counts as another."""
    facts = {name: (getattr(old, name), getattr(new, name)) for name in FACTS}
    found = {name: pair for name, pair in facts.items() if pair[0] != pair[1]}
    if old.clocks is not None and new.clocks is not None:
        mhz = (old.clocks.after_mhz, new.clocks.after_mhz)
        if max(mhz) > (1.0 + _CLOCK_NOISE) * min(mhz):
            found["sm_mhz"] = mhz
        if old.clocks.slowed_by != new.clocks.slowed_by:
            found["slowed_by"] = (old.clocks.slowed_by, new.clocks.slowed_by)
    return found


def summary(found: Sequence[Change]) -> Iterator[str]:
    """Sentences: what became worse and what was not the same then, then every fact that differs anywhere."""
    for c in found:
        if c.worse:
            what = f"{c.before_us:.1f} us -> {c.after_us:.1f} us" if c.speed else f"no time any more: {c.why}"
            yield f"{c.case}: {c.impl} {c.verdict}: {what}; {_facts(c)}"
    pairs = [(name, pair) for c in found for name, pair in c.changed.items()]
    for name, pair in dict.fromkeys((name, tuple(map(str, pair))) for name, pair in pairs):
        count = sum((n, tuple(map(str, p))) == (name, pair) for n, p in pairs)
        yield f"{name}: {_short(pair[0])} -> {_short(pair[1])} ({count} of {len(found)})"


def _facts(c: Change) -> str:
    return f"changed: {', '.join(c.changed)}" if c.changed else "nothing recorded changed"


def _short(fact: str) -> str:
    return fact if len(fact) < 60 else f"{fact[:12]}..."
