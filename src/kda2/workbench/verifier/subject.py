"""What is judged: an implementation of the library, in a configuration of its own or the shipped one, or a file; for
the audit, a named mutant."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

import kda2
from kda2.contract import KernelConfig
from kda2.errors import InvalidValue
from kda2.workbench.verifier.foreign import Kernel, in_order, named_outputs, prepare_once

FILE, MUTANT, ORACLE = "file", "mutant", "oracle"
# The operator of a contract that came from a file.
IMPORTED = "imported"
# The fields of a gate, in their order.
_GATE = ("gate", "A_log", "dt_bias", "lower_bound")


@dataclass(frozen=True)
class Subject:
    """`impl` is an implementation's name, with `configs` by stage (None: as shipped), or "file": then `file` is a
    Python file with `run(**inputs)`, `sha256` its contents, and `stage` the stage of chunked KDA that it computes
    (None: the whole operator). Of a mutant, `file` is its name; of the oracle of an imported contract, its source.
    `op` is "kda", "kda_step", or `IMPORTED`.
    """

    impl: str
    configs: Mapping[str, Mapping[str, int]] | None = None
    file: str | None = None
    sha256: str | None = None
    stage: str | None = None
    op: str = "kda"

    @classmethod
    def of_file(cls, path: Path, stage: str | None = None, op: str = "kda") -> Subject:
        """The file as it is now. Raises `InvalidValue` if it cannot be read."""
        try:
            contents = path.read_bytes()
        except OSError as e:
            raise InvalidValue("FILE", "a Python file that can be read", f"{path}: {e.strerror}") from e
        return cls(FILE, file=str(path.resolve()), sha256=hashlib.sha256(contents).hexdigest(), stage=stage, op=op)

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


class Bound:
    """A subject that has been loaded: `call` runs it on the inputs of a call, `read` finds its outputs in what came."""

    is_strange = False

    def prepare(self, given: Mapping[str, Any]) -> None:
        """What may be done once for a set of shapes, off every clock."""

    def call(self, given: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def read(self, got: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
        return {name: x for name, x in zip(names, got, strict=False) if x is not None}


class _File(Bound):
    is_strange = True

    def __init__(self, kernel: Kernel, arguments: tuple[str, ...], op: str) -> None:
        self.kernel, self.arguments, self.op = kernel, arguments, op
        self._prepared: set[tuple[Any, ...]] = set()

    def inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {name: given[name] for name in self.arguments}

    def prepare(self, given: Mapping[str, Any]) -> None:
        prepare_once(self.kernel, self.inputs(given), self._prepared)

    def call(self, given: Mapping[str, Any]) -> Any:
        return self.kernel.run(**self.inputs(given))

    def read(self, got: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
        return named_outputs(in_order(got, names) if self.op == IMPORTED else got, names)


class _Library(Bound):
    """`run` takes the arguments of the operator's public call."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def call(self, given: Mapping[str, Any]) -> Any:
        return self.run(**public(given))


def bound(subject: Subject, arguments: tuple[str, ...]) -> Bound:
    """Load the subject; a file's `run` is called with `arguments`."""
    if subject.impl == FILE:
        return _File(kernel_of(subject), arguments, subject.op)
    if subject.impl == MUTANT:
        from kda2.testing.mutants import MUTANTS, STEP_MUTANTS

        mutants: Mapping[str, Any] = STEP_MUTANTS if subject.op == "kda_step" else MUTANTS
        return _Library(mutants[str(subject.file)].run)
    if subject.impl == ORACLE:
        module: dict[str, Any] = {}
        exec(compile(str(subject.file), "<oracle>", "exec"), module)
        return _File(Kernel(Path("<oracle>"), module["run"], None), arguments, IMPORTED)
    if subject.op == "kda_step":
        return _Library(partial(kda2.kda_step, impl=subject.impl, inplace=False))
    if subject.configs is None:
        return _Library(partial(kda2.kda, impl=subject.impl))
    from kda2.ops.kda import triton
    from kda2.testing.oracle import checked

    chosen = {stage: KernelConfig.from_dict(config) for stage, config in subject.configs.items()}
    return _Library(lambda **kwargs: triton.kda(checked(kwargs), chosen))


def public(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of kda2's own call for the inputs that a file gets: its gate is one object."""
    from kda2.ops.kda import Gate

    rest = {name: x for name, x in given.items() if name not in _GATE}
    return {**rest, "gate": Gate(*(given[name] for name in _GATE))}
