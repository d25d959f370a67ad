"""Which implementation serves a call, and why each other one does not."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kda2.contract import Capability, Check, Implementation, Query
from kda2.errors import InvalidType, InvalidValue, UnsupportedTarget

# op -> implementations, in order of preference for impl="auto"
_REGISTRY: dict[str, tuple[Implementation, ...]] = {}
_explain_only = contextvars.ContextVar("kda2_explain_only", default=False)


def register(op: str, implementations: Sequence[Implementation]) -> None:
    """Make `implementations` of `op` available, the preferred one first, in place of those it had."""
    _REGISTRY[op] = tuple(implementations)
    explain_choice.cache_clear()


def registered(op: str) -> tuple[Implementation, ...]:
    """The implementations of `op`, the preferred one first. Raises `InvalidValue` before the op has been imported."""
    if op not in _REGISTRY:
        raise InvalidValue("op", f"one of {sorted(_REGISTRY)}", repr(op), "import its public call first, as kda2.kda")
    return _REGISTRY[op]


def capability(op: str, impl: str) -> Capability | None:
    """What an implementation of `op` serves; None for a name that it does not have, such as "auto"."""
    return next((i.capability for i in registered(op) if i.name == impl), None)


@dataclass(frozen=True)
class Explanation:
    """The choice for one call: `chosen` (None if nothing serves it) and a verdict per implementation, in order."""

    query: Query
    asked: str
    chosen: str | None
    verdicts: tuple[tuple[str, Check], ...]

    def __str__(self) -> str:
        q = self.query
        where = f"{q.device} sm_{q.arch}" if q.device == "cuda" else q.device
        lines = [f"{q.op} on {where}, {q.dtype}, K = {q.K}, V = {q.V}, impl = {self.asked!r}: {self.chosen or 'none'}"]
        width = max(len(name) for name, _ in self.verdicts)
        for name, check in self.verdicts:
            reason = "chosen" if name == self.chosen else f"refused: {check}" if not check.ok else self._passed_over()
            lines.append(f"  {name:<{width}}  {reason}")
        return "\n".join(lines)

    __repr__ = __str__

    def _passed_over(self) -> str:
        return "can serve; not asked for" if self.asked != "auto" else "can serve; a preferred one comes first"


@functools.lru_cache(maxsize=1024)
def explain_choice(query: Query, impl: str = "auto") -> Explanation:
    """Match every registered implementation of `query.op` against the call. Remembered: calls repeat."""
    verdicts = tuple((i.name, i.capability.check(query)) for i in registered(query.op))
    candidates = [name for name, check in verdicts if check.ok and impl in ("auto", name)]
    return Explanation(query, impl, candidates[0] if candidates else None, verdicts)


def choose(query: Query, impl: str = "auto") -> Implementation:
    """The implementation to run. Raises `InvalidValue` for an unknown name and `UnsupportedTarget` if the one named,
    or every one, refuses; nothing falls back silently."""
    by_name = {i.name: i for i in registered(query.op)}
    if not isinstance(impl, str):
        raise InvalidType("impl", "a str", type(impl).__name__)
    if impl != "auto" and impl not in by_name:
        raise InvalidValue("impl", f"'auto' or one of {sorted(by_name)}", repr(impl))
    explanation = explain_choice(query, impl)
    if _explain_only.get():
        raise _Explained(explanation)
    if explanation.chosen is None:
        none = "no implementation serves this call"
        if impl != "auto":
            none = f"impl={impl!r} does not serve this call: {dict(explanation.verdicts)[impl]}"
        raise UnsupportedTarget(f"{none}\n{explanation}")
    return by_name[explanation.chosen]


class _Explained(Exception):
    """Carries the explanation out of a call that is only to be explained."""

    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What `function(*args, **kwargs)` would run, and why each other implementation is refused.

    `function` is one of the public calls, e.g. `print(kda2.explain(kda2.kda, q, k, v, g, beta))`. The arguments are
    checked as the call would check them; nothing is launched. Raises what the checks raise.
    """
    if not callable(function):
        raise InvalidType("function", "a public call of kda2", type(function).__name__, "pass kda2.kda")
    token = _explain_only.set(True)
    try:
        function(*args, **kwargs)
    except _Explained as e:
        return e.explanation
    finally:
        _explain_only.reset(token)
    raise InvalidType("function", "a public call of kda2, or one that makes it", f"{function!r}", "pass kda2.kda")
