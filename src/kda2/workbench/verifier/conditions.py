"""What subjects are judged on, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kda2.dispatch import capability
from kda2.workbench.verifier.process import Limits
from kda2.workbench.verifier.subject import FILE, Subject

CAPTURE = "captured call"


@dataclass(frozen=True)
class Conditions:
    """What subjects are judged on: the captured call (None for none), its first `tokens` (None: all), probe families
    and their sizes (fields of `kda2.testing.Problem`, axes of a contract that came from a file), the architecture to
    build for, and where to run; see `of`. `spec`: the file of a contract, where it is not one of kda2's own;
    `timed_sizes`: those of the call that is timed where none was captured."""

    arch: int
    device: str
    capture: str | None
    tokens: int | None
    families: tuple[str, ...]
    sizes: Mapping[str, Any]
    seed: int
    limits: Limits = Limits()  # noqa: RUF009 - frozen
    variant_tokens: int | None = None
    file_sizes: Mapping[str, Any] = field(default_factory=dict)
    spec: str | None = None
    timed_sizes: Mapping[str, Any] = field(default_factory=dict)

    def of(self, subject: Subject, derived: bool) -> Conditions:
        """The conditions of one subject: a file gets sizes of its own and the whole captured call, what was derived
        from another candidate `variant_tokens` of it, and an implementation that serves some sizes only gets those."""
        if subject.impl == FILE:
            return replace(self, tokens=None, sizes=self.file_sizes or self.sizes)
        own = replace(self, sizes=served_sizes(subject.impl, self.sizes))
        return replace(own, tokens=self.variant_tokens) if derived else own

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def probes(self) -> tuple[str, ...]:
        """The families, after the captured call if there is one."""
        return (*([CAPTURE] if self.capture is not None else []), *self.families)


def served_sizes(impl: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of probes with K and V replaced by those that an implementation serves, if it serves only some."""
    limits, found = capability("kda", impl), dict(sizes)
    if limits is not None and {"K", "V"} <= found.keys():
        found["K"], found["V"] = limits.channels(found["K"], found["V"])
    return found
