"""The exceptions kda2 raises. Each names the argument, what was wanted, what came and how to mend it."""

from __future__ import annotations


class KDA2Error(Exception):
    """Base of every exception that kda2 raises on purpose."""


class _BadArgument(KDA2Error):
    """A bad argument, as fields and as one sentence."""

    def __init__(self, argument: str, wanted: str, got: str, fix: str = "") -> None:
        self.argument, self.wanted, self.got, self.fix = argument, wanted, got, fix
        sentence = f"{argument} must be {wanted}, got {got}"
        super().__init__(f"{sentence}; {fix}" if fix else sentence)

    def __reduce__(self) -> tuple[type[_BadArgument], tuple[str, str, str, str]]:
        return type(self), (self.argument, self.wanted, self.got, self.fix)


class InvalidValue(_BadArgument, ValueError):
    """An argument has the wrong shape, device, layout or value."""


class InvalidType(_BadArgument, TypeError):
    """An argument has the wrong dtype or Python type."""


class UnsupportedTarget(KDA2Error, RuntimeError):
    """No implementation, or not the one named, runs on this hardware with these arguments."""


class MissingExtra(KDA2Error, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package, self.extra, self.purpose = package, extra, purpose
        super().__init__(f"{purpose} needs {package}; in kda2's checkout: pip install '.[{extra}]'")

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str, str]]:
        return type(self), (self.package, self.extra, self.purpose)
