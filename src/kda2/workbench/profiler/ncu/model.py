"""What a report of Nsight Compute says, as frozen models: the report, its kernels, their instructions, and findings."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict

DURATION = "gpu__time_duration.sum"
REGISTERS = "launch__registers_per_thread"
SHARED = "launch__shared_mem_per_block"

Dim3 = tuple[int, int, int]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Instruction(_Frozen):
    """One machine instruction: its `offset` in bytes from the first one that was seen, its text, `file:line` where the
    kernel was built with line numbers, and its counts. A count that is absent is zero or was not collected."""

    offset: int
    text: str
    source: str | None = None
    metrics: dict[str, float]


class KernelProfile(_Frozen):
    """One launch of a kernel.

    `metrics` holds numbers by Nsight Compute's names, in `units`: microseconds, bytes, hertz and per second whatever
    the report had. A metric that is absent is n/a; it is never 0 for that. `launch` counts within the report.
    """

    launch: int
    name: str
    grid: Dim3 | None = None
    block: Dim3 | None = None
    device: str | None = None
    cc: str | None = None
    metrics: dict[str, float]
    units: dict[str, str]
    instructions: tuple[Instruction, ...] = ()

    @property
    def short_name(self) -> str:
        """The kernel's name without namespaces, template arguments and parameters."""
        return short_name(self.name)

    @property
    def duration_us(self) -> float | None:
        return self.metrics.get(DURATION)

    @property
    def registers(self) -> float | None:
        """Registers of a thread."""
        return self.metrics.get(REGISTERS)

    @property
    def shared_bytes(self) -> float | None:
        """Shared memory of a block, the driver's part of it included."""
        return self.metrics.get(SHARED)


class Report(_Frozen):
    """What was read from one file. `ncu` is the version that made it, where that is known; `notes` say what the file
    could not tell; `command_status` is the exit code of the command that was profiled, where kda2 ran it."""

    source: str
    kernels: tuple[KernelProfile, ...]
    ncu: str | None = None
    notes: tuple[str, ...] = ()
    command_status: int | None = None

    @property
    def device(self) -> str | None:
        return next((k.device for k in self.kernels if k.device is not None), None)

    @property
    def cc(self) -> str | None:
        return next((k.cc for k in self.kernels if k.cc is not None), None)


class Finding(_Frozen):
    """One thing that costs time: `value` of `metric` lies above or below `threshold`. `weight`, from 0 to 1, is about
    the share of the kernel's time that it concerns; `source` is `file:line` and `instruction` the machine instruction
    that it shows at most, where the report has them."""

    kernel: str
    launch: int
    what: str
    metric: str
    value: float
    unit: str
    comparison: Literal["above", "below"]
    threshold: float
    severity: Literal["high", "medium", "low"]
    weight: float
    cause: str
    suggestion: str
    source: str | None = None
    instruction: str | None = None

    @property
    def sentence(self) -> str:
        """The finding in words."""
        unit = f" {self.unit}" if self.unit else ""
        where = "".join(f"; at {x}" for x in (self.source, self.instruction) if x is not None)
        what = f"{self.what} is {self.value:.4g}{unit}, {self.comparison} {self.threshold:g}{where}"
        return f"{what}. {self.cause} {self.suggestion}"


_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|<unnamed>::|\{anonymous\}::")


def short_name(name: str) -> str:
    """`void ns::copy<float, (int)4>(float *)` is `copy`; a mangled name stays as it is."""
    head = re.split(r"[<(]", _ANONYMOUS.sub("", name), maxsplit=1)[0].strip()
    return head.rsplit(" ", 1)[-1].rsplit("::", 1)[-1] or name
