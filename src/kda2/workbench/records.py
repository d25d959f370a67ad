"""What the workbench writes down: versioned pydantic models, one JSON line each. Tables and charts come from them.

Numbers that are absent are left out of the line, so that no reader takes a null for a time.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_serializer, field_validator, model_validator

from kda2.errors import KDA2Error
from kda2.workbench.profiler.suites import GateRegime, case_name

_STATUS = re.compile(r"ok|oom|unsupported\(.+\)", re.DOTALL)
_VERDICT = r"^(faster|slower|inconclusive|(incorrect|invalid)\([\s\S]+\))$"
_TIMES = (
    "median_us", "q25_us", "q75_us", "p95_us", "max_us", "call_us", "burst_us", "gbps", "tflops", "speed", "itself",
)  # fmt: skip


class BadRecord(KDA2Error, ValueError):
    """A line of a record file does not hold the record it should."""


class Record(BaseModel):
    """Common base: frozen, no unknown fields, a schema number, one JSON line, known by its content's hash."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)

    schema_: Literal[1] = Field(default=1, alias="schema")

    def line(self) -> str:
        """The record as one line of JSON, absent fields left out."""
        fields = {k: v for k, v in self.model_dump(mode="json", by_alias=True).items() if v is not None}
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def from_line(cls, line: str | bytes) -> Self:
        """What `line()` wrote. Raises `BadRecord`."""
        try:
            return cls.model_validate_json(line)
        except ValueError as e:
            raise BadRecord(f"not a {cls.__name__}: {e}") from e

    @property
    def content_hash(self) -> str:
        """SHA-256 of the record as canonical JSON: equal for equal records, whoever writes them."""
        return content_hash(self.model_dump(mode="json", by_alias=True))


def content_hash(plain: Any) -> str:
    """SHA-256 of plain data as JSON with sorted keys and no spaces."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class _Named(BaseModel):
    """What a case cannot be named and shown without: heads, gate, and sequences or a batch."""

    heads: StrictInt
    gate: GateRegime
    seqlens: list[StrictInt] = Field(default=[], min_length=1)
    batch: StrictInt | None = None

    @model_validator(mode="after")
    def _has_a_shape(self) -> Self:
        if not self.seqlens and self.batch is None:
            raise ValueError("a case needs seqlens or batch")
        return self


class _Part(BaseModel):
    """A part of a BenchRecord."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Speed(_Part):
    """How many times faster than another, and the interval in which that lies."""

    low: float = Field(gt=0, allow_inf_nan=False)
    value: float = Field(gt=0, allow_inf_nan=False)
    high: float = Field(gt=0, allow_inf_nan=False)


class Clocks(_Part):
    """A GPU's state while it was timed: the SMs' clock before and after, and at its lowest and highest in between; of
    what the driver said meanwhile the lowest memory clock, the highest temperature and power, and every reason why
    clocks were held down. What it did not say is absent."""

    before_mhz: float
    after_mhz: float
    low_mhz: float
    high_mhz: float
    mem_mhz: float | None = None
    slowed_by: tuple[str, ...] | None = None
    temperature_c: float | None = None
    power_w: float | None = None


class BenchRecord(Record):
    """One case of a suite, measured on one implementation.

    Times are microseconds on the device: `median_us`, the quartiles `q25_us` and `q75_us`, the longest `max_us`, and
    `p95_us` where there are 1000 samples or more. `call_us` is the host's time for the same call; `host_paced` where
    the device had to wait for it. `burst_us` is the wall clock's time of a call among others enqueued back to back.
    `floor_us` is what the device's measured ceilings allow; `gbps` and `tflops` are the rates reached, counting every
    input and output once and the recurrence's operations. `peak_bytes` is what a call allocates beyond its inputs.

    `rel_err` is the relative L2 error against an fp64 oracle, per output, `max_abs_err` the largest of an element. A
    case with a `family` has errors and no times; `limit` is what kda2 accepts of its own kernels there.

    `verdict` is faster, slower or inconclusive, by the `speed` relative to the implementation `against`, or incorrect
    or invalid with the reason. `itself` is the speed relative to the very same call under another name, which is 1.
    `preset` names the criteria that were asked for; they change nothing else. `neighbour_gbps` is the rate of a copy
    that ran beside every timed call, when alone; such a record has a name of its own.
    """

    run: str
    utc: str
    suite: str
    case: dict[str, Any]
    impl: str
    median_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    q25_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    q75_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    p95_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    samples: int = Field(default=0, ge=0)
    call_us: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    burst_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    host_paced: bool | None = None
    rel_err: dict[str, float] = Field(default_factory=dict)
    max_abs_err: dict[str, float] | None = None
    limit: dict[str, float] | None = None
    floor_us: float | None = Field(default=None, allow_inf_nan=False)
    gbps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tflops: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    peak_bytes: int | None = None
    against: str | None = None
    speed: Speed | None = None
    verdict: str | None = Field(default=None, pattern=_VERDICT)
    itself: Speed | None = None
    clocks: Clocks | None = None
    preset: str | None = None
    neighbour_gbps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    status: str
    device: str
    driver: str | None = None
    torch: str
    triton: str | None = None
    version: str
    source: str | None = None
    commit: str | None = None

    @property
    def name(self) -> str:
        """The case's name; one measured beside a neighbour is another case."""
        return case_name(self.case) + ("" if self.neighbour_gbps is None else "-neighbour")

    @property
    def tail(self) -> tuple[str, float] | None:
        """How far the slow calls are from the median: "p95" over p50, or, of too few samples for one, "max" over
        p50."""
        slow = [("p95", self.p95_us), ("max", self.max_us)]
        return next(((what, us / self.median_us) for what, us in slow if us and self.median_us), None)

    @field_serializer("clocks")
    def _only_what_was_said(self, clocks: Clocks | None) -> dict[str, Any] | None:
        return None if clocks is None else clocks.model_dump(mode="json", exclude_none=True)

    @field_validator("case")
    @classmethod
    def _case_has_a_name(cls, case: dict[str, Any]) -> dict[str, Any]:
        _Named.model_validate(case)
        return case

    @model_validator(mode="after")
    def _times_only_when_ok(self) -> Self:
        if not _STATUS.fullmatch(self.status):
            raise ValueError(f"status must be ok, oom or unsupported(reason), got {self.status!r}")
        times = [name for name in _TIMES if getattr(self, name) is not None]
        if self.status == "ok" and self.median_us is None and not ("family" in self.case and self.rel_err):
            raise ValueError("status ok needs median_us, or rel_err of a family")
        if self.status == "ok" and not all(map(math.isfinite, self.rel_err.values())):
            raise ValueError(f"status ok needs finite errors, got {self.rel_err}")
        if self.status != "ok" and times:
            raise ValueError(f"status {self.status!r} allows no times, got {times}")
        if self.p95_us is not None and self.samples < 1000:
            raise ValueError(f"p95_us needs 1000 samples or more, got {self.samples}")
        if self.verdict in ("faster", "slower", "inconclusive") and (self.speed is None or self.against is None):
            raise ValueError(f"verdict {self.verdict} needs speed, and against what")
        return self


