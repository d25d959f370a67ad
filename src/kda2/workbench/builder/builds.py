"""Many kernels compiled offline, failures among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kda2.backends.triton.build import Build, BuildError, build
from kda2.backends.triton.launch import Launch


@dataclass(frozen=True)
class BuildFailure:
    """A kernel that does not compile, and what the compiler said."""

    stage: str
    arch: int
    words: str


# Told after each build: how many are done, how many there are, and the newest.
Progress = Callable[[int, int, Build | BuildFailure], None]


def build_all(launches: Sequence[Launch], arch: int, progress: Progress | None = None) -> list[Build | BuildFailure]:
    """Compile every launch for sm_<arch>, in order; a kernel that does not compile is a `BuildFailure` in its place.

    Raises `UnsupportedTarget` under Triton's interpreter, where nothing can be compiled.
    """
    outcomes: list[Build | BuildFailure] = []
    for launch in launches:
        try:
            outcomes.append(build(launch, arch))
        except BuildError as e:
            outcomes.append(BuildFailure(e.stage, e.arch, e.words))
        if progress is not None:
            progress(len(outcomes), len(launches), outcomes[-1])
    return outcomes
