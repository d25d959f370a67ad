"""The process that runs a file holds what it was given, and nothing that knows what is right."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kda2.workbench.verifier import Children, Conditions, Limits, Subject
from kda2.workbench.verifier.numerics import Interview
from kda2.workbench.verifier.process import Child
from kda2.workbench.verifier.questions import AGAIN, pose

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

SIZES = {"T": 20, "B": 2, "H": 1, "HV": 2, "K": 16, "V": 12}
# Modules that know what is right, or that judge.
KNOWING = ("kda2.testing", "kda2.ops.kda.reference", "kda2.workbench.verifier.questions",
           "kda2.workbench.verifier.numerics", "kda2.workbench.capture")  # fmt: skip
# Writes down what a file can find in its process: modules, tensors, and the bytes of every file that is open.
LOOK = """


def look():
    import gc, os, stat, sys

    held = b""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found = os.stat(f"/proc/self/fd/{descriptor}")
            if stat.S_ISREG(found.st_mode):
                held += os.pread(int(descriptor), found.st_size, 0)
        except OSError:
            pass
    dtypes = sorted({str(x.dtype) for x in gc.get_objects() if isinstance(x, torch.Tensor)})
    seen.append({"modules": sorted(sys.modules), "dtypes": dtypes, "held": held})
    torch.save(seen, __file__ + ".seen")


seen = []


def run(**inputs):
    look()
    return compute(**inputs)
"""


class Asked:
    """A child that has answered a probe and those that follow it, and still lives."""

    def __init__(self, child: Child, path: Path) -> None:
        on, subject = _conditions(), Subject.of_file(path)
        results = dict(Interview(child, subject, on).ask(["random"]))
        assert list(results) == ["random", *AGAIN] and all(r["ok"] for r in results.values()), results
        self.pid = child.pid
        self.trials: list[Any] = [pose(on, subject, "random")]
        self.trials += [pose(on, subject, name, "random") for name in AGAIN]
        self.seen: list[dict[str, Any]] = torch.load(f"{path}.seen", weights_only=False)

    def given(self) -> list[Tensor]:
        return [q.inputs[0]["v"] for q in self.trials]

    def wanted(self) -> list[Tensor]:
        return [x for q in self.trials for x in q.trial.want]


def _conditions() -> Conditions:
    return Conditions(
        arch=90, device="cpu", capture=None, tokens=None, families=("random",), sizes=SIZES, seed=3, limits=Limits(120)
    )  # fmt: skip


@pytest.fixture(scope="module")
def asked(shared: Any, plain: str) -> Iterator[Asked]:
    path = shared.file(plain.replace("def run(", "def compute(") + LOOK)
    with Child(Children(), limits=Limits(120)) as child:
        yield Asked(child, path)


def raw(x: Tensor) -> bytes:
    return x.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def memory_of(pid: int) -> Iterator[bytes]:
    """What a process may write to, in parts; what it only maps from files is left out."""
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for line in maps:
                found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
                if found is None or "[v" in line:
                    continue
                start, end = (int(x, 16) for x in found.groups())
                memory.seek(start)
                yield memory.read(end - start)
    except PermissionError:
        pytest.skip("this user may not read a process's memory")


def test_no_module_there_knows_what_is_right(asked: Asked) -> None:
    assert len(asked.seen) == 3
    for seen in asked.seen:
        assert "kda2.workbench.verifier.runner" in seen["modules"]
        assert [m for m in seen["modules"] if m.startswith(KNOWING)] == []


def test_no_tensor_there_is_in_fp64(asked: Asked) -> None:
    for seen in asked.seen:
        assert "torch.bfloat16" in seen["dtypes"] and "torch.float64" not in seen["dtypes"]


def test_the_files_that_are_open_hold_inputs_alone(asked: Asked) -> None:
    for i, seen in enumerate(asked.seen):
        assert raw(asked.given()[i]) in seen["held"]
        for want in asked.wanted():
            assert raw(want) not in seen["held"] and raw(want.bfloat16()) not in seen["held"]


def test_its_memory_holds_no_expected_value(asked: Asked) -> None:
    wanted = [x for want in asked.wanted() for x in want.flatten(0, -2)[[0, -1]]]
    assert len(wanted) == 12 and {x.dtype for x in wanted} == {torch.float64}
    rows = [raw(x) for x in (asked.given()[-1][0, 0, 0], *wanted)]
    held = [any(row in part for row in rows[:1]) for part in memory_of(asked.pid)]
    assert any(held)  # what it was given is found there
    assert not any(row in part for part in memory_of(asked.pid) for row in rows[1:])