class TestRun(Record):
    """One run of a test suite on a device."""

    __test__ = False  # not a test class, whatever its name suggests to pytest

    run: str
    utc: str
    suite: str
    passed: int
    failed: int
    skipped: int
    seconds: float | None = None
    device: str
    driver: str | None = None
    torch: str
    triton: str | None = None
    version: str
    source: str | None = None
    commit: str | None = None


STAGES: dict[str, str] = {
    "L0": "parse and policy",
    "L1": "build and resources",
    "L2": "IR, PTX and SASS postconditions",
    "L3": "numerics on the CPU",
    "L4": "numerics on the GPU",
    "L5": "compute-sanitizer",
    "L6": "latency",
    "L7": "Nsight Compute",
}
_OUTCOME = re.compile(r"pass|fail|invalid|inconclusive|not_run\(.+\)", re.DOTALL)


class Verdict(Record):
    """What one stage of the ladder found. `outcome` is pass, fail, invalid, inconclusive or not_run(reason)."""

    stage: Literal["L0", "L1", "L2", "L3", "L4", "L5", "L6", "L7"]
    outcome: str
    evidence: dict[str, Any] = Field(default_factory=dict)
    seconds: float = 0.0

    @model_validator(mode="after")
    def _known_outcome(self) -> Self:
        if not _OUTCOME.fullmatch(self.outcome):
            raise ValueError(
                f"outcome must be pass, fail, invalid, inconclusive or not_run(reason), got {self.outcome!r}"
            )
        return self

    @property
    def passed(self) -> bool:
        return self.outcome == "pass"

    @property
    def refuted(self) -> bool:
        """Whether the stage ran and found the candidate wanting."""
        return self.outcome in ("fail", "invalid")


def shown_correct(verdicts: Collection[Verdict]) -> bool:
    """Whether numerics passed somewhere (L3 or L4) and no stage refuted the candidate."""
    return any(v.passed for v in verdicts if v.stage in ("L3", "L4")) and not any(v.refuted for v in verdicts)


class Expected(BaseModel):
    """What a hypothesis says will change: a metric of one of the kernel's stages ("state: ctas"), or of the whole call
    ("median_us")."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    change: Literal["lower", "higher"]


class Candidate(Record):
    """One kernel under judgement: what it is, who wrote it, why, and what each stage found.

    `impl` is an implementation of the library ("triton"), or "file" for a kernel of one's own; `source` the SHA-256 of
    its sources; `parameters` configurations by stage; `trace` the rules that made it from `parent`. A latency exists
    only for a candidate that no stage refuted and whose numerics passed.
    """

    name: str
    op: str
    impl: str
    writer: str
    source: str | None = None
    parent: str | None = None
    trace: tuple[str, ...] = ()
    parameters: dict[str, Any] = Field(default_factory=dict)
    hypothesis: str = ""
    expected: Expected | None = None
    build: dict[str, Any] = Field(default_factory=dict)
    artifacts: dict[str, str] = Field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    latency_us: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _latency_is_earned(self) -> Self:
        if self.latency_us is not None and not self.correct:
            raise ValueError(f"{self.name} has a latency but did not pass its numerics")
        return self

    @property
    def correct(self) -> bool:
        """Whether it has been shown to be."""
        return shown_correct(self.verdicts)


class LedgerLine(Record):
    """One entry of a ledger. `hash` is the SHA-256 of the line without it; `prev` is the hash of the line before."""

    seq: int = Field(ge=0)
    prev: str
    utc: str
    kind: str
    payload: dict[str, Any]
    hash: str


R = TypeVar("R", bound=Record)


def read_lines(path: Path, model: type[R]) -> Iterator[R]:
    """The records of a JSON-lines file. Raises `BadRecord` naming the line that does not hold a `model`."""
    with path.open("rb") as f:  # what is no UTF-8 is a bad record too
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                yield model.model_validate_json(line)
            except ValueError as e:
                raise BadRecord(f"{path}:{number} is not a {model.__name__}: {e}") from e
