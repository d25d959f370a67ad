"""What an implementation can serve, and what a call asks of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """The answer of a predicate: whether it holds, what was seen, what was wanted, how to mend it."""

    ok: bool
    observed: str = ""
    expected: str = ""
    hint: str = ""

    def __str__(self) -> str:
        sentence = f"{self.observed}, wants {self.expected}" if self.expected else self.observed
        return f"{sentence}; {self.hint}" if self.hint else sentence


@dataclass(frozen=True)
class Query:
    """The facts of one call that decide which implementations can serve it.

    `device` is torch's device type, `arch` the compute capability times ten (0 off CUDA), `interpreted` whether
    Triton's interpreter is on, `needs_grad` whether a gradient or a tangent is to flow or torch.func transforms the
    call.
    """

    op: str
    device: str
    arch: int
    interpreted: bool
    dtype: str
    K: int
    V: int
    needs_grad: bool
    deterministic: bool = False


@dataclass(frozen=True)
class Capability:
    """The limits of one implementation. `devices` names torch device types; "interpreter" stands for a CPU tensor
    under Triton's interpreter. `Ks` and `Vs` are the only numbers of channels that it serves, None for any up to
    `max_K` and `max_V`."""

    devices: frozenset[str]
    dtypes: frozenset[str]
    backward: bool
    min_arch: int = 0
    max_arch: int | None = None
    max_K: int | None = None
    max_V: int | None = None
    Ks: frozenset[int] | None = None
    Vs: frozenset[int] | None = None
    deterministic: bool = True

    def check(self, query: Query) -> Check:
        """The first limit that `query` exceeds, or an ok."""
        return next((c for c in self._checks(query) if not c.ok), Check(True))

    def channels(self, K: int, V: int) -> tuple[int, int]:
        """K and V, or, where only some numbers of channels are served, the least that hold them, else the largest."""

        def served(n: int, among: frozenset[int] | None) -> int:
            return n if among is None else min((m for m in among if m >= n), default=max(among))

        return served(K, self.Ks), served(V, self.Vs)

    def _other_device(self, q: Query) -> str:
        return (
            "TRITON_INTERPRET=1 turns the interpreter on" if "interpreter" in self.devices and q.device == "cpu" else ""
        )

    def _archs(self) -> str:
        oldest = f"{self.min_arch / 10}"
        if self.max_arch is None:
            return f"{oldest} or newer"
        return oldest if self.max_arch == self.min_arch else f"{oldest} to {self.max_arch / 10}"

    def _checks(self, q: Query) -> list[Check]:
        device = "interpreter" if q.device == "cpu" and q.interpreted and "cpu" not in self.devices else q.device
        wanted = " or ".join(sorted(self.devices))
        return [
            Check(device in self.devices, f"tensors are on {q.device}", wanted, self._other_device(q)),
            Check(
                device != "cuda" or (q.arch >= self.min_arch and (self.max_arch is None or q.arch <= self.max_arch)),
                f"compute capability {q.arch / 10}",
                self._archs(),
            ),
            Check(q.dtype in self.dtypes, f"dtype {q.dtype}", ", ".join(sorted(self.dtypes))),
            _channels("K", q.K, self.Ks, self.max_K),
            _channels("V", q.V, self.Vs, self.max_V),
            Check(
                self.backward or not q.needs_grad,
                "an input requires grad or has a tangent, or torch.func transforms the call",
                "no differentiation",
                "it has no derivatives: call it under torch.no_grad(), or use impl='torch'",
            ),
            Check(self.deterministic or not q.deterministic, "deterministic=True", "deterministic=False"),
        ]


def _channels(name: str, n: int, among: frozenset[int] | None, most: int | None) -> Check:
    if among is not None:
        return Check(n in among, f"{name} = {n}", " or ".join(map(str, sorted(among))))
    return Check(most is None or n <= most, f"{name} = {n}", f"at most {most}")


@dataclass(frozen=True)
class Implementation:
    """A named implementation of an op. `load` imports it and returns the function that takes the checked call and
    returns what the public one does: for `kda` from a `Call` (o, final state or None), for `kda_step` from a `StepCall`
    (o, state).

    The function may trust the call, but for contents that live on a GPU: offsets and slots outside their range may give
    wrong results there, and must never touch memory outside the tensors.
    """

    name: str
    capability: Capability
    load: Callable[[], Callable[[Any], Any]]
