"""What a command names, as a function of `kda2.kda`'s arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

import kda2
from kda2.dispatch import registered
from kda2.errors import InvalidValue, KDA2Error
from kda2.testing.oracle import Outputs
from kda2.workbench.verifier import Children, Limits, Subject
from kda2.workbench.verifier.foreign import REFUSED, Kernel, named_outputs, prepare_once
from kda2.workbench.verifier.process import Child
from kda2.workbench.verifier.questions import OUTPUTS, argument_names, call_inputs
from kda2.workbench.verifier.subject import kernel_of

Run = Callable[..., Outputs]


def named(what: str) -> tuple[str, Run]:
    """The name and the function of an implementation, or of a Python file with `run(**inputs)`, which is imported into
    this process. Raises `InvalidValue` if it is neither."""
    names = [i.name for i in registered("kda")]
    if what in names:
        return what, partial(kda2.kda, impl=what)
    if not what.endswith(".py"):
        raise InvalidValue("WHAT", f"a Python file, or one of {', '.join(names)}", repr(what))
    return Path(what).name, _of_file(kernel_of(Subject.of_file(Path(what))))


def _of_file(kernel: Kernel) -> Run:
    prepared: set[tuple[Any, ...]] = set()

    def run(**kwargs: Any) -> Outputs:
        inputs = call_inputs(kwargs)
        prepare_once(kernel, inputs, prepared)
        found = named_outputs(kernel.run(**inputs), OUTPUTS)
        return found["o"], found["final_state"] if kwargs.get("output_final_state") else None

    return run


@contextlib.contextmanager
def answering(what: str, where: str) -> Iterator[tuple[str, Run]]:
    """As `named`, but a file runs in a process of its own, which answers for it as long as the block lasts. What it
    raises, and how it ends, is raised here."""
    if not what.endswith(".py"):
        yield named(what)
        return
    subject = Subject.of_file(Path(what))
    with Child(Children(), interpreted=not where.startswith("cuda"), limits=Limits()) as child:
        yield Path(what).name, _by_child(child, subject, where)


def _by_child(child: Child, subject: Subject, where: str) -> Run:
    task = {
        "kind": "call", "subject": subject.plain(), "arguments": argument_names(subject), "outputs": OUTPUTS,
        "in_place": (), "device": where,
    }  # fmt: skip

    def run(**kwargs: Any) -> Outputs:
        given = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in call_inputs(kwargs).items()}
        said = list(child.ask(task, given))[-1]
        if "ended" in said:
            raise (NotImplementedError if said["ended"] == REFUSED else KDA2Error)(said["says"])
        found = {name: x.to(where) for name, x in child.answer().items()}
        if wrong := "; ".join(f"{gate}: {says}" for gate, says in said["gates"].items()):
            raise KDA2Error(wrong)
        return found["o"], found["final_state"] if kwargs.get("output_final_state") else None

    return run
