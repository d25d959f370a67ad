"""What an ablation writes down: a kind of its own, which no reader of benchmark records takes for one of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kda2.workbench.profiler.ablation.bound import Name
from kda2.workbench.records import Record

LABEL: Literal["wrong on purpose"] = "wrong on purpose"
KIND: Literal["ablation"] = "ablation"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Variant(_Part):
    """One way to run the call: microseconds on the device and of the host, and how many times as fast as the call as it
    is (low, value, high of the 95 % interval). `wrong` ones do not compute KDA. `failed` says why there is no time."""

    name: str
    wrong: bool
    device_us: float | None = None
    host_us: float | None = None
    speed: tuple[float, float, float] | None = None
    failed: str = ""


class Stage(_Part):
    """One kernel of the call, all of its launches: microseconds by itself, without what leaving it out saves and
    doubling it adds (None: not timed), and what binds it."""

    name: str
    launches: int
    programs: int
    resident: int | None
    alone_us: float
    saves_us: float | None
    adds_us: float | None
    bound: Name
    evidence: tuple[str, ...]


class Ablation(Record):
    """The ablation of one call. Its times are of variants that are wrong on purpose: they explain, and rank nothing."""

    kind: Literal["ablation"] = KIND
    label: Literal["wrong on purpose"] = LABEL
    utc: str
    name: str
    case: dict[str, Any]
    samples: int
    variants: tuple[Variant, ...]
    stages: tuple[Stage, ...]
    bound: Name
    evidence: tuple[str, ...]
    environment: dict[str, Any]
