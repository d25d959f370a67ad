"""What is judged: an implementation of the library, in a configuration of its own or the shipped one, or a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import kda2
from kda2.contract import KernelConfig
from kda2.errors import InvalidValue
from kda2.testing import checked
from kda2.testing.oracle import Outputs
from kda2.workbench.verifier.foreign import Kernel, as_call

FILE = "file"


@dataclass(frozen=True)
class Subject:
    """`impl` is an implementation's name, with `configs` by stage (None: as shipped), or "file": then `file` is a
    Python file with `run(**inputs)`, `sha256` its contents, and `stage` the stage of chunked KDA that it computes
    (None: the whole operator)."""

    impl: str
    configs: Mapping[str, Mapping[str, int]] | None = None
    file: str | None = None
    sha256: str | None = None
    stage: str | None = None

    @classmethod
    def of_file(cls, path: Path, stage: str | None = None) -> Subject:
        """The file as it is now. Raises `InvalidValue` if it cannot be read."""
        try:
            contents = path.read_bytes()
        except OSError as e:
            raise InvalidValue("FILE", "a Python file that can be read", f"{path}: {e.strerror}") from e
        return cls(FILE, file=str(path.resolve()), sha256=hashlib.sha256(contents).hexdigest(), stage=stage)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Subject:
        return cls(**plain)


def kernel_of(subject: Subject) -> Kernel:
    """Import the subject's file."""
    assert subject.file is not None and subject.sha256 is not None
    return Kernel.load(Path(subject.file), subject.sha256)


def runner(subject: Subject) -> Callable[..., Outputs]:
    """The subject as a function of `kda2.kda`'s arguments."""
    if subject.impl == FILE:
        return as_call(kernel_of(subject))
    if subject.configs is None:
        return partial(kda2.kda, impl=subject.impl)
    from kda2.ops.kda import triton

    chosen = {stage: KernelConfig.from_dict(config) for stage, config in subject.configs.items()}
    return lambda **kwargs: triton.kda(checked(kwargs), chosen)
