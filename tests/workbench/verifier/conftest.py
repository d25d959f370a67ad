"""Kernels as files, and children that judge many of them: each takes seconds to start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kda2.workbench.records import Verdict
from kda2.workbench.verifier import Children, Conditions, Limits, Subject, stages
from kda2.workbench.verifier.process import Child
from kda2.workbench.verifier.words import reasons

KERNELS = Path(__file__).parent / "kernels"
# Two value heads show a mistake in one of them; 70 tokens are two whole chunks of 32 and a partial one.
SIZES = {"T": 70, "H": 1, "HV": 2, "K": 16, "V": 16}


class Shared:
    """Judges files in two long-lived children, through the ladder's own code."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.children = folder, Children()
        self._kept: dict[bool, Child] = {}

    def file(self, text: str, name: str = "kernel.py") -> Path:
        """A file of its own folder, so that no test reads another's."""
        folder = self.folder / str(len(list(self.folder.iterdir())))
        folder.mkdir()
        (folder / name).write_text(text)
        return folder / name

    def code(self, path: Path | Subject, stage: str | None = None, **changes: Any) -> dict[str, Verdict]:
        subject = path if isinstance(path, Subject) else Subject.of_file(path, stage)
        found = stages.code(self._child(False), subject, conditions(**changes))
        return {v.stage: v for v in found}

    def numerics(self, path: Path | Subject, *families: str, stage: str | None = None, **changes: Any) -> Verdict:
        subject = path if isinstance(path, Subject) else Subject.of_file(path, stage)
        on = conditions(families=families or ("random",), **changes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stages, "Child", lambda _, interpreted, limits: self._lent(interpreted))
            return stages.numerics(self.children, subject, on, lambda _: None)

    def says(self, path: Path, *families: str, stage: str | None = None) -> tuple[str, str]:
        """The outcome on a whole line, and the first reason for it."""
        verdict = self.numerics(path, *families, stage=stage)
        return verdict.outcome, reasons(verdict)[0]

    def _lent(self, interpreted: bool) -> contextlib.AbstractContextManager[Child]:
        return contextlib.nullcontext(self._child(interpreted))

    def _child(self, interpreted: bool) -> Child:
        if interpreted not in self._kept or not self._kept[interpreted].alive:
            self._kept[interpreted] = Child(self.children, interpreted=interpreted, limits=Limits(120))
        return self._kept[interpreted]


def conditions(**changes: Any) -> Conditions:
    fields: dict[str, Any] = {
        "arch": 90, "device": "cpu", "capture": None, "tokens": None, "families": ("random",), "sizes": SIZES,
        "seed": 3, "limits": Limits(120),
    }  # fmt: skip
    return Conditions(**(fields | changes))


@pytest.fixture(name="conditions")
def _conditions() -> Callable[..., Conditions]:
    return conditions


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    judge = Shared(tmp_path_factory.mktemp("kernels"))
    yield judge
    judge.children.kill()


@pytest.fixture(scope="session")
def plain() -> str:
    """The right kernel in plain torch."""
    return (KERNELS / "plain.py").read_text()


@pytest.fixture(scope="session")
def recurrent() -> str:
    """The right kernel in Triton."""
    return (KERNELS / "recurrent.py").read_text()


@pytest.fixture(scope="session")
def changed() -> Callable[..., str]:
    """`changed(text, old, new, ...)`: the text with each old part, which must be there, replaced."""

    def change(text: str, *pairs: str) -> str:
        for old, new in zip(pairs[::2], pairs[1::2], strict=True):
            assert old in text, old
            text = text.replace(old, new)
        return text

    return change
